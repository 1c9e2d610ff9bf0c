"""Making a mixture of experts out of a dense model without changing what it computes.

A stand-in for mixtures that are too large to download. Every expert is the whole feed-forward block, with its
hidden units in another order: units can be reordered freely, so each expert computes the same function from
different bytes. The weights with which a token's experts are added up have the sum 1, so whatever the routers
choose, the result is the block's own, up to rounding. Figures from such a model must be labelled as
synthetic: its router is one, too, see benchmarks.routers.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from edgespec.base.progress import Progress, no_progress
from edgespec.errors import ModelFileError, OutputError
from edgespec.files.writing import atomic_large_write, writing_to
from edgespec.printable import printable

_FEED_FORWARD = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.weight")
_ARCHITECTURE = "llama"  # has dense blocks and experts under one name


def mix(
    source: Path,
    destination: Path,
    routers: Sequence[NDArray[np.float32]],
    n_used: int,
    *,
    on_progress: Progress = no_progress,
) -> Path:
    """Write a mixture of experts that computes the same function as `source`, up to rounding.

    Args:
        routers: for each layer, (experts, embedding) the matrix that gives the experts' logits.
        n_used: experts that each token is sent to, in each layer.

    Returns:
        `destination`.

    Raises:
        ModelFileError: `source` is of another architecture, or a mixture already.
        OutputError: `destination` cannot be written.
    """
    reader = gguf.GGUFReader(source)
    check_can_mix(reader, source)
    n_experts = len(routers[0])
    blocks = sum(int(tensor.n_bytes) for tensor in reader.tensors if _FEED_FORWARD.fullmatch(tensor.name))
    needed = source.stat().st_size + (n_experts - 1) * blocks
    free = shutil.disk_usage(destination.absolute().parent).free
    if free < needed:
        raise OutputError(
            f"'{destination}' would take {needed:,} bytes, and {free:,} are free there.",
            "Use fewer experts, or choose another disk.",
        )
    partial = destination.with_name(destination.name + ".partial")
    with (
        writing_to(f"'{destination}'", "Check the free disk space."),
        atomic_large_write(destination, partial),
    ):
        _write(reader, partial, source, routers, n_used, on_progress)
    return destination


def check_can_mix(reader: gguf.GGUFReader, source: Path) -> None:
    """Refuse a model that no mixture can be made of.

    Raises:
        ModelFileError: see `mix`.
    """
    field = reader.fields.get("general.architecture")
    architecture = str(field.contents()) if field else ""
    dense = any(_FEED_FORWARD.fullmatch(tensor.name) for tensor in reader.tensors)
    if architecture != _ARCHITECTURE or not dense:
        raise ModelFileError(
            f"Cannot make a mixture of experts from '{source}': it is a {architecture or 'nameless model'}"
            f"{'' if dense else ' without dense feed-forward blocks'}.",
            "Use a dense llama, such as the default model.",
        )


def _write(
    reader: gguf.GGUFReader,
    path: Path,
    source: Path,
    routers: Sequence[NDArray[np.float32]],
    n_used: int,
    on_progress: Progress,
) -> None:
    n_experts = len(routers[0])
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.name"):
            continue
        kind = entry.types[0]
        writer.add_key_value(
            name, entry.contents(), kind, sub_type=entry.types[-1] if len(entry.types) > 1 else None
        )
    writer.add_string("general.name", f"{printable(source.stem)} (mixed)")
    writer.add_string("edgespec.mixed_from", printable(source.name))
    writer.add_expert_count(n_experts)
    writer.add_expert_used_count(n_used)
    plan: list[tuple[gguf.ReaderTensor | int, tuple[str, str] | None]] = []
    for tensor in reader.tensors:
        match = _FEED_FORWARD.fullmatch(tensor.name)
        shape = tuple(int(n) for n in tensor.data.shape)
        name = tensor.name
        if match:
            shape, name = (n_experts, *shape), f"blk.{match[1]}.ffn_{match[2]}_exps.weight"
        dtype = tensor.data.dtype
        n_bytes = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(name, shape, dtype, n_bytes, raw_dtype=tensor.tensor_type)
        plan.append((tensor, (match[1], match[2]) if match else None))
        if match and match[2] == "gate":
            router = routers[int(match[1])]
            writer.add_tensor_info(
                f"blk.{match[1]}.ffn_gate_inp.weight", router.shape, np.dtype(np.float32), router.nbytes
            )
            plan.append((int(match[1]), None))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    out = writer.fout[0]
    for number, (what, block) in enumerate(plan):
        on_progress(f"Writing {path.stem}", number / len(plan))
        writer.write_padding(out, out.tell())
        if isinstance(what, int):
            out.write(np.ascontiguousarray(routers[what], np.float32).data)
        elif block is None:
            out.write(np.ascontiguousarray(what.data).data)
        else:
            _write_experts(out.write, what, int(block[0]), block[1], n_experts)
        writer.write_padding(out, out.tell())
    writer.close()


def _write_experts(
    write: Callable[[bytes | memoryview], object],
    tensor: gguf.ReaderTensor,
    layer: int,
    kind: str,
    n_experts: int,
) -> None:
    """Write a dense matrix once for each expert, its hidden units in the expert's order.

    Quantized columns move in whole blocks, so rows do as well.
    """
    data = np.ascontiguousarray(tensor.data)
    units = int(tensor.shape[0] if kind == "down" else tensor.shape[1])
    per_block = max(gguf.GGML_QUANT_SIZES[Kind(tensor.tensor_type)][0], 256 if units % 256 == 0 else 32)
    blocks = units // per_block
    for expert in range(n_experts):
        order = np.random.default_rng([layer, expert]).permutation(blocks)
        if kind == "down":
            moved = data.reshape(len(data), blocks, -1)[:, order]
        else:
            moved = data.reshape(blocks, -1)[order]
        write(np.ascontiguousarray(moved).data)
