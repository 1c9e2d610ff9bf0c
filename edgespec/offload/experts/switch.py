"""Switching experts while a graph is computed: a layer's router chooses them, then they are brought.

The graph stops behind the node that holds the numbers of the chosen experts. When these experts are in the
pool, the products that follow are told in which slots. Everything else that depends on the choice (the
weights of the experts, and their biases) continues with the real numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgespec.base.option import named
from edgespec.errors import BackendError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, Indices
from edgespec.kernels.watch import Watch
from edgespec.llama.runtime.graph import GraphObserver
from edgespec.offload.experts.pool import ExpertPool

CHOICE = b"ffn_moe_topk-"  # llama.cpp's name for the chosen experts; the layer's number follows

_SATURATED = 4  # choices for each expert of a layer, from which on nearly all of its experts are needed


class UnknownRouting(BackendError):
    """The model's graph does not say which experts it chooses, so whole layers must be streamed."""

    def __init__(self, layer: int) -> None:
        super().__init__(
            f"Layer {layer} chooses its experts in an unknown way.",
            f"Use {named('experts', 'never')}, which streams whole layers.",
        )


class ExpertSwitch(GraphObserver):
    """Brings the experts that each layer's router has chosen.

    Args:
        stacks: layer to the addresses of the stacks of its experts.
        n_experts: layer to how many it has.
    """

    def __init__(
        self,
        pool: ExpertPool,
        stacks: Mapping[int, Sequence[Address]],
        n_experts: Mapping[int, int],
    ) -> None:
        self._pool = pool
        self._n_experts = n_experts
        self._layer_of = {stack: layer for layer, found in stacks.items() for stack in found}
        order = sorted(stacks)
        self._next = dict(pairwise(order))
        self._indices = {layer: Indices() for layer in order}
        self._choices = {CHOICE + b"%d" % layer: layer for layer in order}
        self.watch = Watch()
        for name in self._choices:
            self.watch.stop_after(name)
        for stack, layer in self._layer_of.items():
            self.watch.redirect(ggml.indexed_product(), stack, layer, self._indices[layer].address)
        self._stop_asked: Callable[[], bool] = lambda: False
        self._padding = 0
        self._chosen: set[int] = set()  # layers whose routers have chosen in this pass

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        self._stop_asked, self._padding = stop, padding
        self._chosen.clear()
        self._pool.next_pass()

    def reached(self, node: Address) -> bool:
        """A product that chooses by something else than the tensor that its layer's router has computed.

        That may be a copy of this tensor, if the router is on a device. All other products find their experts
        in the pool: the watch redirects them.
        """
        layer = self._layer_of[ggml.stack_of(node)]
        if layer not in self._chosen or ggml.copied_name(ggml.indices_of(node)) != CHOICE + b"%d" % layer:
            raise UnknownRouting(layer)
        ggml.set_indices(node, self._indices[layer].address)
        return False

    def computed(self, node: Address) -> None:
        """A layer's router has chosen."""
        self._bring(self._choices[ggml.name_of(node)], node)

    def _bring(self, layer: int, node: Address) -> None:
        chosen = ggml.read_indices(node)
        rows = len(chosen)
        # Rows of padding are computed with the first row's experts: what comes of them is not used.
        used = rows - self._padding if rows > self._padding else rows
        if used == 1:
            experts: list[int] = chosen[0].tolist()
            self._pool.request(layer, experts, [1.0] * len(experts))
            self._indices[layer].assign(node, [self._pool.acquire(self._stop_asked)] * rows)
        else:
            slots = self._slots_for_rows(layer, node, chosen, used) if chosen.size else chosen
            self._indices[layer].assign(node, slots)
        self.watch.set_choice(layer, node)
        self._chosen.add(layer)

    def _slots_for_rows(
        self, layer: int, node: Address, chosen: NDArray[np.int32], used: int
    ) -> NDArray[np.int32]:
        """(rows, chosen) the slots of the experts that several rows have chosen."""
        n_experts = self._n_experts[layer]
        counts = np.bincount(chosen[:used].ravel(), minlength=n_experts)
        experts = np.flatnonzero(counts)
        slot_of = np.zeros(n_experts, np.int32)
        self._pool.request(layer, experts.tolist(), (counts[experts] / used).tolist())
        self._look_ahead(layer, chosen[:used].size)
        slot_of[experts] = self._pool.acquire(self._stop_asked)
        slots: NDArray[np.int32] = slot_of[chosen]
        slots[used:] = slots[0]
        return slots

    def _look_ahead(self, layer: int, n_chosen: int) -> None:
        """Begin to read the next layer's experts, if so many choices need nearly all of them."""
        following = self._next.get(layer)
        if following is not None and n_chosen >= _SATURATED * self._n_experts[following]:
            self._pool.read_ahead(following)
