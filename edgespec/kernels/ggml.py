"""ggml's C structures, and the buffer type that lets weights live outside llama.cpp.

llama.cpp has no way to let weights come and go, so EdgeSpec gives it a buffer type of its own: address
space without memory behind it, into which the loader's bytes vanish. Before a layer runs, its tensors'
data pointers are set to where its weights have been read to.

ggml promises nobody the layout of these structures. So `check` compares them with what ggml's public
functions say about real objects, and raises UnsupportedBuild where a field is not where it is expected.
No other file knows an offset. The structures are those of ggml-backend-impl.h (interface version 2) and
ggml.h.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import llama_cpp

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t

INTERFACE_VERSION = 2
_OBJECT_BYTES = 32  # sizeof(struct ggml_object), which precedes every tensor in a ggml context
_SOURCES = 10
_USAGE_WEIGHTS = 1
_CPU_DEVICE = 0
F32, F16, I32 = 0, 1, 26

Address = int


class UnsupportedBuild(Exception):
    """This llama.cpp build cannot have its weights streamed; the text says why."""


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, _POINTER) for name in names]


class _BufferTypeInterface(ctypes.Structure):
    _fields_ = _pointers(
        "get_name", "alloc_buffer", "get_alignment", "get_max_size", "get_alloc_size", "is_host"
    )


class _BufferType(ctypes.Structure):
    _fields_ = [("interface", _BufferTypeInterface), *_pointers("device", "context")]


class _BufferInterface(ctypes.Structure):
    _fields_ = _pointers(
        *("free_buffer", "get_base", "init_tensor", "memset_tensor", "set_tensor", "get_tensor"),
        *("set_tensor_2d", "get_tensor_2d", "cpy_tensor", "clear", "reset"),
    )


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("interface", _BufferInterface),
        *_pointers("type", "context"),
        ("size", _SIZE),
        ("usage", ctypes.c_int),
    ]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", _POINTER),
        ("ne", ctypes.c_int64 * 4),
        ("nb", _SIZE * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", _POINTER * _SOURCES),
        ("view_src", _POINTER),
        ("view_offs", _SIZE),
        ("data", _POINTER),
        ("name", ctypes.c_char * 64),
        ("extra", _POINTER),
        ("padding", ctypes.c_char * 8),
    ]


class _Registry(ctypes.Structure):
    _fields_ = [("api_version", ctypes.c_int)]


class _ContextParams(ctypes.Structure):
    _fields_ = [("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", ctypes.c_bool)]


class _Override(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", _POINTER)]


# The part of a tensor that says what a graph node reads: sources, view, data, name.
_NODE = struct.Struct(f"={_SOURCES}QQQQ64s")
_NODE_OFFSET = _Tensor.src.offset
_DATA_OFFSET = _Tensor.data.offset
_SHAPE = struct.Struct("=4q4Q")
_SHAPE_OFFSET = _Tensor.ne.offset
_OPERATION_OFFSET = _Tensor.op.offset

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_POINTER, [_ContextParams]),
    "ggml_free": (None, [_POINTER]),
    "ggml_tensor_overhead": (_SIZE, []),
    "ggml_nbytes": (_SIZE, [_POINTER]),
    "ggml_get_name": (ctypes.c_char_p, [_POINTER]),
    "ggml_get_data": (_POINTER, [_POINTER]),
    "ggml_set_name": (_POINTER, [_POINTER, ctypes.c_char_p]),
    "ggml_new_tensor": (_POINTER, [_POINTER, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64)]),
    "ggml_view_1d": (_POINTER, [_POINTER, _POINTER, ctypes.c_int64, _SIZE]),
    "ggml_mul_mat": (_POINTER, [_POINTER, _POINTER, _POINTER]),
    "ggml_mul_mat_id": (_POINTER, [_POINTER, _POINTER, _POINTER, _POINTER]),
    "ggml_quantize_chunk": (_SIZE, [ctypes.c_int, *[_POINTER] * 2, *[ctypes.c_int64] * 3, _POINTER]),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, [ctypes.c_int]),
    "ggml_type_name": (ctypes.c_char_p, [ctypes.c_int]),
    "ggml_graph_overhead_custom": (_SIZE, [_SIZE, ctypes.c_bool]),
    "ggml_new_graph_custom": (_POINTER, [_POINTER, _SIZE, ctypes.c_bool]),
    "ggml_build_forward_expand": (None, [_POINTER, _POINTER]),
    "ggml_backend_dev_init": (_POINTER, [_POINTER, ctypes.c_char_p]),
    "ggml_backend_cpu_set_n_threads": (None, [_POINTER, ctypes.c_int]),
    "ggml_backend_graph_compute": (ctypes.c_int, [_POINTER, _POINTER]),
    "ggml_backend_free": (None, [_POINTER]),
    "ggml_backend_tensor_get": (None, [_POINTER, _POINTER, _SIZE, _SIZE]),
    "ggml_flash_attn_ext": (_POINTER, [*[_POINTER] * 5, *[ctypes.c_float] * 3]),
    "ggml_backend_cpu_buffer_type": (_POINTER, []),
    "ggml_backend_cpu_buffer_from_ptr": (_POINTER, [_POINTER, _SIZE]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [_POINTER]),
    "ggml_backend_buft_alloc_buffer": (_POINTER, [_POINTER, _SIZE]),
    "ggml_backend_buft_get_alloc_size": (_SIZE, [_POINTER, _POINTER]),
    "ggml_backend_buft_get_alignment": (_SIZE, [_POINTER]),
    "ggml_backend_buft_is_host": (ctypes.c_bool, [_POINTER]),
    "ggml_backend_buffer_free": (None, [_POINTER]),
    "ggml_backend_buffer_get_base": (_POINTER, [_POINTER]),
    "ggml_backend_buffer_get_size": (_SIZE, [_POINTER]),
    "ggml_backend_buffer_get_type": (_POINTER, [_POINTER]),
    "ggml_backend_buffer_set_usage": (None, [_POINTER, ctypes.c_int]),
    "ggml_backend_tensor_alloc": (ctypes.c_int, [_POINTER, _POINTER, _POINTER]),
    "ggml_backend_tensor_set": (None, [_POINTER, _POINTER, _SIZE, _SIZE]),
    "ggml_backend_dev_by_type": (_POINTER, [ctypes.c_int]),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, [_POINTER, _POINTER]),
    "ggml_backend_dev_backend_reg": (_POINTER, [_POINTER]),
    "ggml_backend_reg_get_proc_address": (_POINTER, [_POINTER, ctypes.c_char_p]),
}


@cache
def functions() -> dict[str, Any]:
    """ggml's public functions by name, with their types declared.

    Raises:
        UnsupportedBuild: one is missing.
    """
    # libllama depends on ggml's libraries, so their symbols are found through it.
    library = llama_cpp.llama_cpp._lib
    found = {}
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            # Looked up anew, so that types declared here do not change another user's of the library.
            function = ctypes.CFUNCTYPE(result, *arguments)((name, library))
        except AttributeError as error:
            raise UnsupportedBuild(f"it has no {name}") from error
        found[name] = function
    return found


def cpu_device() -> Address:
    """ggml's CPU device."""
    device: Address = functions()["ggml_backend_dev_by_type"](_CPU_DEVICE)
    return device


