"""The compiled part of `kernels.watch`: watches and gates that enter Python only where somebody is called."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

from edgespec.kernels.ggml import Address
from edgespec.kernels.native.functions import compiled_functions
from edgespec.kernels.reader import Handler, TensorReader

_NAME_BYTES = 64
_P, _I = ctypes.c_void_p, ctypes.c_int
_HANDLER = ctypes.CFUNCTYPE(_I, _P, _I, _I)


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
def _library() -> dict[str, Any] | None:
    """The library's functions, and the address of its callback; None if it was not compiled."""
    return compiled_functions(_FUNCTIONS, "on_node")


def compiled() -> bool:
    """True if watches and gates of this kind can be made here."""
    return _library() is not None


class CompiledWatch:
    """See `kernels.watch.PlainWatch`."""

    def __init__(self) -> None:
        f = _library()
        assert f is not None
        self._f = f
        self.handle: Address = f["watch_new"]()
        weakref.finalize(self, f["watch_free"], self.handle)

    @property
    def at(self) -> int:
        return int(self._f["watch_at"](self.handle))

    @property
    def pending(self) -> bool:
        return bool(self._f["watch_pending"](self.handle))

    def stop_after(self, name: bytes, *, prefix: bool = False) -> None:
        self._f["watch_name"](self.handle, name, prefix)

    def ask_about_operation(self, operation: int, least_rows: int = 0) -> None:
        self._f["watch_operation"](self.handle, operation, least_rows)

    def ask_about_numbers(self) -> None:
        self._f["watch_numbers"](self.handle)

    def ask_about_readers(self, tensor: Address, group: int) -> None:
        self._f["watch_tensor"](self.handle, tensor, group)

    def forget_tensor(self, tensor: Address) -> None:
        self._f["watch_no_tensor"](self.handle, tensor)

    def set_current(self, group: int | None) -> None:
        self._f["watch_current"](self.handle, -1 if group is None else group)

    def ask_about_copies(self, name: bytes, tensor: Address) -> None:
        self._f["watch_copies"](self.handle, name, tensor)

    def mark(self, at: int, name: bytes, stop: bool | None, *, of_copies: bool = False) -> None:
        self._f["watch_mark"](self.handle, at, name, -1 if stop is None else int(stop), of_copies)

    def unmark(self) -> None:
        self._f["watch_unmark"](self.handle)

    def readers(self) -> list[TensorReader]:
        found: list[TensorReader] = []
        while reader := self._f["watch_reader"](self.handle, len(found)):
            entry = reader.contents
            found.append(TensorReader(entry.at, entry.name, entry.before, entry.tensor))
        return found

    def redirect(self, operation: int, stack: Address, group: int, indices: Address) -> None:
        self._f["watch_redirect"](self.handle, operation, stack, group, indices)

    def set_choice(self, group: int, chosen: Address) -> None:
        self._f["watch_choice"](self.handle, group, chosen)


class CompiledGate:
    """See `kernels.watch.PlainGate`."""

    def __init__(self, handler: Handler) -> None:
        f = _library()
        assert f is not None
        self._f = f
        self._handler = _HANDLER(handler)
        self._watches: list[CompiledWatch] = []
        self.callback: Address = f["on_node"]
        self.data: Address = f["gate_new"](self._handler)
        weakref.finalize(self, f["gate_free"], self.data)

    def set_watches(self, watches: Sequence[Any]) -> None:
        self._watches = list(watches)  # they must outlive the gate
        handles = (_P * len(watches))(*(watch.handle for watch in watches))
        self._f["gate_watches"](self.data, handles, len(watches))

    def begin(self) -> None:
        self._f["gate_begin"](self.data)
