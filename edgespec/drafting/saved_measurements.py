"""Measurements of a target and its drafters in a file, so that an interrupted command continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec.drafting.agreement import PassCost, SampleAnswer, SampleAnswers
from edgespec.files.writing import atomic_write

CANDIDATE = "candidate "
"""Prefix of the keys of measured drafters."""

_SAME_MEMORY = 0.05  # share by which free memory varies between runs


class SavedMeasurements:
    """The measurements so far, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.values = {}

    @property
    def described(self) -> str:
        """The measurements in words; empty if there are none."""
        count = sum(key.startswith(CANDIDATE) for key in self.values)
        measured = f" and {count} measured candidate{'' if count == 1 else 's'}" if count else ""
        return f"the target's sample text{measured}" if "written" in self.values else ""

    def save(self, key: str, value: Any) -> None:
        """Save a value at once."""
        self.values[key] = value
        with atomic_write(self._path) as file:
            file.write(json.dumps(self.values).encode())

    def written(
        self, memory: int, write: Callable[[], SampleAnswers], measure: Callable[[], PassCost]
    ) -> SampleAnswers:
        """The texts that the target generated, and the cost of its passes: saved, or measured now.

        Args:
            memory: bytes that the target has. They change its passes, but not its text.
            write: generates the texts.
            measure: generates just enough to time passes.
        """
        if "written" not in self.values:
            written = write()
            self.save("written", {"texts": [asdict(sample) for sample in written.samples]})
            self.save("passes", {"memory": memory, **asdict(written.cost)})
        known = self.values.get("passes", {})
        if abs(known.get("memory", 0) - memory) > _SAME_MEMORY * memory:
            self.save("passes", {"memory": memory, **asdict(measure())})
        samples = tuple(
            SampleAnswer(tuple(sample["prompt"]), tuple(sample["answer"]))
            for sample in self.values["written"]["texts"]
        )
        cost = {name: value for name, value in self.values["passes"].items() if name != "memory"}
        return SampleAnswers(samples, PassCost(**cost))
