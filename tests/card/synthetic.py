"""Models of a well-known size with random weights, on which the time of a pass does not depend."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.models.gguf.weightless import ModelShape, hollow_files

# Of Llama 3.1 8B, of a dense 27B with attention in every layer, and one that a worker computes.
SHAPES = {
    "8B": ModelShape("llama", 32, 4096, 14336, 32, 8, vocabulary=128_256),
    "27B": ModelShape("llama", 64, 5120, 19_456, 40, 8, vocabulary=151_936),
    "tiny": ModelShape("llama", 6, 512, 1536, 8, 2, head=64, vocabulary=2048),
}
_FLOATS = {"attn_norm", "ffn_norm"}
_NOISE_BYTES = 64 << 20
# The scales of a block, in half precision: where they are, and values that keep activations in range.
_SCALES = {
    "Q4_K": ((0, 0.0002), (2, 0.0015)),
    "Q6_K": ((208, 0.00002),),
    "Q5_0": ((0, 0.0025),),
    "Q8_0": ((0, 0.0003),),
}


def write_model(path: Path, name: str) -> Path:
    """Write a model of one of SHAPES in Q4_K_M with random weights, unless it is there."""
    if path.exists():
        return path
    shape = SHAPES[name]
    (header,) = hollow_files(name, shape).headers
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, shape.architecture)
    for key, value in shape.settings().items():
        writer.add_uint32(f"{shape.architecture}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(10000.0)
    _add_vocabulary(writer, shape.vocabulary)
    ones = np.ones(shape.width, np.float32)
    norms = ["output_norm.weight"]
    norms += [f"blk.{layer}.{norm}.weight" for layer in range(shape.layers) for norm in sorted(_FLOATS)]
    for norm in norms:
        writer.add_tensor_info(norm, ones.shape, ones.dtype, ones.nbytes)
    kinds = {}
    for tensor in header.tensors:
        kind = kinds[tensor.name] = gguf.GGMLQuantizationType(tensor.type_id)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        stored = (*reversed(tensor.shape[1:]), tensor.shape[0] // block * block_bytes)
        writer.add_tensor_info(tensor.name, stored, np.dtype(np.uint8), tensor.n_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    out = writer.fout[0]
    for _ in norms:
        _write(writer, memoryview(ones).cast("B"))
    noise: dict[str, NDArray[np.uint8]] = {}
    for number, tensor in enumerate(header.tensors):
        kind = kinds[tensor.name]
        if kind.name not in noise:
            noise[kind.name] = _noise(kind)
        blocks = noise[kind.name]
        start = 131 * number % (len(blocks) // 2)  # other weights in each layer
        writer.write_padding(out, out.tell())
        left = tensor.n_bytes
        while left:
            piece = memoryview(blocks[start:]).cast("B")[:left]
            out.write(piece)
            left -= len(piece)
        writer.write_padding(out, out.tell())
    writer.close()
    partial.replace(path)
    return path


def _write(writer: gguf.GGUFWriter, data: memoryview) -> None:
    assert writer.fout is not None
    out = writer.fout[0]
    writer.write_padding(out, out.tell())
    out.write(data)
    writer.write_padding(out, out.tell())


def _noise(kind: gguf.GGMLQuantizationType) -> NDArray[np.uint8]:
    """Blocks of a quantization with random bytes and small scales."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(kind.value).integers(
        0, 256, (_NOISE_BYTES // block_bytes, block_bytes), np.uint8
    )
    for at, scale in _SCALES[kind.name]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Bytes, control tokens and names, of which SentencePiece's tokenizer makes texts."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"token{number}" for number in range(len(tokens), size)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256
    kinds += [gguf.TokenType.NORMAL] * (size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
