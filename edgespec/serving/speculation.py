"""What pieces of a stream say of drafting and accepting, to clients that ask with `"speculation": true`."""

from __future__ import annotations

from typing import Any

from edgespec.generation.result import Chunk, Generation, PassRecord, PassTree


def of_chunk(chunk: Chunk) -> dict[str, Any]:
    """The field for a piece: of a pass, of the whole answer at its end, or none."""
    if chunk.generation is not None:
        return {"speculation": of_answer(chunk.generation)}
    if chunk.record is not None:
        return {"speculation": of_pass(chunk.record, chunk.tree)}
    return {}


def of_pass(record: PassRecord, tree: PassTree | None) -> dict[str, Any]:
    """One pass: seconds by what they went to, and its tree."""
    figures = {
        "nodes": record.nodes,
        "accepted": record.accepted,
        "draft_s": round(record.draft_s, 5),
        "verify_s": round(record.verify_s, 5),
        "wait_s": round(record.wait_s, 5),
        "accept_s": round(record.accept_s, 5),
    }
    if tree is None:
        return figures
    return figures | {
        "tree": {
            "tokens": tree.tokens,
            "parents": tree.parents,
            "chances": tree.chances,
            "by": tree.sources,
            "path": tree.path,
            "next": tree.bonus,
        }
    }


def of_answer(answer: Generation) -> dict[str, Any]:
    """The whole answer; names are those of `generate --json`."""
    record = answer.to_json(None)
    return {
        **record["speculation"],
        "gain": round(answer.gain, 3),
        "limited_by": answer.bound_by,
        "timings": record["timings"],
        "memory": record["memory"],
    }
