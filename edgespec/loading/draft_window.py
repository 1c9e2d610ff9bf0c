"""How much of a long text the drafter reads, and the cells that this takes."""

from __future__ import annotations

from edgespec.config import Config
from edgespec.drafters.window import WHOLE, DraftWindow
from edgespec.models.gguf.footprint import cells_for

AUTO_WINDOW = 4096
"""Latest tokens that are read if no number is given."""

_SEQUENCES = 4  # long sequences that are drafted for together and have room


def draft_window(config: Config, *, keeps_running_state: bool = False) -> DraftWindow:
    """What a model that drafts reads of long texts.

    Args:
        keeps_running_state: a step of such a model costs the same behind any text, and no part of what it has
            read can be taken out.
    """
    asked = config.speculation.draft_window
    if asked == 0 or keeps_running_state:
        return WHOLE
    return DraftWindow(AUTO_WINDOW if asked is None else asked)


def drafter_cells(config: Config) -> int:
    """Cells of the cache of a model that drafts for one sequence, or for a few long ones."""
    most = min(config.model.context, _SEQUENCES * draft_window(config).most)
    return cells_for(most, config.speculation.tree_budget or 0)
