"""How much of a long text the drafter reads, and the cells that this takes."""

from __future__ import annotations

import math

from edgespec.config import Config
from edgespec.drafters.window import WHOLE, DraftWindow
from edgespec.models.gguf.footprint import cells_for, query_elements
from edgespec.models.gguf.layers import LOOKED_UP, ModelFiles

_SHARE = 1 / 3  # of the weights' multiplications in a draft step: what attention may add, about
_LEAST, _MOST = 1024, 1 << 16  # tokens of a window that nobody asked for
_SEQUENCES = 4  # long sequences that are drafted for together and have room


def draft_window(config: Config, drafter: ModelFiles) -> DraftWindow:
    """What a model that drafts reads of long texts.

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
    tokens = _SHARE * _weight_products(drafter) / (2 * queries)
    return int(min(max(2 ** round(math.log2(max(tokens, 1))), _LEAST), _MOST))


def drafter_cells(config: Config, drafter: ModelFiles) -> int:
    """Cells of the cache of a model that drafts for one sequence, or for a few long ones."""
    most = min(config.model.context, _SEQUENCES * draft_window(config, drafter).most)
    return cells_for(most, config.speculation.tree_budget or 0)


def _weight_products(files: ModelFiles) -> float:
    """Multiplications of one row with the weights; of experts, with those that it uses."""
    tensors = {tensor.name: tensor.shape for header in files.headers for tensor in header.tensors}
    metadata, name = files.headers[0].metadata, files.headers[0].architecture
    experts, used = metadata.get(f"{name}.expert_count"), metadata.get(f"{name}.expert_used_count")
    share = used / experts if isinstance(experts, int) and isinstance(used, int) and experts else 1.0
    looked_up = {LOOKED_UP} | ({"token_embd.weight"} if "output.weight" in tensors else set())
    return sum(
        math.prod(shape) * (share if len(shape) == 3 else 1.0)
        for tensor, shape in tensors.items()
        if len(shape) > 1 and tensor not in looked_up
    )
