"""Training a drafter towards its target's distribution, with a checkpoint to go on from.

Knowledge distillation (Hinton et al. 2015), as DistillSpec (Zhou et al. 2024) does it for drafters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from edgespec.drafting.tuning.answers import Answer
from edgespec.drafting.tuning.batches import Batch, answers_of_step, batch_of
from edgespec.drafting.tuning.network import Network
from edgespec.errors import OutputError
from edgespec.files.writing import atomic_write
from edgespec.progress import Progress

_RATE = 1e-4
_LEAST_RATE = 0.1  # of it, at the end
_WARM_UP = 10  # steps
_TEXTS = 4  # a step
_CLIP = 1.0
_SAVE_EVERY_S = 120.0
_SMOOTHED = 0.95
_FASTER = 1.2  # times as fast, and bfloat16 is worth its rounding
_TRIAL = (256, 1024)  # rows and width of the products that are timed


class Budget(Protocol):
    """How long to train."""

    def done(self, steps: int, seconds: float) -> float:
        """The share of the training that is done; 1 or more ends it."""


@dataclass(frozen=True)
class TimeBudget:
    """Training for so many seconds, in all runs together."""

    seconds: float

    def done(self, steps: int, seconds: float) -> float:
        """As `Budget`."""
        return seconds / self.seconds


@dataclass(frozen=True)
class StepBudget:
    """Training for so many steps."""

    steps: int

    def done(self, steps: int, seconds: float) -> float:
        """As `Budget`."""
        return steps / self.steps


def divergence(logits: Tensor, top: Tensor, logprobs: Tensor) -> Tensor:
    """The mean Kullback-Leibler divergence of a drafter from its target, in nats, over rows.

    Tokens that are not listed count as one: how the target shares out the little that is left among them is
    neither known nor worth learning. So this is a lower bound of the whole divergence, and 0 if they agree.

    Args:
        logits: (rows, n_vocab) the drafter's.
        top: (rows, k) the target's most likely tokens.
        logprobs: (rows, k) their log-probabilities by the target.
    """
    drafted = logits.gather(-1, top) - logits.logsumexp(-1, keepdim=True)
    listed = (logprobs.exp() * (logprobs - drafted)).sum(-1)
    tiny = torch.finfo(torch.float32).eps
    rest, drafted_rest = ((1 - part.exp().sum(-1)).clamp(min=tiny) for part in (logprobs, drafted))
    return (listed + rest * (rest.log() - drafted_rest.log())).mean()


class Trainer:
    """Trains a network on the target's answers.

    Args:
        checkpoint: where the training is saved; if it is there and has the same label, it is taken up.
        label: what the checkpoint belongs to.

    Attributes:
        steps, seconds: of training so far, in all runs.
        loss: a moving average of the divergence in nats; None before the first step.

    Raises:
        OutputError: the checkpoint cannot be written.
    """

    def __init__(
        self, network: Network, answers: Sequence[Answer], checkpoint: Path, label: str, *, seed: int = 0
    ) -> None:
        self._network = network
        self._answers = answers
        self._checkpoint = checkpoint
        self._label = label
        self._seed = seed
        self._optimizer = torch.optim.AdamW(
            network.trained().values(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.half = products_gain_from_bfloat16()
        self.steps = 0
        self.seconds = 0.0
        self.loss: float | None = None
        self._changing = False
        self._take_up()

    def train(self, budget: Budget, on_progress: Progress) -> None:
        """Train until the budget is spent.

        Whatever ends it, the progress is saved; of a step whose weights are half changed, that before it.

        Raises:
            OutputError: the checkpoint cannot be written.
        """
        saved = time.monotonic()
        try:
            while (done := budget.done(self.steps, self.seconds)) < 1:
                divergence_now = "" if self.loss is None else f", divergence {self.loss:.2f}"
                on_progress(f"Tuning, step {self.steps + 1}{divergence_now}", done)
                start = time.monotonic()
                self._step(batch_of(answers_of_step(self._answers, self.steps, _TEXTS, self._seed)), done)
                self.seconds += time.monotonic() - start
                if time.monotonic() - saved > _SAVE_EVERY_S:
                    self.save()
                    saved = time.monotonic()
        finally:
            if not self._changing:
                self.save()

    def _step(self, batch: Batch, done: float) -> None:
        for group in self._optimizer.param_groups:
            warm = min((self.steps + 1) / _WARM_UP, 1.0)
            group["lr"] = _RATE * warm * (_LEAST_RATE + (1 - _LEAST_RATE) * (1 - done))
        with torch.autocast("cpu", torch.bfloat16) if self.half else nullcontext():
            logits = self._network.logits(self._network.hidden(batch.tokens)[batch.rows])
        loss = divergence(logits.float(), batch.top, batch.logprobs)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._network.trained().values(), _CLIP)
        found = float(loss.detach())
        self._changing = True
        self._optimizer.step()
        self.loss = found if self.loss is None else _SMOOTHED * self.loss + (1 - _SMOOTHED) * found
        self.steps += 1
        self._changing = False

    def save(self) -> None:
        """Save everything that the next run needs to go on.

        Raises:
            OutputError: the file cannot be written.
        """
        state = {
            "label": self._label,
            "steps": self.steps,
            "seconds": self.seconds,
            "loss": self.loss,
            "weights": {name: weight.detach() for name, weight in self._network.trained().items()},
            "optimizer": self._optimizer.state_dict(),
        }
        try:
            with atomic_write(self._checkpoint, suffix=".partial") as file:
                torch.save(state, file)
        except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
            raise OutputError(
                f"{self._checkpoint} cannot be written: {error}.", "Make room on that disk."
            ) from error

    def _take_up(self) -> None:
        state = _read(self._checkpoint)
        if state.get("label") != self._label:
            return
        with torch.no_grad():
            for name, weight in self._network.trained().items():
                weight.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps, self.seconds, self.loss = state["steps"], state["seconds"], state["loss"]


def _read(path: Path) -> dict[str, Any]:
    """A checkpoint; empty if there is none that can be read."""
    try:
        found = torch.load(path, weights_only=True)
    except Exception:  # torch has no common base for what damaged files make it raise
        return {}
    return found if isinstance(found, dict) else {}


def products_gain_from_bfloat16() -> bool:
    """Whether this processor multiplies matrices in bfloat16 faster than in float32: measured."""
    rows, width = _TRIAL
    seconds = {}
    for kind in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(rows, width, dtype=kind), torch.ones(width, width, dtype=kind)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            times.append(time.perf_counter() - start)
        seconds[kind] = min(times)
    return seconds[torch.float32] > _FASTER * seconds[torch.bfloat16]
