"""The part of a long text that the drafter reads, and the cells that this takes."""

from __future__ import annotations

import math

from edgespec.config import Config
from edgespec.drafters.draft_sequence import WHOLE, DraftWindow
from edgespec.models.gguf.experts import multiplied
from edgespec.models.gguf.footprint import cells_for, query_elements
from edgespec.models.gguf.layers import ModelFiles

_SHARE = 1 / 3  # of the weights' multiplications in a draft step: what attention may add, about
_LEAST, _MOST = 1024, 1 << 16  # tokens of a window that nobody asked for
_SEQUENCES = 4  # long sequences that are drafted for together and have room


def draft_window(config: Config, drafter: ModelFiles) -> DraftWindow:
    """The part of long texts that a draft model reads.

    A step of a model with a running state costs the same behind any text, and no part of what it has read can
    be taken out. So it reads whole texts.
    """
    asked = config.speculation.draft_window
    if asked == 0 or drafter.headers[0].keeps_running_state:
        return WHOLE
    return DraftWindow(usual_window(drafter) if asked is None else asked)


def usual_window(drafter: ModelFiles) -> int:
    """Latest tokens that a model reads if no number is given: a power of two.

    Attention multiplies twice with each cell for every element of a query. The window is so long that this
    takes about a third of what the weights take, so it is longer for larger models.
    """
    queries = query_elements(drafter.headers[0])
    if not queries:
        return _LEAST
    products = sum(share * math.prod(tensor.shape) for tensor, share in multiplied(drafter))
    tokens = _SHARE * products / (2 * queries)
    return int(min(max(2 ** round(math.log2(max(tokens, 1))), _LEAST), _MOST))


def drafter_cells(config: Config, drafter: ModelFiles) -> int:
    """Cells of the cache of a model that drafts for one sequence, or for a few long ones."""
    most = min(config.model.context, _SEQUENCES * draft_window(config, drafter).most)
    return cells_for(most, config.speculation.tree_budget or 0)
