"""Checks whether a drafter can serve a target and how well, and remembers the pair."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.base.progress import Progress
from edgespec.base.units import readable
from edgespec.drafters.translation import Translation
from edgespec.errors import PairingError, UsageError
from edgespec.heads.families import head_recipe
from edgespec.llama.tokenizer.compatibility import CompatibilityCheck, compare
from edgespec.models.gguf.head_family import head_family
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub import catalog
from edgespec.models.hub.registry import MADE, REGISTERED, DrafterPair, PairRegistry, drafters_folder

_HEAD_CHECK = "hidden states"


@dataclass(frozen=True)
class PairCheck:
    target: Path
    drafter: Path
    checks: tuple[CompatibilityCheck, ...]
    fits: bool  # the drafter can draft for the target
    pair: DrafterPair | None  # what was remembered; None if the drafter does not fit
    shared: int | None = None  # tokens that both have, if their vocabularies differ

    @property
    def conclusion(self) -> str:
        """One sentence for people."""
        if not self.fits and any(check.name == _HEAD_CHECK for check in self.checks):
            return "Their vocabularies differ, so this head cannot draft for this target."
        if not self.fits:
            return (
                "Their vocabularies have no token in common, so it cannot draft for this target. "
                f"Make a drafter: edgespec draft make {self.target}"
            )
        match = "They match" if self.shared is None else f"They differ; {self.shared:,} tokens are in both"
        if self.pair is None or self.pair.top1 is None or self.pair.top4 is None:
            return f"{match}; saved as a pair: --draft auto uses this drafter."
        return (
            f"{match}, and agree on {self.pair.top1:.0%} of tokens at once and on {self.pair.top4:.0%} "
            f"within four ({self.pair.tokens} tokens). Saved as a pair: --draft auto uses this drafter."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "target": str(self.target),
            "drafter": str(self.drafter),
            "fits": self.fits,
            "shared_tokens": self.shared,
            "checks": [asdict(check) for check in self.checks],
            "agreement": {"top1": self.pair.top1, "top4": self.pair.top4, "tokens": self.pair.tokens}
            if self.pair is not None and self.pair.top1 is not None
            else None,
        }


def examine_pair(
    target: str, drafter: str, *, measure_agreement: bool, on_progress: Progress | None = None
) -> PairCheck:
    """Compare the vocabularies; if the drafter can draft, measure the agreement and remember the pair."""
    paths = [catalog.find(target, on_progress), catalog.find(drafter, on_progress)]
    headers = [read_header(path) for path in paths]
    head = head_family(headers[1]) is not None
    if not head:
        check_sizes(*headers)
    else:
        from edgespec.planning.files import read_drafter

        read_drafter(paths[1], ModelFiles.of(headers[0]))
    from edgespec.llama.runtime.model import Model

    with Model(paths[0], vocabulary_only=True) as large, Model(paths[1], vocabulary_only=True) as small:
        checks = tuple(compare(large.vocabulary, small.vocabulary))
        differ = any(check.needed and not check.passed for check in checks)
        shared = Translation(large.vocabulary, small.vocabulary).n_shared if differ and not head else None
    if head:
        checks += (
            CompatibilityCheck(_HEAD_CHECK, True, True, "the head was made for a target like this one"),
        )
    if differ and not shared:
        return PairCheck(paths[0], paths[1], checks, fits=False, pair=None)
    kind = MADE if drafters_folder() in paths[1].absolute().parents else REGISTERED
    recipe = head_recipe(headers[1])
    pair = DrafterPair(headers[0].fingerprint, paths[0].name, str(paths[1].absolute()), kind, recipe=recipe)
    if measure_agreement and not head:  # what a head would write alone says nothing
        from edgespec.drafting.agreement import measure

        found = measure(paths[0], paths[1], on_progress)
        pair = DrafterPair(**asdict(pair) | {"top1": found.top1, "top4": found.top4, "tokens": found.tokens})
    PairRegistry().add(pair)
    return PairCheck(paths[0], paths[1], checks, fits=True, pair=pair, shared=shared)


def check_sizes(target: GGUFHeader, drafter: GGUFHeader) -> None:
    """Refuse a drafter that is as large as its target."""
    if target.path.resolve() == drafter.path.resolve():
        raise UsageError(f"{target.path.name} would draft for itself.", "Name a smaller model.")
    sizes = [sum(path.stat().st_size for path in split_paths(h)) for h in (target, drafter)]
    if sizes[1] > sizes[0]:
        raise PairingError(
            f"The drafter {drafter.path.name} ({readable(sizes[1])}) is larger than its target "
            f"{target.path.name} ({readable(sizes[0])}).",
            "Name the large model first, and then the small one.",
        )