@cache
def extra_buffer_types() -> tuple[Address, ...]:
    """The CPU's buffer types beside the plain one, in ggml's order."""
    return offered_buffer_types()  # cached, so that it is asked before the first change


def offered_buffer_types() -> tuple[Address, ...]:
    """Those of them that llama.cpp chooses between at present, in the order in which it tries them."""
    table = _extra_table()
    found: list[Address] = []
    while table and table[len(found)]:
        found.append(table[len(found)])
    return tuple(found)


def offer_buffer_types(wanted: Sequence[Address]) -> None:
    """Let llama.cpp choose between these extra buffer types, in this order, when it loads models from now on.

    It takes for each tensor the first type that can hold it, and has no option to leave one out. But the
    table it looks through is not constant, and ends at the first null.

    Args:
        wanted: some of `extra_buffer_types`.

    Raises:
        UnsupportedBuild: the table is another one each time.
    """
    available = extra_buffer_types()
    if offered_buffer_types() == tuple(wanted):
        return
    table = _extra_table()
    for index in range(len(available)):
        table[index] = wanted[index] if index < len(wanted) else None
    if offered_buffer_types() != tuple(wanted):
        raise UnsupportedBuild("the list of its kernel layouts cannot be changed")


def _extra_table() -> Any:
    """ggml's own array of extra buffer types, ended by a null; None where it has none."""
    f = functions()
    registry = f["ggml_backend_dev_backend_reg"](cpu_device())
    address = f["ggml_backend_reg_get_proc_address"](registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    lookup = ctypes.CFUNCTYPE(ctypes.POINTER(_POINTER), _POINTER)(address)
    return lookup(cpu_device())


class Scratch:
    """A ggml context for a few tensors without data, and for a graph of so many nodes."""

    def __init__(self, n_tensors: int = 8, n_nodes: int = 0) -> None:
        self._f = functions()
        size = self._f["ggml_tensor_overhead"]() * n_tensors
        if n_nodes:
            size += self._f["ggml_graph_overhead_custom"](n_nodes, False)
        self.handle: Address | None = self._f["ggml_init"](_ContextParams(size, None, True))

    def tensor(self, type_id: int, shape: tuple[int, ...], name: bytes = b"") -> Address:
        """A new tensor; `shape` begins with the row length."""
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        tensor: Address = self._f["ggml_new_tensor"](self.handle, type_id, len(shape), sizes)
        self._f["ggml_set_name"](tensor, name)
        return tensor

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self._f["ggml_free"](self.handle)


def read_node(node: Address) -> tuple[Any, ...]:
    """Of a graph node: ten source tensors, the tensor it is a view of, the view's offset, data, name."""
    return _NODE.unpack(ctypes.string_at(node + _NODE_OFFSET, _NODE.size))


def set_data(tensor: Address, data: Address) -> None:
    """Let a tensor's weights be at `data`."""
    _POINTER.from_address(tensor + _DATA_OFFSET).value = data


@dataclass(frozen=True)
class Shape:
    """A tensor's four dimensions.

    Attributes:
        sizes: elements along each, rows first.
        strides: bytes from one element to the next along each.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def in_streams(self, dimension: int, size: int) -> Shape:
        """The same elements with a dimension cut into pieces of `size`, which the fourth one counts."""
        sizes, strides = list(self.sizes), list(self.strides)
        sizes[dimension], sizes[3] = size, self.sizes[dimension] // size
        strides[3] = self.strides[dimension] * size
        return Shape(tuple(sizes), tuple(strides))


def shape_of(tensor: Address) -> Shape:
    """A tensor's dimensions."""
    fields = _SHAPE.unpack(ctypes.string_at(tensor + _SHAPE_OFFSET, _SHAPE.size))
    return Shape(fields[:4], fields[4:])


def set_shape(tensor: Address, shape: Shape) -> None:
    """Describe a tensor's memory differently."""
    ctypes.memmove(tensor + _SHAPE_OFFSET, _SHAPE.pack(*shape.sizes, *shape.strides), _SHAPE.size)


def operation_of(node: Address) -> int:
    """The number of a graph node's operation."""
    return int(ctypes.c_int.from_address(node + _OPERATION_OFFSET).value)


@cache
def attention_operation() -> int:
    """The number of flash attention among ggml's operations.

    Raises:
        UnsupportedBuild: its sources are not where they are expected.
    """
    with Scratch() as scratch:
        # Keys and values of eight cells, for the queries of four rows.
        queries, keys, values = (scratch.tensor(t, (32, n, 2)) for t, n in ((F32, 4), (F16, 8), (F16, 8)))
        mask = scratch.tensor(F16, (8, 4))
        node = functions()["ggml_flash_attn_ext"](scratch.handle, queries, keys, values, mask, 1.0, 0.0, 0.0)
        _same("the sources of attention", read_node(node)[:4], (queries, keys, values, mask))
        _same("the shape of attention", shape_of(node).sizes, (32, 2, 4, 1))
        return operation_of(node)


def set_buffer(tensor: Address, buffer: Address | None) -> None:
    """Let a tensor be in a buffer, without placing it there."""
    _POINTER.from_address(tensor + _Tensor.buffer.offset).value = buffer


_UNREAD = b"\x01"  # in place of the first letter of a name


class HollowType:
    """A buffer type whose buffers are address space only, and whose tensors the loader does not read.

    llama.cpp reads every tensor of a file that it finds by its name, those too that it would then drop into
    a buffer without memory. A model of forty gigabytes would be read once for nothing. So a tensor has
    another name until the model is loaded.

    Args:
        kernel_type: the extra CPU buffer type whose kernels shall run on the tensors; None for plain ones.

    Attributes:
        tensors: name to address of every tensor that llama.cpp placed in it.
        error: why a buffer could not be made.
    """

    def __init__(self, kernel_type: Address | None) -> None:
        self.tensors: dict[str, Address] = {}
        self.error: BaseException | None = None
        self._f = functions()
        self._final: Address = kernel_type or self._f["ggml_backend_cpu_buffer_type"]()
        self._init = self._final_init() if kernel_type else None
        self._areas: list[mmap.mmap] = []
        self._buffers: list[_Buffer] = []
        # llama.cpp tells buffer types apart by their names.
        self._name = ctypes.create_string_buffer(f"EDGESPEC {self._final:x}".encode())
        self._struct = _BufferType()
        final = _BufferType.from_address(self._final).interface
        interface = self._struct.interface
        self._keep: tuple[Any, ...] = (
            ctypes.CFUNCTYPE(_POINTER, _POINTER)(lambda _type: ctypes.addressof(self._name)),
            ctypes.CFUNCTYPE(_POINTER, _POINTER, _SIZE)(self._guarded(self._alloc, None)),
            ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER)(self._guarded(self._init_tensor, 0)),
            ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE)(lambda *_: None),
        )
        interface.get_name = _address_of(self._keep[0])
        interface.alloc_buffer = _address_of(self._keep[1])
        interface.get_alignment, interface.get_alloc_size = final.get_alignment, final.get_alloc_size

    @property
    def address(self) -> Address:
        """The ggml_backend_buffer_type, for as long as this object lives."""
        return ctypes.addressof(self._struct)

    def settle(self) -> None:
        """After loading: let the buffers pass for those of the type whose kernels shall run."""
        for buffer in self._buffers:
            buffer.type = self._final
        for name, tensor in self.tensors.items():
            _Tensor.from_address(tensor).name = name.encode()

    def close(self) -> None:
        """Give the address space back; the model must be freed before."""
        self._buffers.clear()
        self.tensors.clear()
        for area in self._areas:
            area.close()
        self._areas.clear()
        self._keep = ()  # they refer back to this object

    def _guarded(self, function: Callable[..., Any], failed: Any) -> Callable[..., Any]:
        """ctypes would print and forget an exception."""

        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except BaseException as error:
                self.error = error
                return failed

        return call

    def _alloc(self, _type: Address, size: int) -> Address:
        # Read-only private memory does not count against the limit on committed memory, however large.
        area = mmap.mmap(-1, size + mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        self._areas.append(area)
        buffer: Address = self._f["ggml_backend_cpu_buffer_from_ptr"](address_of_map(area), size)
        layout = _Buffer.from_address(buffer)
        # A host buffer would be read into directly; one of this type is given its bytes by set_tensor.
        layout.type = self.address
        layout.interface.init_tensor = _address_of(self._keep[2])
        layout.interface.set_tensor = _address_of(self._keep[3])
        layout.interface.memset_tensor = layout.interface.get_tensor = layout.interface.cpy_tensor = None
        self._buffers.append(layout)
        return buffer

    def _init_tensor(self, buffer: Address, tensor: Address) -> int:
        layout = _Tensor.from_address(tensor)
        self.tensors[layout.name.decode("utf-8", "replace")] = tensor
        # Under a name that the file does not have, nothing is read for it.
        layout.name = _UNREAD + layout.name[1:]
        return int(self._init(buffer, tensor)) if self._init else 0

    def _final_init(self) -> Callable[[Address, Address], int] | None:
        sample = self._f["ggml_backend_buft_alloc_buffer"](self._final, 4096)
        pointer = _Buffer.from_address(sample).interface.init_tensor
        self._f["ggml_backend_buffer_free"](sample)
        return ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER)(pointer) if pointer else None


