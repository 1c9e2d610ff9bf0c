"""Tiny models with random weights: real files of many architectures, for what needs no sense."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD, N_LAYER, N_VOCAB = 256, 512, 4, 2, 64, 6, 1536
N_EXPERT, N_EXPERT_USED = 4, 2
_MARKS = 3  # the first control token that may be another one

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """Properties of one architecture's layers.

    Attributes:
        layer: further tensors of a layer, name to shape (rows first), biases and norms included.
        layer_at: the same for layers that differ from one another, by number.
        without: tensors of the common layer that it lacks.
        beside: further tensors of the whole model.
        keys: amends the writer with metadata of its own.
        without_beside: tensors of the common model that it lacks.
        heads: of keys and values, how many there are, in each layer if that differs, and the length of a key
            and of a value.
    """

    layer: dict[str, Shape] = field(default_factory=dict)
    layer_at: Callable[[int], dict[str, Shape]] = lambda index: {}
    without: tuple[str, ...] = ()
    beside: dict[str, Shape] = field(default_factory=dict)
    keys: Callable[[gguf.GGUFWriter], Any] = lambda writer: None
    without_beside: tuple[str, ...] = ()
    heads: tuple[int | list[int], int, int] = (N_HEAD_KV, HEAD, HEAD)


_KV = N_HEAD_KV * HEAD
USUAL_LAYER: dict[str, Shape] = {
    "attn_norm.weight": (N_EMBD,),
    "attn_q.weight": (N_EMBD, N_EMBD),
    "attn_k.weight": (_KV, N_EMBD),
    "attn_v.weight": (_KV, N_EMBD),
    "attn_output.weight": (N_EMBD, N_EMBD),
    "ffn_norm.weight": (N_EMBD,),
    "ffn_gate.weight": (N_FF, N_EMBD),
    "ffn_up.weight": (N_FF, N_EMBD),
    "ffn_down.weight": (N_EMBD, N_FF),
}
EXPERTS: dict[str, Shape] = {
    "ffn_gate_inp.weight": (N_EXPERT, N_EMBD),
    "ffn_gate_exps.weight": (N_EXPERT, N_FF, N_EMBD),
    "ffn_up_exps.weight": (N_EXPERT, N_FF, N_EMBD),
    "ffn_down_exps.weight": (N_EXPERT, N_EMBD, N_FF),
}
_ADDED = tuple(
    f"{name}.weight" for name in ("attn_output", "ssm_out", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
)
_DENSE_FFN = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
SHARED_EXPERT: dict[str, Shape] = {
    "ffn_gate_shexp.weight": (N_FF, N_EMBD),
    "ffn_up_shexp.weight": (N_FF, N_EMBD),
    "ffn_down_shexp.weight": (N_EMBD, N_FF),
}
GATED_MIXTURE = {**EXPERTS, "ffn_gate_inp_shexp.weight": (N_EMBD,), **SHARED_EXPERT}


def add_experts(writer: gguf.GGUFWriter) -> None:
    """Describe a mixture of experts."""
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_EXPERT_USED)
    writer.add_expert_feed_forward_length(N_FF)


def _gemma2(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(32)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)


def _gemma3(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(8)


_ODD_FF = 480  # so that quantized experts are no multiples of a block


def _gpt_oss(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_EXPERT_USED)
    writer.add_expert_feed_forward_length(_ODD_FF)
    writer.add_sliding_window(32)


def _leading_dense(writer: gguf.GGUFWriter) -> None:
    add_experts(writer)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(1.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


_LATENT, _NOPE = 128, 64  # of compressed keys and values; of a head's part without positions


def _deepseek2(writer: gguf.GGUFWriter) -> None:
    _leading_dense(writer)
    writer.add_expert_group_count(2)
    writer.add_expert_group_used_count(1)
    writer.add_q_lora_rank(_LATENT)
    writer.add_kv_lora_rank(_LATENT)
    writer.add_key_length_mla(_NOPE + HEAD)
    writer.add_value_length_mla(HEAD)


_STATE, _KEY_HEADS, _VALUE_HEADS, _CONV = 64, 2, 4, 4


def _qwen3next(writer: gguf.GGUFWriter) -> None:
    add_experts(writer)
    writer.add_expert_shared_feed_forward_length(N_FF)
    add_delta(writer)


def add_delta(writer: gguf.GGUFWriter) -> None:
    """Describe layers of gated delta rules."""
    writer.add_ssm_conv_kernel(_CONV)
    writer.add_ssm_inner_size(_VALUE_HEADS * _STATE)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(_VALUE_HEADS)
    writer.add_ssm_group_count(_KEY_HEADS)


def _dense_then_experts(index: int) -> dict[str, Shape]:
    if index == 0:
        return {name: USUAL_LAYER[name] for name in _DENSE_FFN}
    return EXPERTS | SHARED_EXPERT | {"exp_probs_b.bias": (N_EXPERT,)}


def attention_every_fourth(index: int) -> dict[str, Shape]:
    if index % 4 == 3:
        return {
            "attn_q.weight": (2 * N_EMBD, N_EMBD),
            "attn_k.weight": USUAL_LAYER["attn_k.weight"],
            "attn_v.weight": USUAL_LAYER["attn_v.weight"],
            "attn_output.weight": USUAL_LAYER["attn_output.weight"],
            "attn_q_norm.weight": (HEAD,),
            "attn_k_norm.weight": (HEAD,),
        }
    keys, values = _KEY_HEADS * _STATE, _VALUE_HEADS * _STATE
    return {
        "attn_qkv.weight": (2 * keys + values, N_EMBD),
        "attn_gate.weight": (values, N_EMBD),
        "ssm_conv1d.weight": (2 * keys + values, _CONV),
        "ssm_dt.bias": (_VALUE_HEADS,),
        "ssm_a": (_VALUE_HEADS,),
        "ssm_ba.weight": (2 * _VALUE_HEADS, N_EMBD),
        "ssm_norm.weight": (_STATE,),
        "ssm_out.weight": (N_EMBD, values),
    }


_OUTPUT: dict[str, Shape] = {"output.weight": (N_VOCAB, N_EMBD)}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(beside=_OUTPUT),
    "qwen2": Architecture({"attn_q.bias": (N_EMBD,), "attn_k.bias": (_KV,), "attn_v.bias": (_KV,)}),
    "qwen3": Architecture({"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}, beside=_OUTPUT),
    "gemma2": Architecture(
        {"post_attention_norm.weight": (N_EMBD,), "post_ffw_norm.weight": (N_EMBD,)}, keys=_gemma2
    ),
    "gemma3": Architecture(
        {
            "attn_q_norm.weight": (HEAD,),
            "attn_k_norm.weight": (HEAD,),
            "post_attention_norm.weight": (N_EMBD,),
            "post_ffw_norm.weight": (N_EMBD,),
        },
        keys=_gemma3,
    ),
    "phi3": Architecture(
        {"attn_qkv.weight": (N_EMBD + 2 * _KV, N_EMBD), "ffn_up.weight": (2 * N_FF, N_EMBD)},
        without=("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight", "ffn_up.weight"),
        beside=_OUTPUT,
    ),
    "olmo2": Architecture(
        {
            "attn_q_norm.weight": (N_EMBD,),
            "attn_k_norm.weight": (_KV,),
            "post_attention_norm.weight": (N_EMBD,),
            "post_ffw_norm.weight": (N_EMBD,),
        },
        without=("attn_norm.weight", "ffn_norm.weight"),
        beside=_OUTPUT,
    ),
    "qwen3moe": Architecture(
        {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,), **EXPERTS},
        without=_DENSE_FFN,
        beside=_OUTPUT,
        keys=add_experts,
    ),
}

# Further mixtures of experts: biases; leading dense layers and shared experts; groups of experts and latent
# attention; gate and up as one stack, and recurrent layers.
MIXTURES: dict[str, Architecture] = {
    "qwen3moe": ARCHITECTURES["qwen3moe"],
    "gpt-oss": Architecture(
        {
            "post_attention_norm.weight": (N_EMBD,),
            "attn_q.bias": (N_EMBD,),
            "attn_k.bias": (_KV,),
            "attn_v.bias": (_KV,),
            "attn_output.bias": (N_EMBD,),
            "attn_sinks.weight": (N_HEAD,),
            "ffn_gate_inp.weight": (N_EXPERT, N_EMBD),
            "ffn_gate_inp.bias": (N_EXPERT,),
            "ffn_gate_exps.weight": (N_EXPERT, _ODD_FF, N_EMBD),
            "ffn_up_exps.weight": (N_EXPERT, _ODD_FF, N_EMBD),
            "ffn_down_exps.weight": (N_EXPERT, N_EMBD, _ODD_FF),
            "ffn_gate_exps.bias": (N_EXPERT, _ODD_FF),
            "ffn_up_exps.bias": (N_EXPERT, _ODD_FF),
            "ffn_down_exps.bias": (N_EXPERT, N_EMBD),
        },
        without=(*_DENSE_FFN, "ffn_norm.weight"),
        beside=_OUTPUT,
        keys=_gpt_oss,
    ),
    "glm4moe": Architecture(
        {"post_attention_norm.weight": (N_EMBD,)},
        layer_at=_dense_then_experts,
        without=(*_DENSE_FFN, "ffn_norm.weight"),
        beside=_OUTPUT,
        keys=_leading_dense,
    ),
    "deepseek2": Architecture(
        {
            "attn_q_a.weight": (_LATENT, N_EMBD),
            "attn_q_a_norm.weight": (_LATENT,),
            "attn_q_b.weight": (N_HEAD * (_NOPE + HEAD), _LATENT),
            "attn_kv_a_mqa.weight": (_LATENT + HEAD, N_EMBD),
            "attn_kv_a_norm.weight": (_LATENT,),
            "attn_k_b.weight": (N_HEAD, _LATENT, _NOPE),
            "attn_v_b.weight": (N_HEAD, HEAD, _LATENT),
        },
        layer_at=_dense_then_experts,
        without=(*_DENSE_FFN, "attn_q.weight", "attn_k.weight", "attn_v.weight"),
        beside=_OUTPUT,
        keys=_deepseek2,
        heads=(1, _LATENT + HEAD, _LATENT),
    ),
    "qwen3next": Architecture(
        {
            "post_attention_norm.weight": (N_EMBD,),
            "ffn_gate_inp.weight": EXPERTS["ffn_gate_inp.weight"],
            "ffn_gate_up_exps.weight": (N_EXPERT, 2 * N_FF, N_EMBD),
            "ffn_down_exps.weight": EXPERTS["ffn_down_exps.weight"],
            "ffn_gate_inp_shexp.weight": (N_EMBD,),
            **SHARED_EXPERT,
        },
        layer_at=attention_every_fourth,
        without=(
            *_DENSE_FFN,
            *("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight", "ffn_norm.weight"),
        ),
        beside=_OUTPUT,
        keys=_qwen3next,
    ),
}


def write_tiny(
    path: Path,
    architecture: str,
    vocabulary_of: Path,
    *,
    kind: Architecture | None = None,
    split: int = 0,
    damped: float = 1.0,
    mtp: Mapping[str, NDArray[np.float32]] | None = None,
    n_mtp: int = 1,
    alone: bool = False,
    marks: Sequence[str] = (),
) -> Path:
    """A model of that architecture in F16, with the first tokens of another model's vocabulary.

    Args:
        kind: what sets it apart; None if it is one of those here.
        split: most tensors a file; 0 writes one file.
        damped: scales what layers add; near 0, the next token depends on the last one alone.
        mtp: the weights of a layer for multi-token prediction behind the others, by their names in a layer.
        n_mtp: how many of these layers there are, all alike.
        alone: leave out the other layers.
        marks: control tokens of its own, in place of rare ones.

    Returns:
        The path to load.
    """
    kind = kind or (ARCHITECTURES | MIXTURES)[architecture]
    heads, key, value = kind.heads
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_block_count(N_LAYER + (n_mtp if mtp else 0))
    if mtp:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", n_mtp)
    writer.add_context_length(2048)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(heads)
    writer.add_key_length(key)
    writer.add_value_length(value)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    kind.keys(writer)
    add_vocabulary(writer, vocabulary_of, marks)
    rng = np.random.default_rng(1)

    def add(name: str, shape: Shape) -> None:
        precise = ("norm", "gate_inp", "sinks", "ssm_a", "conv1d", "shortconv.conv")
        small = name.endswith((".bias", "ssm_a", "ssm_d")) or any(part in name for part in precise)
        scale = 1.0 if "norm" in name else 0.1
        if name.endswith(_ADDED):
            scale *= damped
        values = (rng.standard_normal(shape) * scale).astype(np.float32 if small else np.float16)
        if "norm" in name:
            values = np.abs(values)
        writer.add_tensor(name, -np.abs(values) if name.endswith("ssm_a") else values)

    add("token_embd.weight", (N_VOCAB, N_EMBD))
    if "output_norm.weight" not in kind.without_beside:
        add("output_norm.weight", (N_EMBD,))
    for name, shape in kind.beside.items():
        add(name, shape)
    for i in range(0 if alone else N_LAYER):
        tensors = {name: shape for name, shape in USUAL_LAYER.items() if name not in kind.without}
        tensors |= kind.layer | kind.layer_at(i)
        for name, shape in tensors.items():
            add(f"blk.{i}.{name}", shape)
    for name, values in (mtp or {}).items():
        small = values.ndim == 1 or "gate_inp" in name
        for layer in range(N_LAYER, N_LAYER + n_mtp):
            writer.add_tensor(f"blk.{layer}.{name}", values.astype(np.float32 if small else np.float16))
    finish(writer)
    return path if path.exists() else next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*"))))


def finish(writer: gguf.GGUFWriter) -> None:
    """Write a file whose metadata and tensors are all known."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@cache
