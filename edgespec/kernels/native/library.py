"""The compiled library of EdgeSpec's own kernels, and its buffer type among those of ggml."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address, UnsupportedBuild
from edgespec.kernels.native.build import library_path

_BEST = -1


class _Operations(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("product", "indexed_product", "rows", "attention")]


# What branches of running states are about, in the order of the fields below.
STATE_OPERATIONS = ("SSM_CONV", "SSM_SCAN", "GATED_DELTA_NET", "CPY", "CONCAT", "FLASH_ATTN_EXT")


class _RecurrentOperations(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32) for name in ("convolution", "scan", "delta_net", "copy", "concat", "attention")
    ]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "edgespec_register": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(_Operations)]),
    "edgespec_buffer_type": (ctypes.c_void_p, []),
    "edgespec_activate": (None, []),
    "edgespec_narrow_heads": (None, [ctypes.c_int]),
    "edgespec_read_in_place": (None, [ctypes.c_int]),
    "edgespec_pack_next": (ctypes.c_int64, []),
    "edgespec_planner_new": (ctypes.c_void_p, [ctypes.c_int, ctypes.c_int]),
    "edgespec_planner_free": (None, [ctypes.c_void_p]),
    "edgespec_plan_with": (None, [ctypes.c_void_p]),
    "edgespec_answers": (None, [ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_int64)] * 2]),
    "edgespec_isa_name": (ctypes.c_char_p, [ctypes.c_int]),
    "edgespec_isa_id": (ctypes.c_int, [ctypes.c_char_p]),
    "edgespec_isa_usable": (ctypes.c_int, [ctypes.c_int]),
    "edgespec_best_isa": (ctypes.c_int, []),
    "edgespec_recurrent_register": (
        ctypes.c_char_p,
        [ctypes.c_void_p, ctypes.POINTER(_RecurrentOperations)],
    ),
    "edgespec_tree_new": (ctypes.c_void_p, []),
    "edgespec_tree_free": (None, [ctypes.c_void_p]),
    "edgespec_tree_begin": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64],
    ),
    "edgespec_tree_end": (ctypes.c_char_p, [ctypes.c_void_p]),
    "edgespec_tree_node": (None, [ctypes.c_void_p, ctypes.c_void_p]),
    "edgespec_tree_callback": (ctypes.c_int8, [ctypes.c_void_p, ctypes.c_int8, ctypes.c_void_p]),
}


def compiled_functions(
    declared: Mapping[str, tuple[Any, Sequence[Any]]], callback: str = ""
) -> dict[str, Any] | None:
    """Functions of the library that need none of its kernels; None if it was not compiled.

    Args:
        declared: type of the result and of the arguments, by the name without the library's prefix.
        callback: the name of a function whose address is wanted instead; empty for none.
    """
    path = library_path()
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
        found: dict[str, Any] = {
            name: ctypes.CFUNCTYPE(result, *arguments)((f"edgespec_{name}", library))
            for name, (result, arguments) in declared.items()
        }
        if callback:
            found[callback] = ctypes.cast(library[f"edgespec_{callback}"], ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
    return found


class NativeLibrary:
    """The library, registered with ggml.

    Attributes:
        buffer_type: holds packed weights.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._f = {}
        for name, (result, arguments) in _FUNCTIONS.items():
            self._f[name] = ctypes.CFUNCTYPE(result, *arguments)((name, library))
        self.buffer_type: Address = self._f["edgespec_buffer_type"]()
        if self._f["edgespec_best_isa"]() == _BEST:
            raise UnsupportedBuild("this processor has none of the instruction sets that the kernels need")
        problem = self._f["edgespec_register"](_within_backend(), ggml.cpu_device(), _operations())
        if problem:
            raise UnsupportedBuild(problem.decode())
        self._no_branches = _register_recurrent(self._f)

    def activate(self) -> None:
        """Make ggml ask the library about every node from now on."""
        self._f["edgespec_activate"]()

    @contextmanager
    def loading(self, *, narrow_head: bool) -> Iterator[Callable[[], int]]:
        """A block in which this thread loads weights in the buffer type.

        They are read to where they are to be packed. When all were read, calls of the function that the block
        gets pack one each, until it returns 0; before that, it returns how many are left with that one.

        Args:
            narrow_head: pack an output head of 8 bits or more in 5 bits.
        """
        self._f["edgespec_narrow_heads"](narrow_head)
        self._f["edgespec_read_in_place"](True)
        try:
            yield self._f["edgespec_pack_next"]
        finally:
            self._f["edgespec_read_in_place"](False)
            self._f["edgespec_narrow_heads"](False)

    def instruction_sets(self) -> tuple[str, ...]:
        """The names of those that this library and this processor have, the least capable first."""
        found = []
        number = 0
        while name := self._f["edgespec_isa_name"](number):
            if self._f["edgespec_isa_usable"](number):
                found.append(name.decode())
            number += 1
        return tuple(found)

    def new_planner(self, instruction_set: str | None = None) -> NodePlanner:
        """Return a planner by which attention and products of F32 matrices are computed here, too.

        Args:
            instruction_set: for all nodes that are computed here; None for the best.

        Raises:
            UnsupportedBuild: this library or this processor lacks it.
        """
        number = self._f["edgespec_isa_id"](instruction_set.encode()) if instruction_set else _BEST
        known = number >= 0 or not instruction_set
        if not known or not (handle := self._f["edgespec_planner_new"](number, True)):
            raise UnsupportedBuild(f"there is no instruction set {instruction_set}")
        return NodePlanner(self._f, handle)

    def leave_to_ggml(self) -> NodePlanner:
        """Return a planner by which ggml computes all that has no packed weights."""
        return NodePlanner(self._f, None)

    def new_branching(self) -> StateBranching:
        """Return the branching for a context whose running states are to branch.

        Raises:
            UnsupportedBuild: they cannot with this build of ggml, or there are too many such contexts.
        """
        if self._no_branches:
            raise UnsupportedBuild(self._no_branches)
        handle = self._f["edgespec_tree_new"]()
        if not handle:
            raise UnsupportedBuild("too many contexts are open")
        self.activate()
        return StateBranching(self._f, handle)


