"""Tokens a pass with a model's own layer for multi-token prediction (MTP): none, chains and trees.

    python -m benchmarks.mtp [--steps N] [--passages N] [--keep FILE]

Trains a tiny Qwen 3.5 (four layers, three of which keep a running state, and an MTP layer; a token is a byte)
on EdgeSpec's own documentation, for some minutes. Then it continues passages that were held out. Only tokens
a pass are counted: a model as small as this is limited by neither memory nor disk, so its speed would say
nothing.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import edgespec
from benchmarks.harness import parser_of, print_head
from edgespec.generation.config import GenerationConfig
from tests.heads.eagle_file import FloatArray
from tests.heads.files import MTP_SHAPE
from tests.heads.reference import random_weights
from tests.tiny_hybrid import random_hybrid, write_tiny_hybrid

_DOCS = Path(__file__).parents[1] / "docs"
_LAYERS, _HEADS, _HEADS_KV, _HEAD = 4, MTP_SHAPE.heads, MTP_SHAPE.heads_kv, MTP_SHAPE.head
_KEY_HEADS, _VALUE_HEADS, _STATE = 2, 4, 64
_EPSILON = MTP_SHAPE.epsilon
_FIRST_BYTE, _BOS = 3, 1  # ids
_ROWS, _BATCH = 128, 8
_HELD_OUT = 12  # passages
_PROMPT = 64  # tokens
_MTP_LOSS = 0.5
_RATE = 3e-3

Weights = dict[str, Tensor]


def main() -> None:
    options = _parse()
    torch.manual_seed(1)
    torch.set_num_threads(options.threads)
    text = _text()
    cut = len(text) - _HELD_OUT * 1024
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "tiny.gguf"
        if not path.exists():
            model, layer = _trained(text[:cut], options.steps)
            write_tiny_hybrid(
                path, gguf.GGMLQuantizationType.F32, lambda values: None, _arrays(layer), _arrays(model)
            )
        prompts = [[_BOS, *text[at : at + _PROMPT].tolist()] for at in range(cut, len(text) - _PROMPT, 1024)]
        _measure(path, prompts[: options.passages], options.tokens, options.temperatures)


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=1200, help="of training")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--passages", type=int, default=_HELD_OUT, help="that are continued")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--keep", type=Path, help="where the model is kept; it is trained only if it is missing"
    )
    return parser.parse_args()


def _text() -> Tensor:
    """The documentation's bytes, as tokens."""
    pages = sorted(page for page in _DOCS.rglob("*.md"))
    data = b"\n".join(page.read_bytes() for page in pages)
    return torch.tensor(np.frombuffer(data, dtype=np.uint8).astype(np.int64)) + _FIRST_BYTE


def _measure(path: Path, prompts: list[list[int]], n_tokens: int, temperatures: list[float]) -> None:
    first, *others = (f"{temperature:g}" for temperature in temperatures)
    print_head("drafts", "nodes", f"tokens a pass, temperature {first}", *others)
    plain: dict[float, list[list[int]]] = {}
    rows = [("none", "none", 1, None), *(("MTP chain", "mtp", n, "chain") for n in (2, 4, 8))]
    rows += [("MTP tree", "mtp", n, "specexec") for n in (4, 8, 16, 32)]
    for name, draft, nodes, tree in rows:
        trees: dict[str, Any] = (
            {} if tree is None else {"tree": tree, "tree_budget": nodes, "drafter": "model"}
        )
        figures = []
        with edgespec.load(path, draft=draft, context=512, exact=True, learn=False, **trees) as engine:
            for temperature in temperatures:
                config = GenerationConfig(max_tokens=n_tokens, temperature=temperature, seed=1)
                answers = [engine.generate(prompt, config) for prompt in prompts]
                said = [answer.tokens for answer in answers]
                assert plain.setdefault(temperature, said) == said, "drafts do not change the text"
                figures.append(sum(map(len, said)) / sum(len(answer.passes) for answer in answers))
        shown = " | ".join(f"{figure:.2f}" for figure in figures)
        print(f"| {name} | {nodes if tree else ''} | {shown} |", flush=True)