def overrides(patterns: list[tuple[str, Address]]) -> ctypes.Array[_Override]:
    """llama.cpp's list of (regular expression over tensor names, buffer type), ended by an empty one."""
    table = (_Override * (len(patterns) + 1))()
    for entry, (pattern, buffer_type) in zip(table, patterns, strict=False):
        entry.pattern, entry.buffer_type = pattern.encode(), buffer_type
    return table


@cache
def plain_buffer_type() -> Address:
    """A buffer type of plain memory that is not the CPU's usual one.

    An override to the usual one makes llama.cpp's loader look at the extra types again.
    """
    f = functions()
    memory = ctypes.create_string_buffer(4096)
    aligned = -(-ctypes.addressof(memory) // 64) * 64
    buffer = f["ggml_backend_cpu_buffer_from_ptr"](aligned, 64)
    try:
        found: Address = f["ggml_backend_buffer_get_type"](buffer)
        return found
    finally:
        f["ggml_backend_buffer_free"](buffer)


def address_of_map(area: mmap.mmap) -> Address:
    """Where an anonymous map begins; it must not be closed while the address is in use."""
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
        *_pointers("buf", "obj"),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        *_pointers("format", "shape", "strides", "suboffsets", "internal"),
    ]


def _address_of(function: Any) -> Address:
    return int(ctypes.cast(function, _POINTER).value or 0)


