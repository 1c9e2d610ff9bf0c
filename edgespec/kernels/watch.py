"""Watching nodes of a compute graph: the eval callback calls Python only at those of interest.

llama.cpp asks its eval callback about every node, some fifteen hundred in a pass, before it computes a run of
nodes. A `Gate` is that callback. It answers by its watches, and calls its handler only where one of them says
so. Both are compiled with EdgeSpec's own kernels (`native/watch.cpp`).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from edgespec.kernels.ggml import Address, UnsupportedBuild
from edgespec.kernels.native.library import compiled_functions

Handler = Callable[[Address, int, int], int]
"""Called with a node, the number of a watch, and 1 before the node is computed: the result says whether the
graph is to stop after it. Called with 0 when the graph has stopped after the node. A negative result ends the
pass."""

_NAME_BYTES = 64
_P, _I = ctypes.c_void_p, ctypes.c_int
_HANDLER = ctypes.CFUNCTYPE(_I, _P, _I, _I)


class TensorReader(NamedTuple):
    """A node that reads a tensor which is watched."""

    at: int  # the node's number in the order of asking
    name: bytes
    before: bytes  # the name of the node before it
    tensor: Address


class _ReaderRecord(ctypes.Structure):
    _fields_ = [
        ("tensor", _P),
        ("at", ctypes.c_int32),
        ("name", ctypes.c_char * _NAME_BYTES),
        ("before", ctypes.c_char * _NAME_BYTES),
    ]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "watch_new": (_P, []),
    "watch_free": (None, [_P]),
    "watch_name": (None, [_P, ctypes.c_char_p, _I]),
    "watch_operation": (None, [_P, ctypes.c_int32, ctypes.c_int64]),
    "watch_numbers": (None, [_P]),
    "watch_tensor": (None, [_P, _P, ctypes.c_int32]),
    "watch_no_tensor": (None, [_P, _P]),
    "watch_current": (None, [_P, ctypes.c_int32]),
    "watch_copies": (None, [_P, ctypes.c_char_p, _P]),
    "watch_mark": (None, [_P, ctypes.c_int32, ctypes.c_char_p, _I, _I]),
    "watch_unmark": (None, [_P]),
    "watch_pending": (_I, [_P]),
    "watch_reader": (ctypes.POINTER(_ReaderRecord), [_P, _I]),
    "watch_at": (ctypes.c_int32, [_P]),
    "watch_redirect": (None, [_P, ctypes.c_int32, _P, ctypes.c_int32, _P]),
    "watch_choice": (None, [_P, ctypes.c_int32, _P]),
    "gate_new": (_P, [_HANDLER]),
    "gate_free": (None, [_P]),
    "gate_watches": (None, [_P, ctypes.POINTER(_P), _I]),
    "gate_begin": (None, [_P]),
}


@cache
def _functions() -> dict[str, Any]:
    """The library's functions, and the address of its callback.

    Raises:
        UnsupportedBuild: EdgeSpec's library was not compiled.
    """
    found = compiled_functions(_FUNCTIONS, "on_node")
    if found is None:
        raise UnsupportedBuild("EdgeSpec's own library was not compiled")
    return found


def can_watch() -> bool:
    """True if graphs can be watched in this installation."""
    try:
        return bool(_functions())
    except UnsupportedBuild:
        return False


class Watch:
    """The nodes at which an observer wants to be called: none so far.

    Raises:
        UnsupportedBuild: EdgeSpec's library was not compiled.
    """

    def __init__(self) -> None:
        self._f = _functions()
        self.handle: Address = self._f["watch_new"]()
        weakref.finalize(self, self._f["watch_free"], self.handle)

    @property
    def at(self) -> int:
        """The number of the node that was asked about last, in the order of asking."""
        return int(self._f["watch_at"](self.handle))

    @property
    def pending(self) -> bool:
        """True if a reader was passed over since the graph stopped last, so that it is not computed yet."""
        return bool(self._f["watch_pending"](self.handle))

    def stop_after(self, name: bytes, *, prefix: bool = False) -> None:
        """Stop after nodes of this name, or of names that begin so, without asking."""
        self._f["watch_name"](self.handle, name, prefix)

    def ask_about_operation(self, operation: int, least_rows: int = 0) -> None:
        """Ask about nodes with this operation whose first source has at least so many rows."""
        self._f["watch_operation"](self.handle, operation, least_rows)

    def ask_about_numbers(self) -> None:
        """Ask about the first of all nodes in a row whose names end in "-" and the same number."""
        self._f["watch_numbers"](self.handle)

    def ask_about_readers(self, tensor: Address, group: int) -> None:
        """Ask about nodes that read this tensor or are views of it.

        Those with a mark are excepted, while the tensor's group is the current one.
        """
        self._f["watch_tensor"](self.handle, tensor, group)

    def ask_about_copies(self, name: bytes, tensor: Address) -> None:
        """Ask about nodes that read a device's copy of the tensor of this name, as about its own readers."""
        self._f["watch_copies"](self.handle, name, tensor)

    def forget_tensor(self, tensor: Address) -> None:
        """Do not ask about its readers any more."""
        self._f["watch_no_tensor"](self.handle, tensor)

    def set_current(self, group: int | None) -> None:
        """Nodes with a mark may read this group from now on."""
        self._f["watch_current"](self.handle, -1 if group is None else group)

    def mark(self, at: int, name: bytes, stop: bool | None, *, of_copies: bool = False) -> None:
        """Remember what to do about the node with this number and name.

        Args:
            stop: whether the graph is to stop after it, without asking; None if it is to be asked about.
            of_copies: whether that holds where the node reads copies of watched tensors, too.
        """
        self._f["watch_mark"](self.handle, at, name, -1 if stop is None else int(stop), of_copies)

    def unmark(self) -> None:
        """Forget all marks."""
        self._f["watch_unmark"](self.handle)

    def readers(self) -> list[TensorReader]:
        """The nodes of the pass that read a watched tensor, in their order."""
        found: list[TensorReader] = []
        while reader := self._f["watch_reader"](self.handle, len(found)):
            entry = reader.contents
            found.append(TensorReader(entry.at, entry.name, entry.before, entry.tensor))
        return found

    def redirect(self, operation: int, stack: Address, group: int, indices: Address) -> None:
        """Make products with chosen matrices of a stack use other indices, once the choice is known.

        Products that choose by anything else, or too early, are asked about.

        Args:
            operation: ggml's number of such products.
            group: of the stacks that share a choice.
        """
        self._f["watch_redirect"](self.handle, operation, stack, group, indices)

    def set_choice(self, group: int, chosen: Address) -> None:
        """The indices by which a group's products would choose, for this pass."""
        self._f["watch_choice"](self.handle, group, chosen)


class Gate:
    """The eval callback of a context; without watches at first.

    Attributes:
        callback, data: to be given to llama.cpp: addresses, valid for as long as the gate lives.

    Raises:
        UnsupportedBuild: EdgeSpec's library was not compiled.
    """

    def __init__(self, handler: Handler) -> None:
        self._f = _functions()
        self._handler = _HANDLER(handler)
        self._watches: list[Watch] = []
        self.callback: Address = self._f["on_node"]
        self.data: Address = self._f["gate_new"](self._handler)
        weakref.finalize(self, self._f["gate_free"], self.data)

    def set_watches(self, watches: Sequence[Watch]) -> None:
        """Answer by these watches from now on."""
        self._watches = list(watches)  # they must outlive the gate
        handles = (_P * len(watches))(*(watch.handle for watch in watches))
        self._f["gate_watches"](self.data, handles, len(watches))

    def begin(self) -> None:
        self._f["gate_begin"](self.data)