class NodePlanner:
    """Decides how the nodes of one context's graphs are computed; see planner.h.

    Entered by the thread that has ggml compute them, and in force until it is left. Freed with this object,
    which must outlive the context.
    """

    def __init__(self, functions: dict[str, Any], handle: Address | None) -> None:
        self._f = functions
        self._handle = handle
        weakref.finalize(self, functions["edgespec_planner_free"], handle).atexit = False

    def __enter__(self) -> NodePlanner:
        self._f["edgespec_plan_with"](self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._f["edgespec_plan_with"](None)

    def answers(self) -> tuple[int, int]:
        """Count the attention nodes taken from ggml, and the attention nodes and products left to it."""
        ours, left = ctypes.c_int64(), ctypes.c_int64()
        self._f["edgespec_answers"](self._handle, ctypes.byref(ours), ctypes.byref(left))
        return ours.value, left.value

    def watch(self) -> Callable[[], bool]:
        """Begin to watch who computes products and attention.

        Returns:
            Whether EdgeSpec's own kernels have computed all of them since then, and there was any attention.
        """
        if self._handle is None:
            return lambda: False
        ours_before, left_before = self.answers()

        def all_own() -> bool:
            ours, left = self.answers()
            return ours > ours_before and left == left_before

        return all_own


class StateBranching:
    """The branches of one context's passes, where layers keep a running state; see recurrent.cpp.

    To be told of all nodes of the context's graphs: by `reached`, or by llama.cpp itself, if `callback` is
    its eval callback and `handle` the data of that.
    """

    def __init__(self, functions: dict[str, Any], handle: Address) -> None:
        self._f = functions
        self.handle = handle

    @property
    def callback(self) -> Address:
        address = ctypes.cast(self._f["edgespec_tree_callback"], ctypes.c_void_p).value
        assert address is not None
        return address

    def begin(self, parents: NDArray[np.int32], certain: int, first_cell: int) -> None:
        """The next pass has branches.

        Args:
            parents: (rows,) of each row, an earlier one; -1 for the first row, and for rows that fill the
                pass.
            certain: leading rows, each the parent of the next one, after which the state is kept.
            first_cell: that of the first row.

        Raises:
            ValueError: this is no such tree.
        """
        rows = np.ascontiguousarray(parents, dtype=np.int32)
        if not self._f["edgespec_tree_begin"](self.handle, len(rows), certain, rows.ctypes.data, first_cell):
            raise ValueError("rows must come after their parents, and the certain ones first, as a chain")

    def reached(self, node: Address) -> None:
        """A node is about to be computed."""
        self._f["edgespec_tree_node"](self.handle, node)

    def end(self) -> str:
        """The pass is over. Returns why its branches are wrong; empty if they are right."""
        problem: bytes | None = self._f["edgespec_tree_end"](self.handle)
        return problem.decode() if problem else ""

    def close(self) -> None:
        """Free this; the context must have been freed."""
        self._f["edgespec_tree_free"](self.handle)


@cache
def load() -> NativeLibrary:
    """The library; the first call registers it, and must come before a model is loaded.

    Raises:
        UnsupportedBuild: it was not compiled, or ggml cannot be plugged into.
    """
    if _left_out:
        raise UnsupportedBuild("they are left out")
    path = library_path()
    if path is None:
        raise UnsupportedBuild("they were not compiled")
    try:
        return NativeLibrary(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise UnsupportedBuild(f"'{path}' cannot be loaded: {error}") from error


def loaded() -> NativeLibrary | None:
    """The library; None if it cannot be used."""
    return _attempt()[0]


def problem() -> str:
    """The reason why the library cannot be used; empty if it can."""
    return _attempt()[1]


def leave_out() -> None:
    """Do not load the library in this process."""
    global _left_out
    _left_out = True


_left_out = False


@cache
def _attempt() -> tuple[NativeLibrary | None, str]:
    try:
        return load(), ""
    except UnsupportedBuild as error:
        return None, str(error)


def _within_backend() -> Address:
    """An address in the library of ggml's CPU backend."""
    f = ggml.functions()
    registry = f["ggml_backend_dev_backend_reg"](ggml.cpu_device())
    address: Address = f["ggml_backend_reg_get_proc_address"](registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        raise UnsupportedBuild("it has no extra buffer types")
    return address


def _register_recurrent(f: dict[str, Any]) -> str:
    """Register branches of recurrent states. Returns why they cannot be computed; empty if they can."""
    try:
        operations = _RecurrentOperations(*(ggml.operation_named(name) for name in STATE_OPERATIONS))
    except UnsupportedBuild as error:
        return str(error)
    problem: bytes | None = f["edgespec_recurrent_register"](_within_backend(), ctypes.byref(operations))
    return problem.decode() if problem else ""


def _operations() -> Any:
    numbers = (ggml.product(), ggml.indexed_product(), ggml.rows_operation(), ggml.attention_operation())
    return ctypes.byref(_Operations(*numbers))
