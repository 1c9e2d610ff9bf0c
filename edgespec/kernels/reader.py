"""The structures that `kernels.watch` and its compiled part share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from edgespec.kernels.ggml import Address

Handler = Callable[[Address, int, int], int]
"""Called with a node, the number of a watch, and 1 before the node is computed: the result says whether the
graph is to stop after it. Called with 0 when the graph has stopped after the node. A negative result ends the
pass."""


class TensorReader(NamedTuple):
    """A node that reads a tensor which is watched.

    Attributes:
        at: the node's number in the order of asking.
        before: the name of the node before it.
    """

    at: int
    name: bytes
    before: bytes
    tensor: Address