def vocabulary_fields(model: Path) -> dict[str, tuple[Any, list[gguf.GGUFValueType]]]:
    """The tokenizer's metadata of a model, as values and types: gguf takes seconds to read so many tokens."""
    from tests.fuzz.headers import ARRAY, parse  # which makes models of these

    with model.open("rb") as file:
        entries = parse(file.read(32 << 20)).entries
    return {
        entry.key.decode(): (
            _as_python(entry.value, entry.element if entry.type_id == ARRAY else entry.type_id),
            [
                gguf.GGUFValueType(kind)
                for kind in (entry.type_id, entry.element)[: 1 + (entry.type_id == ARRAY)]
            ],
        )
        for entry in entries
        if entry.key.startswith(b"tokenizer.ggml.")
    }


def add_vocabulary_of(writer: gguf.GGUFWriter, model: Path) -> int:
    """Give a file the whole vocabulary of another model; returns how many tokens it has."""
    vocabulary = vocabulary_fields(model)
    for name, (value, types) in vocabulary.items():
        writer.add_key_value(name, value, types[0], sub_type=types[-1] if len(types) > 1 else None)
    return len(vocabulary["tokenizer.ggml.tokens"][0])


def _as_python(value: Any, kind: int) -> Any:
    if isinstance(value, list):
        return [_as_python(element, kind) for element in value]
    if isinstance(value, bytes):
        return value.decode()
    return bool(value) if kind == gguf.GGUFValueType.BOOL else value


@cache
def first_tokens(model: Path, n_tokens: int) -> tuple[list[str], list[str]]:
    """The model's first tokens, and the merges that lead to them."""
    fields = vocabulary_fields(model)
    tokens = fields["tokenizer.ggml.tokens"][0][:n_tokens]
    kept = set(tokens)
    return tokens, [m for m in fields["tokenizer.ggml.merges"][0] if m.replace(" ", "") in kept]


def add_vocabulary(writer: gguf.GGUFWriter, model: Path, marks: Sequence[str] = ()) -> None:
    """Add the model's first tokens, and the merges that lead to them.

    Args:
        marks: in place of the control tokens behind those that begin and end texts.
    """
    found = {name: value for name, (value, _) in vocabulary_fields(model).items()}
    tokens, merges = first_tokens(model, N_VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(found["tokenizer.ggml.pre"])
    writer.add_token_list([*tokens[:_MARKS], *marks, *tokens[_MARKS + len(marks) :]])
    writer.add_token_types(found["tokenizer.ggml.token_type"][:N_VOCAB])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
