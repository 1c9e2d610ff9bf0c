"""A summary of a model from its header, for people who decide whether to fetch it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from edgespec.base.units import readable, readable_count
from edgespec.config import Config
from edgespec.heads.families import head_kind
from edgespec.heads.mtp import mtp_fault
from edgespec.models.gguf.embedding import embedding_shape
from edgespec.models.gguf.head_family import HeadFamily, head_family
from edgespec.models.gguf.layers import ModelFiles, mtp_count
from edgespec.models.gguf.types import ArrayInfo, GGUFHeader
from edgespec.planning.report.sight import describe_projector

_KINDS = (
    ("embedding", re.compile(r"token_embd|position_embd|per_layer_token_embd")),
    ("output", re.compile(r"output\.weight")),
    ("experts", re.compile(r".*_exps\.")),
    ("attention", re.compile(r"blk\.\d+\.(attn|ssm)_(?!.*norm)")),
    ("feed-forward", re.compile(r"blk\.\d+\.ffn_(?!.*norm)")),
)
_OTHER = "norms and other"


def describe(
    headers: Sequence[GGUFHeader], *, memory: dict[str, Any], approximate: bool = False
) -> dict[str, Any]:
    """The facts about a model, as JSON.

    Args:
        headers: of all its files, in order.
        memory: how it would be held here, see planning.memory.fit.
        approximate: the headers are made of a catalog's sizes, so they have no tokenizer and no template.
    """
    header, files = headers[0], ModelFiles.of_headers(headers)
    tensors = [tensor for part in headers for tensor in part.tensors]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    n_bytes = sum(part.file_bytes for part in headers)
    family = head_family(header)
    head = head_kind(header) if family is not HeadFamily.MTP else ""
    return {
        "approximate": approximate,
        "title": header.metadata.get("general.name"),
        "architecture": header.architecture,
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "bytes": n_bytes,
        "files": len(headers),
        "quantization": _quantization(headers),
        "layers": files.headers[0].block_count,
        "mtp_layers": 0 if files.mtp is None else files.mtp.n_layers,
        "mtp_fault": mtp_fault(files) if mtp_count(header) and not head else "",
        "context": header.context_length,
        "embedding": header.embedding_length,
        "experts": _number(header, "expert_count"),
        "vocabulary": tokens.length if isinstance(tokens, ArrayInfo) else None,
        "tokenizer": header.metadata.get("tokenizer.ggml.model"),
        "head": head or None,
        "pooling": None if (embeds := embedding_shape(header)) is None else embeds.pooling,
        "template": None if approximate else "tokenizer.chat_template" in header.metadata,
        "mtp_file": family is HeadFamily.MTP,
        "widened_from": header.metadata.get("edgespec.widened_from"),
        "fingerprint": header.fingerprint,
        "memory": memory,
    }


def _quantization(headers: Sequence[GGUFHeader]) -> list[dict[str, Any]]:
    """Bytes of each quantization, by kind of tensor."""
    found: dict[str, Counter[str]] = {}
    for header in headers:
        for tensor in header.tensors:
            kind = next((name for name, pattern in _KINDS if pattern.match(tensor.name)), _OTHER)
            found.setdefault(kind, Counter())[type_name(tensor.type_id)] += tensor.n_bytes
    order = [*(name for name, _ in _KINDS), _OTHER]
    return [
        {"tensors": kind, "types": dict(found[kind].most_common()), "bytes": found[kind].total()}
        for kind in order
        if kind in found
    ]


def as_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Describe the model for people: a name and a text for each line."""
    rows: list[tuple[str, str]] = []
    if facts["approximate"]:
        rows.append(("figures", "approximate: from the catalog, not from the model's file"))
    if facts["title"]:
        rows.append(("title", str(facts["title"])))
    rows.append(("architecture", facts["architecture"]))
    rows.append(("parameters", readable_count(facts["parameters"])))
    split = f", {facts['files']} files" if facts["files"] > 1 else ""
    rows.append(("size", f"{readable(facts['bytes'])}{split}"))
    for row in facts["quantization"]:
        if row["tensors"] != _OTHER:
            types = ", ".join(
                f"{name} {readable(size)}" if len(row["types"]) > 1 else name
                for name, size in row["types"].items()
            )
            rows.append((f"  {row['tensors']}", types))
    rows.append(("layers", str(facts["layers"] or "?")))
    if facts["mtp_fault"]:
        rows.append(("MTP layer", f"does not draft: {facts['mtp_fault']}"))
    elif facts["mtp_layers"]:
        alone = "of a model in another file; use it with --draft" if facts["mtp_file"] else ""
        rows.append(("MTP layer", alone or "drafts for the model with --draft mtp"))
    if facts["experts"]:
        rows.append(("experts", str(facts["experts"])))
    rows.append(("context", f"{facts['context']} tokens" if facts["context"] else "?"))
    kind = f" ({facts['tokenizer']})" if facts["tokenizer"] else ""
    vocabulary = f"{facts['vocabulary']} tokens{kind}" if facts["vocabulary"] else "none"
    rows.append(("vocabulary", vocabulary))
    if facts["head"]:
        made = "for the model that it was made for; use it with --draft"
        rows.append(("draft head", f"{facts['head']}, {made}"))
    elif facts["pooling"]:
        size = f"{facts['embedding']} dimensions, pooling {facts['pooling']}"
        rows.append(("embeddings", f"{size}; the model writes no text"))
    elif facts["template"] is not None:
        rows.append(("chat template", "yes" if facts["template"] else "no: it continues texts"))
    if facts["widened_from"]:
        rows.append(("widened", f"from {facts['widened_from']}: larger, with the same answers"))
    if facts.get("projector"):
        rows.append(("images", describe_projector(facts["projector"], Config().model.context)))
    rows.append(("memory", _verdict(facts["memory"])))
    return rows


def _verdict(memory: dict[str, Any]) -> str:
    needed, available = readable(memory["needed_bytes"]), readable(memory["available_bytes"])
    if memory["verdict"] == "fits":
        return f"{needed} of {available}: everything stays in memory"
    if memory["verdict"] == "streams":
        return (
            f"{needed} of {available}: {readable(memory['resident_bytes'])} stay in memory, "
            f"{readable(memory['streamed_bytes_per_pass'])} are read from disk per pass"
        )
    return f"at least {readable(memory['least_bytes'])} are needed, and {available} are available"


def type_name(type_id: int) -> str:
    """A tensor type's name, such as Q4_K."""
    import gguf

    try:
        return gguf.GGMLQuantizationType(type_id).name
    except ValueError:
        return f"type {type_id}"


def _number(header: GGUFHeader, key: str) -> int | None:
    value = header.metadata.get(f"{header.architecture}.{key}")
    return value if isinstance(value, int) else None
