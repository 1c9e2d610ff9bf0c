"""The outcome of trying the kernel layouts: which of them work here, and how fast each one is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.kernels.setting import PLAIN

ROWS = (1, 8, 32)  # of activations: plain decoding, a small tree, a large tree

# How much faster than an earlier one in ggml's order a layout must be to be preferred; less is noise.
_GAIN = 1.1

# Layout to seconds for each of ROWS.
Seconds = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class TrialReport:
    # what is wrong with each layout that must not be used, such as "it crashes (segmentation fault) at
    # products of Q4_0"; by ggml's name
    problems: dict[str, str] = field(default_factory=dict)
    # for each quantization's type id, seconds of a product by layout ("plain" among them)
    seconds: dict[int, dict[str, tuple[float, ...]]] = field(default_factory=dict)

    def fastest(self, type_id: int, layouts: Sequence[str]) -> str:
        """The fastest of these layouts, given in ggml's order; "plain" if that is faster than all of them.

        Speed is the geometric mean over ROWS, so that one row weighs as much as many.
        """
        measured = self.seconds.get(type_id, {})
        best, *others = [*layouts, PLAIN]
        for other in others:
            if best in measured and other in measured:
                gain = _mean(measured[best]) / _mean(measured[other])
                best = other if gain > _GAIN else best
        return best

    def speedup(self, layout: str) -> tuple[float, ...] | None:
        """Speed of a layout relative to the plain one for each of ROWS: the median over quantizations."""
        ratios = [
            [a / b for a, b in zip(by_layout[PLAIN], by_layout[layout], strict=True)]
            for by_layout in self.seconds.values()
            if PLAIN in by_layout and layout in by_layout
        ]
        if not ratios:
            return None
        return tuple(sorted(column)[len(column) // 2] for column in zip(*ratios, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for files and scripts."""
        return {
            "problems": self.problems,
            "rows": list(ROWS),
            "seconds": {
                str(type_id): {name: [float(f"{s:.4g}") for s in row] for name, row in by_layout.items()}
                for type_id, by_layout in self.seconds.items()
            },
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TrialReport:
        """Restore from a file's JSON.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is not a report for these row counts.
        """
        if record["rows"] != list(ROWS):
            raise ValueError("a report for other row counts")
        return cls(
            {str(name): str(what) for name, what in record["problems"].items()},
            {
                int(type_id): {
                    str(name): tuple(float(s) for s in row)
                    for name, row in by_layout.items()
                    if len(row) == 3
                }
                for type_id, by_layout in record["seconds"].items()
            },
        )


def _mean(seconds: Sequence[float]) -> float:
    return math.exp(sum(math.log(max(s, 1e-9)) for s in seconds) / len(seconds))
