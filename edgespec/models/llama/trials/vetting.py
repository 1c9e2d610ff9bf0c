"""Vetting unfamiliar model files: a child process loads them first.

llama.cpp has hundreds of assertions that abort on an inconsistent header; `gguf.checks` anticipates some of
them. Headers of familiar kinds whose settings agree with their tensors are loaded at once: the fuzz campaign
(tests/fuzz) has covered them. Any other is loaded in a child process once, and the verdict is saved for that
header and llama.cpp build.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from platformdirs import user_cache_path

from edgespec.errors import ModelFileError
from edgespec.files.writing import atomic_write
from edgespec.models.gguf.types import ArrayInfo, GGUFHeader
from edgespec.models.llama.runtime.backend import build_identity
from edgespec.processes.trial import attempt_in_child

_MOST_S = 20.0  # of processor time: the largest vocabularies take two

# What the fuzz campaign has covered, and the settings that such models have.
_ARCHITECTURES = {"llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "olmo2"}
_VOCABULARIES = {"gpt2", "llama"}
_SETTINGS = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
    *("rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
}


def require_loadable(headers: Sequence[GGUFHeader], beside: GGUFHeader | None = None) -> None:
    """Make sure that llama.cpp survives loading a model.

    Args:
        headers: of the model's files, the first one first.
        beside: of the target whose matrices it borrows, for a draft head.

    Raises:
        ModelFileError: it does not.
        BackendError: no child process can be started to find out.
    """
    if is_familiar(headers[0]):
        return
    place = _place(headers if beside is None else [*headers, beside])
    failure = _read(place)
    if failure is None:
        failure = _try_out(headers[0].path, None if beside is None else beside.path)
        _keep(place, failure)
    if failure:
        raise ModelFileError(
            f"llama.cpp ends by {failure} when it loads {headers[0].path}.",
            "It is damaged or made for another llama.cpp. Download it again, or get another conversion.",
        )


def is_familiar(header: GGUFHeader) -> bool:
    """Whether a header that passed the checks is of a kind that llama.cpp loads or refuses safely."""
    prefix = f"{header.architecture}."
    settings = {key: value for key, value in header.metadata.items() if key.startswith(prefix)}
    return (
        header.architecture in _ARCHITECTURES
        and header.metadata.get("tokenizer.ggml.model") in _VOCABULARIES
        and all(key.removeprefix(prefix) in _SETTINGS for key in settings)
        and not any(isinstance(value, ArrayInfo) for value in settings.values())
        and _heads_fit(header)
    )


def _heads_fit(header: GGUFHeader) -> bool:
    """Whether the heads in the settings are those of the first layer's matrices."""

    def count(name: str, default: int = 0) -> int:
        value = header.metadata.get(f"{header.architecture}.{name}", default)
        return value if type(value) is int else 0

    width, heads = count("embedding_length"), count("attention.head_count")
    groups = count("attention.head_count_kv", heads)
    if not 1 <= groups <= heads <= width or heads % groups:
        return False
    size = count("attention.key_length", width // heads)
    rotated = count("rope.dimension_count", size)
    if size % 2 or count("attention.value_length", width // heads) != size or not 2 <= rotated <= size:
        return False
    rows = {tensor.name: tensor.shape[-1] for tensor in header.tensors if tensor.name.startswith("blk.0.")}
    if "blk.0.attn_qkv.weight" in rows:
        return rows["blk.0.attn_qkv.weight"] == (heads + 2 * groups) * size
    return (
        rows.get("blk.0.attn_q.weight") == heads * size
        and rows.get("blk.0.attn_k.weight") == rows.get("blk.0.attn_v.weight") == groups * size
    )


def _try_out(path: Path, beside: Path | None) -> str:
    """What ends a process that loads the file; empty if it survives."""
    request = {"path": str(path.resolve())}
    if beside is not None:
        request["beside"] = str(beside.resolve())
    verdict = attempt_in_child(
        "edgespec.models.llama.trials.load_trial",
        request,
        cpu_s=_MOST_S,
        stack_bytes=8 << 20,
    )
    if verdict.why == "time":
        return "running without end"
    return verdict.detail if verdict.answer is None else ""


def _place(headers: Sequence[GGUFHeader]) -> Path:
    names = " ".join([build_identity(), *(header.fingerprint for header in headers)])
    digest = hashlib.blake2b(names.encode(), digest_size=16).hexdigest()
    return user_cache_path("edgespec") / "vetted" / f"{digest}.json"


def _read(place: Path) -> str | None:
    try:
        failure = json.loads(place.read_bytes())["failure"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return failure if isinstance(failure, str) else None


def _keep(place: Path, failure: str) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(place, durable=False) as file:
            file.write(json.dumps({"failure": failure}).encode())
    except OSError:
        pass  # it is tried again next time
