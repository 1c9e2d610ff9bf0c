"""Reports on drafting and accepting in a stream, for clients that ask with `"speculation": true`."""

from __future__ import annotations

from typing import Any

from edgespec.generation.result import Chunk, Generation


def of_pass(chunk: Chunk) -> dict[str, Any]:
    """The field for a pass: seconds by what they went to, and its tree; nothing if the chunk is of none."""
    record, tree = chunk.record, chunk.tree
    if record is None:
        return {}
    figures: dict[str, Any] = {
        "nodes": record.nodes,
        "accepted": record.accepted,
        "draft_s": round(record.draft_s, 5),
        "verify_s": round(record.verify_s, 5),
        "wait_s": round(record.wait_s, 5),
        "accept_s": round(record.accept_s, 5),
    }
    if tree is not None:
        figures["tree"] = {
            "tokens": tree.tokens,
            "parents": tree.parents,
            "chances": tree.chances,
            "by": tree.sources,
            "path": tree.path,
            "next": tree.bonus,
        }
    return {"speculation": figures}


def of_answer(answer: Generation) -> dict[str, Any]:
    """The field for the whole answer; names are those of `generate --json`."""
    record = answer.to_json(None)
    figures = {
        **record["speculation"],
        "gain": round(answer.gain, 3) or None,
        "limited_by": answer.bound_by,
        "timings": record["timings"],
        "memory": record["memory"],
    }
    return {"speculation": figures}
