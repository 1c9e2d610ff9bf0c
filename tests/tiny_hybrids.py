"""Properties of the layers of recurrent architectures, for tiny models of them."""

from __future__ import annotations

from typing import Any

import gguf

from tests.tiny import (
    GATED_MIXTURE,
    HEAD,
    MIXTURES,
    N_EMBD,
    N_FF,
    N_HEAD_KV,
    N_LAYER,
    N_VOCAB,
    USUAL_LAYER,
    Architecture,
    Shape,
    add_delta,
    add_experts,
    attention_every_fourth,
)

_STATE, _VALUE_HEADS, _CONV = 64, 4, 4
_INNER, _GROUPS, _HEADS = 2 * N_EMBD, 2, 2 * N_EMBD // HEAD
_SMALL_STATE, _RANK = 16, N_EMBD // 16

_COMMON = {name: shape for name, shape in USUAL_LAYER.items() if "norm" not in name}
_ATTENTION = {name: shape for name, shape in _COMMON.items() if name.startswith("attn_")}
_DENSE = {name: shape for name, shape in _COMMON.items() if name.startswith("ffn_")}
_MAMBA: dict[str, Shape] = {
    "ssm_in.weight": (2 * _INNER, N_EMBD),
    "ssm_conv1d.weight": (_INNER, _CONV),
    "ssm_conv1d.bias": (_INNER,),
    "ssm_x.weight": (_RANK + 2 * _SMALL_STATE, _INNER),
    "ssm_dt_norm.weight": (_RANK,),
    "ssm_dt.weight": (_INNER, _RANK),
    "ssm_dt.bias": (_INNER,),
    "ssm_b_norm.weight": (_SMALL_STATE,),
    "ssm_c_norm.weight": (_SMALL_STATE,),
    "ssm_a": (_INNER, _SMALL_STATE),
    "ssm_d": (_INNER,),
    "ssm_out.weight": (N_EMBD, _INNER),
}
_CONVOLVED = _INNER + 2 * _GROUPS * _STATE
_MAMBA2: dict[str, Shape] = {
    "ssm_in.weight": (_INNER + _CONVOLVED + _HEADS, N_EMBD),
    "ssm_conv1d.weight": (_CONVOLVED, _CONV),
    "ssm_conv1d.bias": (_CONVOLVED,),
    "ssm_dt.bias": (_HEADS,),
    "ssm_a": (_HEADS, 1),
    "ssm_d": (_HEADS, 1),
    "ssm_norm.weight": (_GROUPS, _INNER // _GROUPS),
    "ssm_out.weight": (N_EMBD, _INNER),
}
_SHORT: dict[str, Shape] = {
    "shortconv.conv.weight": (N_EMBD, 3),
    "shortconv.in_proj.weight": (3 * N_EMBD, N_EMBD),
    "shortconv.out_proj.weight": (N_EMBD, N_EMBD),
}
_OUTPUT: dict[str, Shape] = {"output.weight": (N_VOCAB, N_EMBD)}
_ATTENDS = [i % 4 == 3 for i in range(N_LAYER)]
_KV_HEADS = [N_HEAD_KV if attends else 0 for attends in _ATTENDS]


def _qwen35(writer: gguf.GGUFWriter) -> None:
    add_delta(writer)
    writer.add_array(f"{writer.arch}.rope.dimension_sections", [HEAD // 8] * 4)


def _qwen35moe(writer: gguf.GGUFWriter) -> None:
    _qwen35(writer)
    add_experts(writer)
    writer.add_expert_shared_feed_forward_length(N_FF)


def _delta_layer(index: int) -> dict[str, Shape]:
    layer = attention_every_fourth(index)
    if layer.pop("ssm_ba.weight", None):
        layer |= {f"ssm_{name}.weight": (_VALUE_HEADS, N_EMBD) for name in ("alpha", "beta")}
    return layer


def _mamba_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_ssm_conv_kernel(_CONV)
    writer.add_ssm_inner_size(_INNER)
    writer.add_ssm_state_size(_SMALL_STATE)
    writer.add_ssm_time_step_rank(_RANK)


def _mamba2_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_ssm_conv_kernel(_CONV)
    writer.add_ssm_inner_size(_INNER)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(_HEADS)
    writer.add_ssm_group_count(_GROUPS)


def _nemotron(writer: gguf.GGUFWriter) -> None:
    _mamba2_keys(writer)
    writer.add_layer_norm_eps(1e-5)
    lengths: Any = [N_FF if kind == "f" else 0 for kind in _nemotron_kinds()]
    del writer.kv_data[0]["nemotron_h.feed_forward_length"]
    writer.add_feed_forward_length(lengths)


def _nemotron_kinds() -> list[str]:
    return ["rfra"[i % 4] for i in range(N_LAYER)]


def _nemotron_layer(index: int) -> dict[str, Shape]:
    kind = _nemotron_kinds()[index]
    if kind == "f":
        return {name: _DENSE[name] for name in ("ffn_up.weight", "ffn_down.weight")}
    return _MAMBA2 if kind == "r" else _ATTENTION


HYBRIDS: dict[str, Architecture] = {
    "qwen35": Architecture(
        {"post_attention_norm.weight": (N_EMBD,), **_DENSE},
        layer_at=_delta_layer,
        without=(*_ATTENTION, "ffn_norm.weight"),
        beside=_OUTPUT,
        keys=_qwen35,
    ),
    "qwen35moe": Architecture(
        {"post_attention_norm.weight": (N_EMBD,), **GATED_MIXTURE},
        layer_at=_delta_layer,
        without=(*_COMMON, "ffn_norm.weight"),
        beside=_OUTPUT,
        keys=_qwen35moe,
    ),
    "qwen3next": MIXTURES["qwen3next"],
    "lfm2": Architecture(
        layer_at=lambda i: (
            _ATTENTION | {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
            if _ATTENDS[i]
            else _SHORT
        ),
        without=tuple(_ATTENTION),
        beside={"token_embd_norm.weight": (N_EMBD,)},
        without_beside=("output_norm.weight",),
        keys=lambda writer: writer.add_uint32("lfm2.shortconv.l_cache", 3),
        heads=(_KV_HEADS, HEAD, HEAD),
    ),
    "nemotron_h": Architecture(
        layer_at=_nemotron_layer,
        without=(*_COMMON, "ffn_norm.weight"),
        beside=_OUTPUT,
        keys=_nemotron,
        heads=([N_HEAD_KV if kind == "a" else 0 for kind in _nemotron_kinds()], HEAD, HEAD),
    ),
    "granitehybrid": Architecture(
        layer_at=lambda i: _ATTENTION if _ATTENDS[i] else _MAMBA2,
        without=tuple(_ATTENTION),
        beside=_OUTPUT,
        keys=_mamba2_keys,
        heads=(_KV_HEADS, HEAD, HEAD),
    ),
    "falcon-h1": Architecture(
        _MAMBA2 | {"ffn_norm": (N_EMBD,)}, without=("ffn_norm.weight",), beside=_OUTPUT, keys=_mamba2_keys
    ),
    "jamba": Architecture(
        layer_at=lambda i: _ATTENTION if _ATTENDS[i] else _MAMBA,
        without=tuple(_ATTENTION),
        beside=_OUTPUT,
        keys=_mamba_keys,
        heads=(_KV_HEADS, HEAD, HEAD),
    ),
    "mamba2": Architecture(_MAMBA2, without=(*_COMMON, "ffn_norm.weight"), beside=_OUTPUT, keys=_mamba2_keys),
}
