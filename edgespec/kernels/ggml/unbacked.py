"""A buffer type without memory behind it, for weights that live outside llama.cpp."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

from edgespec.base.mapped_memory import reserved_addresses
from edgespec.kernels.ggml.functions import functions
from edgespec.kernels.ggml.structs import (
    POINTER,
    SIZE,
    Address,
    Buffer,
    BufferType,
    Tensor,
    UnsupportedBuild,
    pointer_fields,
)

_UNREAD = b"\x01"  # replaces the first letter of a name


class UnbackedBufferType:
    """A buffer type whose buffers are address space only, and whose tensors the loader does not read.

    llama.cpp would read a tensor from the file even if its buffer discarded the bytes: a model of forty
    gigabytes would be read once for nothing. But it finds tensors in the file by name, so they have different
    names until the model is loaded.

    Args:
        kernel_type: the extra CPU buffer type whose kernels are to run on the tensors; None for the plain
            one.

    Attributes:
        tensors: name to address of every tensor that llama.cpp placed in it.
        error: why a buffer could not be created.
    """

    def __init__(self, kernel_type: Address | None) -> None:
        self.tensors: dict[str, Address] = {}
        self.error: BaseException | None = None
        self._f = functions()
        self._final: Address = kernel_type or self._f["ggml_backend_cpu_buffer_type"]()
        self._final_init: Address | None = self._find_init() if kernel_type else None
        init = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER)
        self._init = init(self._final_init) if self._final_init else None
        self._areas: list[mmap.mmap] = []
        self._buffers: list[Buffer] = []
        # llama.cpp distinguishes buffer types by their names.
        self._name = ctypes.create_string_buffer(f"EDGESPEC {self._final:x}".encode())
        self._struct = BufferType()
        final = BufferType.from_address(self._final).interface
        interface = self._struct.interface
        self._keep: tuple[Any, ...] = (
            ctypes.CFUNCTYPE(POINTER, POINTER)(lambda _type: ctypes.addressof(self._name)),
            ctypes.CFUNCTYPE(POINTER, POINTER, SIZE)(self._guarded(self._alloc, None)),
            ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER)(self._guarded(self._init_tensor, 0)),
            ctypes.CFUNCTYPE(None, POINTER, POINTER, POINTER, SIZE, SIZE)(lambda *_: None),
        )
        interface.get_name = _address_of(self._keep[0])
        interface.alloc_buffer = _address_of(self._keep[1])
        interface.get_alignment, interface.get_alloc_size = final.get_alignment, final.get_alloc_size

    @property
    def address(self) -> Address:
        """The ggml_backend_buffer_type, for as long as this object lives."""
        return ctypes.addressof(self._struct)

    def finalize(self) -> None:
        """Restore the names after loading, and give the buffers the type whose kernels are to run.

        Graphs make views of tensors, which are nothing to remember.
        """
        for buffer in self._buffers:
            buffer.type = self._final
            buffer.interface.init_tensor = self._final_init
        for name, tensor in self.tensors.items():
            Tensor.from_address(tensor).name = name.encode()

    def close(self) -> None:
        """Release the address space, after the model has been freed."""
        self._buffers.clear()
        self.tensors.clear()
        for area in self._areas:
            area.close()
        self._areas.clear()
        self._keep = ()  # they refer to this object

    def _guarded(self, function: Callable[..., Any], failed: Any) -> Callable[..., Any]:
        """Keep an exception, which ctypes would only print."""

        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except BaseException as error:
                self.error = error
                return failed

        return call

    def _alloc(self, _type: Address, size: int) -> Address:
        area = reserved_addresses(size + mmap.PAGESIZE)
        self._areas.append(area)
        buffer: Address = self._f["ggml_backend_cpu_buffer_from_ptr"](address_of_map(area), size)
        layout = Buffer.from_address(buffer)
        # The loader reads into host buffers directly, but fills buffers of this type through set_tensor.
        layout.type = self.address
        layout.interface.init_tensor = _address_of(self._keep[2])
        layout.interface.set_tensor = _address_of(self._keep[3])
        layout.interface.memset_tensor = layout.interface.get_tensor = layout.interface.cpy_tensor = None
        self._buffers.append(layout)
        return buffer

    def _init_tensor(self, buffer: Address, tensor: Address) -> int:
        layout = Tensor.from_address(tensor)
        self.tensors[layout.name.decode("utf-8", "replace")] = tensor
        # The loader reads nothing for a name that is not in the file.
        layout.name = _UNREAD + layout.name[1:]
        return int(self._init(buffer, tensor)) if self._init else 0

    def _find_init(self) -> Address | None:
        """The function of the final type's buffers that begins a tensor."""
        sample = self._f["ggml_backend_buft_alloc_buffer"](self._final, 4096)
        pointer: Address | None = Buffer.from_address(sample).interface.init_tensor
        self._f["ggml_backend_buffer_free"](sample)
        return pointer


def _address_of(function: Any) -> Address:
    return int(ctypes.cast(function, POINTER).value or 0)


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
