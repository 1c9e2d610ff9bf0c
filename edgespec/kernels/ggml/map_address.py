"""The address of an anonymous memory map."""

from __future__ import annotations

import ctypes
import mmap

from edgespec.kernels.ggml.structs import Address, UnsupportedBuild, pointer_fields


def address_of_map(area: mmap.mmap) -> Address:
    """The address of an anonymous map, which must stay open while the address is in use."""
    # from_buffer refuses read-only maps, so the address is taken through the buffer interface.
    view = _PyBuffer()
    python = ctypes.pythonapi
    if python.PyObject_GetBuffer(ctypes.py_object(area), ctypes.byref(view), 0):
        raise UnsupportedBuild("the address of a memory map cannot be found")
    address = int(view.buf)
    python.PyBuffer_Release(ctypes.byref(view))
    return address


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        *pointer_fields("buf", "obj"),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        *pointer_fields("format", "shape", "strides", "suboffsets", "internal"),
    ]