def _trained(text: Tensor, steps: int) -> tuple[Weights, Weights]:
    """The weights of a model and its MTP layer, after training both together."""
    rng = np.random.default_rng(3)
    model = {name: torch.tensor(values) for name, values in random_hybrid().items()}
    for name, values in model.items():
        if values.ndim > 1 and "conv" not in name:
            values *= 0.02 / values.std()
    layer = {name: torch.tensor(w) for name, w in random_weights(MTP_SHAPE.tensors, rng).items()}
    both = [*model.values(), *layer.values()]
    for values in both:
        values.requires_grad_(True)
    optimizer = torch.optim.AdamW(both, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    start = time.perf_counter()
    for step, batch in enumerate(_batches(text, steps)):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        losses = _losses(model, layer, batch)
        (losses[0] + _MTP_LOSS * (losses[1] + losses[2])).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(both, 1.0)
        optimizer.step()
        with torch.no_grad():
            for name, values in model.items():
                if name.endswith("ssm_a"):
                    values.clamp_(max=-1e-3)
        if step % 100 == 0 or step == steps - 1:
            shown = ", ".join(f"{loss.item():.2f}" for loss in losses)
            print(
                f"step {step}: loss {shown} (model, MTP, MTP on itself), {time.perf_counter() - start:.0f} s"
            )
    return model, layer


def _batches(text: Tensor, steps: int) -> Iterator[Tensor]:
    for _ in range(steps):
        starts = torch.randint(0, len(text) - _ROWS, (_BATCH,))
        yield torch.stack([text[start : start + _ROWS] for start in starts.tolist()])


def _losses(model: Weights, layer: Weights, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of the model, of its MTP layer, and of the layer from features of its own."""
    states = _states(model, tokens)
    own = _loss(states[:, :-1] @ model["output.weight"].T, tokens[:, 1:])
    # Row r has token r + 1 and state r, and predicts token r + 2.
    first = _mtp(model, layer, tokens[:, 1:-1], states[:, :-2])
    second = _mtp(model, layer, tokens[:, 2:-1], first[:, :-1])
    return (
        own,
        _loss(first @ model["output.weight"].T, tokens[:, 2:]),
        _loss(second @ model["output.weight"].T, tokens[:, 3:]),
    )


def _loss(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def _states(model: Weights, tokens: Tensor) -> Tensor:
    """(batch, rows, width) the model's last states."""
    x = model["token_embd.weight"][tokens]
    for number in range(_LAYERS):
        layer = _part(model, f"blk.{number}.")
        normed = _normed(x, layer["attn_norm.weight"])
        mixed = _attention(layer, normed) if "attn_q.weight" in layer else _delta(layer, normed)
        x = x + mixed
        x = x + _fed_forward(layer, x)
    return _normed(x, model["output_norm.weight"])


def _mtp(model: Weights, layer: Weights, tokens: Tensor, features: Tensor) -> Tensor:
    """(batch, rows, width) the features that the MTP layer computes of tokens and those before them."""
    embedded = _normed(model["token_embd.weight"][tokens], layer["nextn.enorm.weight"])
    both = torch.cat([embedded, _normed(features, layer["nextn.hnorm.weight"])], dim=-1)
    x = both @ layer["nextn.eh_proj.weight"].T
    x = x + _attention(layer, _normed(x, layer["attn_norm.weight"]))
    x = x + _fed_forward(layer, x)
    return _normed(x, layer["nextn.shared_head_norm.weight"])


def _attention(layer: Weights, x: Tensor) -> Tensor:
    batch, rows, _ = x.shape
    both = (x @ layer["attn_q.weight"].T).view(batch, rows, _HEADS, 2, _HEAD)
    query, gate = _normed(both[..., 0, :], layer["attn_q_norm.weight"]), both[..., 1, :]
    key = (x @ layer["attn_k.weight"].T).view(batch, rows, _HEADS_KV, _HEAD)
    value = (x @ layer["attn_v.weight"].T).view(batch, rows, _HEADS_KV, _HEAD)
    query, key = _rotated(query), _rotated(_normed(key, layer["attn_k_norm.weight"]))
    groups = _HEADS // _HEADS_KV
    key, value = (heads.repeat_interleave(groups, dim=2).transpose(1, 2) for heads in (key, value))
    found = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, is_causal=True)
    gated = found.transpose(1, 2) * torch.sigmoid(gate)
    return gated.reshape(batch, rows, -1) @ layer["attn_output.weight"].T


def _rotated(heads: Tensor) -> Tensor:
    half = _HEAD // 2
    angles = torch.arange(heads.shape[1])[:, None] * MTP_SHAPE.rope_base ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def _delta(layer: Weights, x: Tensor) -> Tensor:
    """Gated delta rule (Yang et al. 2024, arXiv 2412.06464), all rows at once by a triangular solve."""
    batch, rows, _ = x.shape
    kernel = layer["ssm_conv1d.weight"]
    mixed = F.pad((x @ layer["attn_qkv.weight"].T).transpose(1, 2), (kernel.shape[1] - 1, 0))
    mixed = F.silu(F.conv1d(mixed, kernel[:, None], groups=kernel.shape[0])).transpose(1, 2)
    keys = _KEY_HEADS * _STATE
    query, key, value = mixed[..., :keys], mixed[..., keys : 2 * keys], mixed[..., 2 * keys :]
    times = _VALUE_HEADS // _KEY_HEADS
    query, key = (
        F.normalize(heads.view(batch, rows, _KEY_HEADS, _STATE), dim=-1, eps=_EPSILON)
        .repeat(1, 1, times, 1)
        .transpose(1, 2)
        for heads in (query, key)
    )
    value = value.view(batch, rows, _VALUE_HEADS, _STATE).transpose(1, 2)
    beta = torch.sigmoid(x @ layer["ssm_beta.weight"].T).transpose(1, 2)[..., None]
    decay = F.softplus(x @ layer["ssm_alpha.weight"].T + layer["ssm_dt.bias"]) * layer["ssm_a"]
    since = decay.transpose(1, 2).cumsum(dim=-1)
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    faded = (since[..., :, None] - since[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    among = (beta * (key @ key.transpose(-1, -2)) * faded).tril(-1) + torch.eye(rows)
    written = torch.linalg.solve_triangular(among, beta * value, upper=False)
    found = (query @ key.transpose(-1, -2) * faded * _STATE**-0.5) @ written
    gate = (x @ layer["attn_gate.weight"].T).view(batch, rows, _VALUE_HEADS, _STATE)
    found = _normed(found.transpose(1, 2), layer["ssm_norm.weight"]) * F.silu(gate)
    return found.reshape(batch, rows, -1) @ layer["ssm_out.weight"].T


def _fed_forward(layer: Weights, x: Tensor) -> Tensor:
    x = _normed(x, layer["post_attention_norm.weight"])
    gate = F.silu(x @ layer["ffn_gate.weight"].T)
    return (gate * (x @ layer["ffn_up.weight"].T)) @ layer["ffn_down.weight"].T


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + _EPSILON) * weight


def _part(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): values for name, values in weights.items() if name.startswith(prefix)}


def _arrays(weights: Mapping[str, Tensor]) -> dict[str, FloatArray]:
    return {name: values.detach().numpy() for name, values in weights.items()}


if __name__ == "__main__":
    main()
