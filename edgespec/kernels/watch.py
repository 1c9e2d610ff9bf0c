"""Watching nodes of a compute graph: the eval callback calls Python only at those of interest.

llama.cpp asks its eval callback about every node, some fifteen hundred in a pass, before it computes a run of
nodes. A `Gate` is that callback. It answers by its watches, and calls its handler only where one of them says
so. Both are compiled with EdgeSpec's own kernels (`native/watch.cpp`); where these were not compiled, Python
does the same, and takes a few milliseconds in each pass for it.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import llama_cpp

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.native import gate as native
from edgespec.kernels.reader import Handler, TensorReader

_VIEW, _NAME = 10, 13  # after the ten sources
_INDICES = 2


class PlainWatch:
    """The nodes at which an observer wants to be called; `CompiledWatch` is the same in compiled code.

    Attributes:
        at: the number of the node that was asked about last, in the order of asking.
        pending: whether any reader has been passed over since the graph stopped last, so that it is not
            computed yet.
    """

    def __init__(self) -> None:
        self._names: set[bytes] = set()
        self._prefixes: tuple[bytes, ...] = ()
        self._operations: list[tuple[int, int]] = []
        self._numbers = False
        self._number = b""
        self._groups: dict[Address, int] = {}
        self._current: int | None = None
        self._copied: dict[bytes, Address] = {}
        self._marks: dict[tuple[int, bytes], tuple[bool | None, bool]] = {}
        self._readers: list[TensorReader] = []
        self._product = -1
        self._stacks: dict[Address, tuple[int, Address]] = {}
        self._choices: dict[int, Address] = defaultdict(int)
        self._before = b""
        self.at = -1
        self.pending = self.stops = False

    def stop_after(self, name: bytes, *, prefix: bool = False) -> None:
        """Stop after nodes of this name, or of names that begin so, without asking."""
        if prefix:
            self._prefixes += (name,)
        else:
            self._names.add(name)

    def ask_about_operation(self, operation: int, least_rows: int = 0) -> None:
        """Ask about nodes with this operation whose first source has at least so many rows."""
        self._operations.append((operation, least_rows))

    def ask_about_numbers(self) -> None:
        """Ask about the first of all nodes in a row whose names end in "-" and the same number."""
        self._numbers = True

    def ask_about_readers(self, tensor: Address, group: int) -> None:
        """Ask about nodes that read this tensor or are views of it.

        Those with a mark are excepted, while the tensor's group is the current one.
        """
        self._groups[tensor] = group

    def ask_about_copies(self, name: bytes, tensor: Address) -> None:
        """Ask about nodes that read a device's copy of this tensor, as about those that read the tensor.

        Args:
            name: of the tensor.
        """
        self._copied[name] = tensor

    def forget_tensor(self, tensor: Address) -> None:
        """Do not ask about its readers any more."""
        self._groups.pop(tensor, None)

    def set_current(self, group: int | None) -> None:
        """Nodes with a mark may read this group from now on."""
        self._current = group

    def mark(self, at: int, name: bytes, stop: bool | None, *, of_copies: bool = False) -> None:
        """Remember what to do about the node with this number and name.

        Args:
            stop: whether the graph is to stop after it, without asking; None if it is to be asked about.
            of_copies: whether that holds where the node reads copies of watched tensors, too.
        """
        self._marks[at, name] = stop, of_copies

    def unmark(self) -> None:
        """Forget all marks."""
        self._marks.clear()

    def readers(self) -> list[TensorReader]:
        """The nodes of the pass that read a watched tensor, in their order."""
        return list(self._readers)

    def redirect(self, operation: int, stack: Address, group: int, indices: Address) -> None:
        """Make products with chosen matrices of a stack use other indices, once the choice is known.

        Products that choose by anything else, or too early, are asked about.

        Args:
            operation: ggml's number of such products.
            group: of the stacks that share a choice.
        """
        self._product = operation
        self._stacks[stack] = group, indices

    def set_choice(self, group: int, chosen: Address) -> None:
        """The indices by which a group's products would choose, for this pass."""
        self._choices[group] = chosen

    def begin(self) -> None:
        self.at, self.pending, self.stops = -1, False, False
        self._number = self._before = b""
        self._readers.clear()
        self._choices.clear()

    def answer(self, node: Address) -> bool | None:
        """True to stop after the node; None to ask."""
        self.at += 1
        fields = ggml.read_node(node)
        name: bytes = fields[_NAME].split(b"\x00", 1)[0]
        before, self._before = self._before, name
        mark, of_copies = self._marks.get((self.at, name), (None, False))
        sources = [(source, self._original(source)) for source in fields[: _VIEW + 1] if source]
        read = [tensor for _, tensor in sources if tensor in self._groups]
        if read:
            copied = any(source != tensor for source, tensor in sources)
            other = [tensor for tensor in read if self._groups[tensor] != self._current]
            self._readers.append(TensorReader(self.at, name, before, (other or read)[0]))
            if mark is None or other or (copied and not of_copies):
                return None
            self.pending = True
        if mark:
            return True
        if self._product >= 0 and not self._redirected(node):
            return None
        for operation, rows in self._operations:
            if ggml.operation_of(node) == operation and ggml.shape_of(fields[0]).sizes[1] >= rows:
                return None
        if name in self._names or name.startswith(self._prefixes):
            return True
        return None if self._numbers and self._has_new_number(name) else False

    def _original(self, tensor: Address) -> Address:
        """The watched tensor that this one is a device's copy of; else itself."""
        return self._copied.get(ggml.copied_name(tensor), tensor) if self._copied else tensor

    def _redirected(self, node: Address) -> bool:
        if ggml.operation_of(node) != self._product or ggml.stack_of(node) not in self._stacks:
            return True
        group, indices = self._stacks[ggml.stack_of(node)]
        chosen = self._choices[group]
        # llama.cpp may compute a graph again, with the indices that it was given the last time.
        if not chosen or ggml.indices_of(node) not in (chosen, indices):
            return False
        ggml.set_indices(node, indices)
        return True

    def _has_new_number(self, name: bytes) -> bool:
        _, dash, number = name.rpartition(b"-")
        if not dash or not number.isdigit() or number == self._number:
            return False
        self._number = number
        return True


