"""Options and results of `draft tune`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.base.units import readable_rate, readable_time
from edgespec.drafting.tuning.evaluation import Evaluation
from edgespec.errors import OutputError, UsageError

LEAST_ANSWERS = 4
_MAX_MINUTES = 7 * 24 * 60


@dataclass(frozen=True)
class TuneOptions:
    start: str | None = None  # the drafter to begin with; None takes the best one known, or makes one
    prompts: Path | None = None  # asked before the bundled ones
    output: Path | None = None  # None keeps the result in the data folder, if it is registered
    minutes: float = 30.0  # of answering and training together, in all runs
    answers: int | None = None  # most, to learn from; None takes as many as a third of the time allows
    steps: int | None = None  # of training, however long they take
    pass_s: float | None = None  # of the target, by which drafters are compared; None measures it
    memory: int | None = None  # bytes, while the target answers; None means what is available
    tokens: int = 128  # most, of each answer
    threads: int | None = None


@dataclass(frozen=True)
class TrainingRecord:
    """The training data of a drafter, and its distance from its target afterwards."""

    answers: int
    tokens: int
    steps: int
    seconds: float
    divergence: float
    rate: float  # AdamW's, at the end


@dataclass(frozen=True)
class TunedDrafter:
    target: Path
    path: Path | None  # None if it was not registered and nobody asked for the file
    before: Evaluation  # on answers that nothing was trained on
    after: Evaluation
    rival: Evaluation | None  # the best other drafter known, if it is better; nothing is registered then
    trained: TrainingRecord

    @property
    def registered(self) -> bool:
        """True if `--draft auto` takes it from now on."""
        return self.rival is None

    @property
    def description(self) -> list[str]:
        """The gain in sentences."""
        before, after, trained = self.before, self.after, self.trained
        return [
            f"Tuned {before.path.name} on {trained.answers} answers of {self.target.name} "
            f"({trained.tokens} tokens) for {readable_time(trained.seconds)}.",
            f"On {after.agreement.tokens} held-out tokens, it agrees on "
            f"{after.agreement.top1:.0%} at once and on {after.agreement.top4:.0%} within four; "
            f"before, on {before.agreement.top1:.0%} and {before.agreement.top4:.0%}.",
            f"The target should write {readable_rate(after.tokens_per_second)} with it, "
            f"up from {readable_rate(before.tokens_per_second)}.",
            "It is the best drafter known: --draft auto uses it."
            if self.rival is None
            else f"It is not registered: with {self.rival.path.name} the target should write "
            f"{readable_rate(self.rival.tokens_per_second)}.",
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "target": str(self.target),
            "path": str(self.path) if self.path else None,
            "registered": self.registered,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "better": self.rival.to_json() if self.rival else None,
            "trained": asdict(self.trained),
        }


def check(options: TuneOptions) -> None:
    """Refuse impossible options."""
    if not 0 < options.minutes <= _MAX_MINUTES:
        limit = f"at most {_MAX_MINUTES:g}" if options.minutes > 0 else "positive"
        raise UsageError(f"--minutes must be {limit}, not {options.minutes:g}.")
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise OutputError(f"There is no folder {options.output.absolute().parent}.", "Create it first.")
