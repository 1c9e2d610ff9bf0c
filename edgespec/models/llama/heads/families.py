"""The families of heads that a llama.cpp build may be able to draft with.

Apart from `heads.support`, which tries them and needs llama.cpp.
"""

from __future__ import annotations

from enum import Enum


class HeadFamily(Enum):
    """A family of heads; the values are the modules, below `edgespec.models.llama`, that try one."""

    EAGLE = "heads.trial"
    BLOCKS = "heads.blocks.trial"
    MTP = "trials.mtp_trial"
    ASSISTANTS = "trials.assistant_trial"

    @property
    def title(self) -> str:
        """The name of such heads, for people."""
        return _TITLES[self]


_TITLES = {
    HeadFamily.EAGLE: "heads",
    HeadFamily.BLOCKS: "block heads",
    HeadFamily.MTP: "MTP layers",
    HeadFamily.ASSISTANTS: "assistants",
}
