"""The pair that the checks run with, and how they fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgespec
from edgespec.engine.engine import Engine

CONTEXT = 2048


class CheckFailed(Exception):
    """Something was not as it must be; the text says what."""


def require(holds: bool, what: object) -> None:
    """Fail with `what`, if it does not hold."""
    if not holds:
        raise CheckFailed(" ".join(str(what).split())[:300])


@dataclass(frozen=True)
class Pair:
    """A target and its drafter.

    Attributes:
        memory: the budget in MiB; None leaves it to EdgeSpec.
    """

    target: Path
    drafter: Path
    memory: int | None = None

    @classmethod
    def found_in(cls, folder: Path) -> Pair:
        """The largest GGUF file of a folder, and the smallest as its drafter.

        Raises:
            SystemExit: there are no two.
        """
        files = sorted(folder.glob("*.gguf"), key=lambda path: path.stat().st_size)
        if len(files) < 2:
            raise SystemExit(f"{folder} has no two GGUF files: a target and its drafter.")
        return cls(files[-1], files[0])

    def load(self, **options: Any) -> Engine:
        """The pair, or the target with another kind of drafter."""
        memory = None if self.memory is None else self.memory << 20
        usual = {"draft": self.drafter, "context": CONTEXT, "memory": memory, "exact": True}
        return edgespec.load(self.target, **(usual | options))

    @property
    def arguments(self) -> list[str]:
        """Options for the program."""
        limits = [] if self.memory is None else ["--memory", f"{self.memory}MiB"]
        return [str(self.target), "--draft", str(self.drafter), "--context", str(CONTEXT), "--exact", *limits]
