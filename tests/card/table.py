"""The table of a run, and what its logits say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_NEAR = 0.5  # between log probabilities, within which rounding may decide


def tables(results: Mapping[str, Any]) -> Iterator[str]:
    """The lines of all tables."""
    machine = results.get("machine", {})
    yield f"{machine.get('device', '')}; {machine.get('processor', '')}, {machine.get('threads', '')} threads"
    for kind, ways in results.get("link", {}).items():
        if not isinstance(ways, dict):
            continue
        best = ", ".join(f"{max(rates.values()) / 1e9:.1f} GB/s {way}" for way, rates in ways.items())
        yield f"link, {kind} memory: {best}"
    for model in results.get("models", {}).values():
        yield ""
        yield model["title"]
        rows = sorted(
            {int(n) for case in model["cases"] for times in case.get("passes", {}).values() for n in times}
        )
        yield f"| milliseconds of a pass | sends from | {' | '.join(f'{n} rows' for n in rows)} |"
        yield f"|---|---|{'---|' * len(rows)}"
        for case in model["cases"]:
            if "error" in case:
                yield f"| {case['label']} | {case['error']} |"
            for bound, times in case.get("passes", {}).items():
                cells = (f"{times[str(n)] * 1e3:.3g}" if str(n) in times else "" for n in rows)
                yield f"| {case['label']} | {bound} | {' | '.join(cells)} |"
        yield from model.get("differences", [])
    if "answers" in results:
        yield ""
        for answer in results["answers"]:
            if "error" in answer:
                yield f"{answer['label']}: {answer['error']}"
            else:
                where = answer["layers"] or "all here"
                speed = f"{answer['tokens_per_second']:.2f} tokens/s"
                yield f"{answer['label']}: {speed}, {where}, {answer['same']}"


def difference(expected: Any, found: Any) -> float:
    """The difference of logits between two placements, relative to the spread of the logits of a row."""
    own, other = np.array(expected), np.array(found)
    own -= own.mean(axis=1, keepdims=True)
    other -= other.mean(axis=1, keepdims=True)
    return float(np.sqrt(((own - other) ** 2).mean() / (own**2).mean()))


def same_text(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Whether two answers are equal, or part at a near-tie of the first, or at what is none."""
    own, other = expected["tokens"], found["tokens"]
    if own == other:
        return "the same text"
    at = next(
        (n for n, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other))
    )
    if at >= min(len(own), len(other)):
        return f"the same text for {at} tokens, then only one goes further"
    likeliest = dict(map(tuple, expected["likeliest"][at]))
    behind = likeliest[own[at]] - likeliest.get(other[at], float("-inf"))
    tie = "a near-tie" if behind < _NEAR else "NO near-tie"
    return f"the same text for {at} of {len(own)} tokens, then {tie} (log probabilities {behind:.2g} apart)"