@cache
def check() -> None:
    """Compare the structures above with what ggml's public functions say.

    Raises:
        UnsupportedBuild: something is not where it is expected.
    """
    f = functions()
    _same("the size of a tensor", ctypes.sizeof(_Tensor) + _OBJECT_BYTES, f["ggml_tensor_overhead"]())
    registry = f["ggml_backend_dev_backend_reg"](cpu_device())
    _same("the interface version", _Registry.from_address(registry).api_version, INTERFACE_VERSION)
    buffer_type = f["ggml_backend_cpu_buffer_type"]()
    interface = _BufferType.from_address(buffer_type).interface
    name = ctypes.CFUNCTYPE(ctypes.c_char_p, _POINTER)(interface.get_name)(buffer_type)
    _same("a buffer type's name", name, f["ggml_backend_buft_name"](buffer_type))
    is_host = ctypes.CFUNCTYPE(ctypes.c_bool, _POINTER)(interface.is_host)(buffer_type)
    _same("where a buffer type is", is_host, f["ggml_backend_buft_is_host"](buffer_type))
    alignment = ctypes.CFUNCTYPE(_SIZE, _POINTER)(interface.get_alignment)(buffer_type)
    _same("a buffer type's alignment", alignment, f["ggml_backend_buft_get_alignment"](buffer_type))
    buffer = f["ggml_backend_buft_alloc_buffer"](buffer_type, 3 * 4096)
    try:
        _check_buffer(buffer, buffer_type)
        _check_tensor(buffer)
    finally:
        f["ggml_backend_buffer_free"](buffer)