class PlainGate:
    """The eval callback of a context; `CompiledGate` is the same in compiled code.

    Attributes:
        callback, data: to be given to llama.cpp: addresses, valid for as long as the gate lives.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._watches: Sequence[PlainWatch] = ()
        self._failed = False
        self._function = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
        self.callback: Address = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        self.data: Address | None = None

    def set_watches(self, watches: Sequence[Any]) -> None:
        """Answer by these watches from now on, all of them made by `new_watch`."""
        self._watches = list(watches)

    def begin(self) -> None:
        self._failed = False
        for watch in self._watches:
            watch.begin()

    def _on_node(self, node: Address, ask: bool, _data: object) -> bool:
        if self._failed:
            return ask  # stop here, and go no further
        return self._asked(node) if ask else self._computed(node)

    def _asked(self, node: Address) -> bool:
        for number, watch in enumerate(self._watches):
            answer = watch.answer(node)
            watch.stops = self._call(node, number, 1) if answer is None else answer
        return self._failed or any(watch.stops for watch in self._watches)

    def _computed(self, node: Address) -> bool:
        for watch in self._watches:
            watch.pending = False
        for number, watch in enumerate(self._watches):
            if watch.stops:
                self._call(node, number, 0)
        return not self._failed

    def _call(self, node: Address, number: int, ask: int) -> bool:
        if self._failed:
            return False
        result = self._handler(node, number, ask)
        self._failed = result < 0
        return result > 0


Watch = PlainWatch | native.CompiledWatch
Gate = PlainGate | native.CompiledGate


def new_watch() -> Watch:
    """A watch that asks about nothing so far."""
    return native.CompiledWatch() if native.compiled() else PlainWatch()


def open_gate(handler: Handler) -> Gate:
    """A gate without watches."""
    return native.CompiledGate(handler) if native.compiled() else PlainGate(handler)
