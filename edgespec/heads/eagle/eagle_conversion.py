"""Converting a published EAGLE-3 head to GGUF: `edgespec draft convert`.

Heads are published as a folder with `config.json` and `model.safetensors`, in the layouts of SpecForge
(`midlayer.`) and of vLLM's speculators (`layers.0.`). What a head has beyond these is refused, not guessed:
a head that is a little wrong would be noticed by its drafts alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError, UsageError
from edgespec.files.writing import atomic_large_write, writing_to
from edgespec.heads.eagle.eagle_file import FloatArray, HeadShape, write_head
from edgespec.heads.eagle.eagle_head import read_eagle_head
from edgespec.models.gguf.head_family import HeadFamily
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.safetensors import StoredTensor, read_safetensors
from edgespec.models.gguf.types import GGUFHeader, as_count
from edgespec.models.hub import catalog
from edgespec.models.hub.registry import MADE, DrafterPair, PairRegistry, drafters_folder
from edgespec.progress import Progress

TYPES = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "f16": gguf.GGMLQuantizationType.F16,
}
_NAMES = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {"fc.weight": "fc.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
_REFUSED = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
_ELSEWHERE = "llama.cpp's convert_hf_to_gguf.py may know how, with --target-model-dir."


@dataclass(frozen=True)
class ConvertedHead:
    """A head that was converted.

    Attributes:
        layers: of the target, which it reads.
    """

    path: Path
    target: Path
    layers: tuple[int, ...]
    n_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        return {
            "path": str(self.path),
            "target": str(self.target),
            "layers": list(self.layers),
            "bytes": self.n_bytes,
        }


def convert_head(
    folder: Path,
    target: str,
    *,
    output: Path | None = None,
    quantization: str = "q8_0",
    on_progress: Progress | None = None,
) -> ConvertedHead:
    """Write a head as GGUF, and remember it as a drafter of its target.

    Args:
        folder: with the head's `config.json` and `model.safetensors`.
        target: path or name of the model that it was made for.
        output: where it goes; None is EdgeSpec's data folder.

    Raises:
        UsageError: there is no such quantization.
        ModelFileError: the folder has no head, or one that cannot be converted.
        PairingError: it is a head for another model.
        OutputError: it cannot be written.
    """
    if quantization not in TYPES:
        raise UsageError(f"There is no quantization '{quantization}'.", f"Choose one of {', '.join(TYPES)}.")
    large = ModelFiles.of(read_header(catalog.find(target, on_progress)))
    config = _config(folder)
    tensors = read_safetensors(folder / "model.safetensors")
    shape = head_shape(config, large.headers[0], folder)
    weights = head_weights(tensors, shape, _rope_factors(config, shape, folder), folder)
    path = output or drafters_folder() / f"{large.headers[0].path.stem}-eagle3-{quantization}.gguf"
    partial = path.with_name(f"{path.name}.part")

    def add_vocabulary(writer: gguf.GGUFWriter) -> None:
        for name, field in gguf.GGUFReader(large.paths[0]).fields.items():
            if name.startswith("tokenizer.ggml."):
                kinds = field.types
                writer.add_key_value(
                    name, field.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None
                )

    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_large_write(path, partial):
            drafted = _drafted(tensors)
            write_head(partial, shape, weights, add_vocabulary, drafted=drafted, type_id=TYPES[quantization])
            read_eagle_head(read_header(partial)).require_fit(large)
    header, recipe = large.headers[0], f"head ({HeadFamily.EAGLE.value})"
    PairRegistry().add(
        DrafterPair(header.fingerprint, header.path.name, str(path.absolute()), MADE, recipe=recipe)
    )
    return ConvertedHead(path, header.path, shape.layers, path.stat().st_size)


def head_shape(config: Mapping[str, Any], target: GGUFHeader, folder: Path) -> HeadShape:
    """The sizes of a head, from its configuration and its target's header.

    Raises:
        ModelFileError: it is no EAGLE-3 head, or has what is not known here.
    """
    for name in _REFUSED:
        if config.get(name):
            raise _unknown(folder, f"it sets {name}")
    if config.get("num_hidden_layers") != 1 or not _number(config, "draft_vocab_size"):
        raise ModelFileError(
            f"{folder} has no EAGLE-3 head.", "Its config.json must have draft_vocab_size and one layer."
        )
    n_layers = target.block_count or 0
    # What every published head reads if it does not say otherwise (Li et al. 2025's own code).
    layers = (2, n_layers // 2, n_layers - 3)
    said = config.get("eagle_aux_hidden_state_layer_ids")
    said = said or (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if said is not None and tuple(said) != layers:
        raise _unknown(folder, f"it reads the layers {said}, which frameworks count differently")
    width, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    heads_kv, hidden = _number(config, "num_key_value_heads") or heads, _number(config, "intermediate_size")
    if not (width and heads and hidden):
        raise _unknown(folder, "its config.json lacks its sizes")
    rope = _rope(config)
    return HeadShape(
        layers=layers,
        target_width=_number(config, "target_hidden_size")
        or as_count(target.metadata.get(f"{target.architecture}.embedding_length"))
        or 0,
        width=width,
        heads=heads,
        heads_kv=heads_kv,
        head=_number(config, "head_dim") or width // heads,
        hidden=hidden,
        n_drafted=_number(config, "draft_vocab_size"),
        n_context=_number(config, "max_position_embeddings") or 2048,
        rope_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        epsilon=float(config.get("rms_norm_eps", 1e-5)),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
    )


def head_weights(
    tensors: Mapping[str, StoredTensor], shape: HeadShape, factors: FloatArray | None, folder: Path
) -> dict[str, FloatArray]:
    """The weights by their names in a GGUF file, as llama.cpp computes with them.

    Args:
        factors: (head / 2,) by which the rotation of each pair is slowed; None for none.

    Raises:
        ModelFileError: a tensor is missing, unknown, or of another shape.
    """
    found: dict[str, FloatArray] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        if plain in ("d2t", "t2d"):
            continue
        if plain == "embed_tokens.weight":
            if shape.width != shape.target_width:  # otherwise it is a copy of the target's, which is borrowed
                found["token_embd.weight"] = tensor.floats()
            continue
        new = _new_name(plain)
        if new is None or tensor.shape != shape.tensors[new]:
            raise _unknown(folder, f"its tensor {name} of the shape {list(tensor.shape)} is not known")
        values = tensor.floats()
        if new.endswith("attn_q.weight"):
            values = neighbouring_pairs(values, shape.heads)
        elif new.endswith("attn_k.weight"):
            values = neighbouring_pairs(values, shape.heads_kv)
        found[new] = values
    if missing := shape.tensors.keys() - found.keys():
        raise _unknown(folder, f"it lacks {', '.join(sorted(missing))}")
    if factors is not None:
        found["rope_freqs.weight"] = factors
    return found


def neighbouring_pairs(matrix: FloatArray, heads: int) -> FloatArray:
    """Reorder the rows of a projection whose heads rotate element i with i + half, to rotate neighbours."""
    rows = matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, matrix.shape[1])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(matrix.shape))


def _new_name(name: str) -> str | None:
    if name in _OTHERS:
        return _OTHERS[name]
    for prefix in ("midlayer.", "layers.0."):
        if name.startswith(prefix) and name.endswith(".weight"):
            part = _NAMES.get(name.removeprefix(prefix).removesuffix(".weight"))
            return f"blk.0.{part}.weight" if part else None
    return None


def _drafted(tensors: Mapping[str, StoredTensor]) -> NDArray[np.int64] | None:
    """The target's id of each drafted token; published tables hold how far it is from the head's own."""
    table = tensors.get("d2t") or tensors.get("model.d2t")
    if table is None:
        return None
    offsets = table.integers().ravel()
    return offsets + np.arange(len(offsets))


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found if isinstance(found, dict) else {}


def _rope_factors(config: Mapping[str, Any], shape: HeadShape, folder: Path) -> FloatArray | None:
    """Llama 3.1's factors for long contexts; None where rotation is plain.

    Raises:
        ModelFileError: rotation is scaled in another way.
    """
    rope = _rope(config)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default":
        return None
    if kind != "llama3":
        raise _unknown(folder, f"it scales positions by {kind}")
    factor, low, high = (
        float(rope.get(name, usual))
        for name, usual in (("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
    )
    trained = float(rope.get("original_max_position_embeddings", 8192))
    lengths = 2 * math.pi * shape.rope_base ** (np.arange(0, shape.head, 2) / shape.head)
    smooth = np.clip((trained / lengths - low) / (high - low), 0.0, 1.0)
    factors: FloatArray = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return factors


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{folder} has no readable config.json.",
            "Name the folder of a downloaded head, with config.json and model.safetensors.",
        ) from error
    if not isinstance(config, dict):
        raise ModelFileError(f"{folder} has a config.json that is not an object.")
    nested = config.get("transformer_layer_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def _number(config: Mapping[str, Any], name: str) -> int:
    return as_count(config.get(name)) or 0


def _unknown(folder: Path, what: str) -> ModelFileError:
    return ModelFileError(f"The head in {folder} cannot be converted: {what}.", _ELSEWHERE)