def _check_buffer(buffer: Address, buffer_type: Address) -> None:
    f = functions()
    layout = _Buffer.from_address(buffer)
    _same("a buffer's type", layout.type, buffer_type)
    _same("a buffer's size", layout.size, f["ggml_backend_buffer_get_size"](buffer))
    base = ctypes.CFUNCTYPE(_POINTER, _POINTER)(layout.interface.get_base)(buffer)
    _same("a buffer's base", base, f["ggml_backend_buffer_get_base"](buffer))
    f["ggml_backend_buffer_set_usage"](buffer, _USAGE_WEIGHTS)
    _same("a buffer's usage", layout.usage, _USAGE_WEIGHTS)


def _check_tensor(buffer: Address) -> None:
    f = functions()
    base = f["ggml_backend_buffer_get_base"](buffer)
    with Scratch() as scratch:
        tensor = scratch.tensor(F32, (32, 8), b"weight")
        layout = _Tensor.from_address(tensor)
        f["ggml_backend_tensor_alloc"](buffer, tensor, base + 4096)
        _same("a tensor's type", layout.type, F32)
        _same("a tensor's buffer", layout.buffer, buffer)
        _same("a tensor's shape", tuple(layout.ne), (32, 8, 1, 1))
        _same("a tensor's strides", tuple(layout.nb), (4, 128, 1024, 1024))
        _same("a tensor's data", layout.data, f["ggml_get_data"](tensor))
        _same("a tensor's name", layout.name, f["ggml_get_name"](tensor))
        # set_tensor is the next function after memset_tensor: its effect shows that both are in place.
        values = (ctypes.c_float * 256)(*range(256))
        write = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE)
        write(_Buffer.from_address(buffer).interface.set_tensor)(buffer, tensor, values, 0, 1024)
        _same("a tensor's values", ctypes.string_at(base + 4096, 1024), bytes(values))
        view = f["ggml_view_1d"](scratch.handle, tensor, 16, 64)
        sources = read_node(view)
        _same("a view's source", sources[_SOURCES : _SOURCES + 2], (tensor, 64))
        product = f["ggml_mul_mat"](scratch.handle, tensor, scratch.tensor(F32, (32, 2), b"rows"))
        _same("a node's source", read_node(product)[0], tensor)


def _same(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise UnsupportedBuild(f"{what} is {found}, and {expected} was expected")
