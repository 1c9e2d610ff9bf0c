"""ggml beneath llama.cpp: the buffer types and graph nodes that llama.cpp's own interface does not reach.

llama.cpp has no way to let weights come and go, so EdgeSpec gives it a buffer type of its own: address
space without memory behind it (`unbacked`). Before a layer runs, its tensors' data pointers are set to where
its weights have been read to (`tensors`).

ggml makes no promise about the layout of the structures involved (`structs`), so `check` compares them with
what its public functions say about real objects. No package but this one knows an offset.
"""

from edgespec.kernels.ggml.buffer_types import (
    extra_buffer_types,
    offer_buffer_types,
    offered_buffer_types,
    overrides,
    plain_buffer_type,
)
from edgespec.kernels.ggml.checks import check
from edgespec.kernels.ggml.experts import (
    Indices,
    copied_name,
    copies_among,
    indices_of,
    name_of,
    place_stack,
    read_indices,
    set_indices,
    stack_of,
    write_copy,
)
from edgespec.kernels.ggml.functions import (
    cpu_device,
    cpu_library,
    cpu_variant,
    exported,
    functions,
    libraries_folder,
)
from edgespec.kernels.ggml.operations import (
    attention_operation,
    indexed_product,
    operation_named,
    product,
    rows_operation,
)
from edgespec.kernels.ggml.structs import F16, F32, I32, Address, UnsupportedBuild
from edgespec.kernels.ggml.tensors import (
    ScratchContext,
    TensorShape,
    is_in_host_memory,
    operation_of,
    read_node,
    read_rows,
    set_buffer,
    set_data,
    set_shape,
    shape_of,
    sources_of,
    without_sources,
)
from edgespec.kernels.ggml.unbacked import UnbackedBufferType, address_of_map

__all__ = [
    "F16",
    "F32",
    "I32",
    "Address",
    "Indices",
    "ScratchContext",
    "TensorShape",
    "UnbackedBufferType",
    "UnsupportedBuild",
    "address_of_map",
    "attention_operation",
    "check",
    "copied_name",
    "copies_among",
    "cpu_device",
    "cpu_library",
    "cpu_variant",
    "exported",
    "extra_buffer_types",
    "functions",
    "indexed_product",
    "indices_of",
    "is_in_host_memory",
    "libraries_folder",
    "name_of",
    "offer_buffer_types",
    "offered_buffer_types",
    "operation_named",
    "operation_of",
    "overrides",
    "place_stack",
    "plain_buffer_type",
    "product",
    "read_indices",
    "read_node",
    "read_rows",
    "rows_operation",
    "set_buffer",
    "set_data",
    "set_indices",
    "set_shape",
    "shape_of",
    "sources_of",
    "stack_of",
    "without_sources",
    "write_copy",
]
