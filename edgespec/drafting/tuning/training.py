"""Training a drafter towards its target's distribution, with a checkpoint to resume from.

Knowledge distillation (Hinton et al. 2015), as DistillSpec (Zhou et al. 2024) does it for drafters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from edgespec.base.progress import Progress
from edgespec.drafting.tuning.answers import TargetAnswer
from edgespec.drafting.tuning.network.network import Network
from edgespec.errors import OutputError
from edgespec.files.writing import atomic_write

_WARM_UP = 10  # steps
_CLIP = 1.0
_REMEMBERED_BYTES = 1 << 30  # of what the layers below the trained ones computed
# Products of a new size have code generated for them, which is kept: gigabytes after some hundred sizes.
_ROUND_ROWS = 64
_SAVE_EVERY_S = 120.0
_SMOOTHED = 0.95
_CHECKED_ANSWERS = 16  # that are not learned from, and tell when learning has become memorizing
_LEAST_ANSWERS = 8  # to learn from, for each that is checked
_LEAST_CHECKS = 4  # fewer say little, so every answer is learned from
_CHECK_EVERY = 50  # steps
_SLOWED_AFTER = 3  # checks without a gain; one, as long as there was no gain at all
_PATIENCE = 12  # checks without a gain, after which training ends
_SLOWER = 4  # times, from one rate to the next
_FASTER = 1.2  # times as fast, and bfloat16 is worth its rounding
_TRIAL = (256, 1024)  # rows and width of the products that are timed


TrainingBudget = Callable[[int, float], float]
"""The share of a training that so many steps and seconds, in all runs together, are; 1 or more ends it."""


@dataclass(frozen=True)
class TrainingMethod:
    rate: float = 6e-4  # AdamW's, after a few steps
    # The first loss from which on a start is trained at these rates. A nearer one has less to learn and loses
    # more by chance, so its rate is as much lower as it is nearer.
    far: float = 1.2
    least: float = 0.1  # share of the rate that is left at the end
    texts: int = 4  # of a step


USUAL = TrainingMethod()


def divergence(logits: Tensor, top: Tensor, logprobs: Tensor) -> Tensor:
    """The mean Kullback-Leibler divergence of a drafter from its target, in nats, over rows.

    Known are a few of the target's most likely tokens. All others count as one: how the target shares
    out the little that is left among them is neither known nor worth learning. So this is a lower bound of
    the divergence over all tokens, and 0 if the two agree.

    Args:
        logits: (rows, n_tokens) the drafter's.
        top: (rows, k) columns of the target's most likely tokens.
        logprobs: (rows, k) their log-probabilities by the target.
    """
    drafted = logits.gather(-1, top) - logits.logsumexp(-1, keepdim=True)
    listed = (logprobs.exp() * (logprobs - drafted)).sum(-1)
    rest, drafted_rest = _rest(logprobs), _rest(drafted)
    return (listed + rest * (rest.log() - drafted_rest.log())).mean()


def _rest(logprobs: Tensor) -> Tensor:
    """(rows) the probability of all tokens that are not listed."""
    tiny = torch.finfo(torch.float32).eps
    return (1 - logprobs.exp().sum(-1)).clamp(min=tiny)


class Trainer:
    """Trains a network on the target's answers.

    A few of them are not learned from: the weights that come out best on these are kept, and where nothing is
    gained on them, training returns to these weights at a lower rate.

    Args:
        checkpoint: where the training is saved; if it is there and has the same label, it is taken up.
        label: what the checkpoint belongs to.

    Attributes:
        rate: AdamW's: the method's, lower after steps that gained nothing.
        steps, seconds: of training so far, in all runs.
        loss: a moving average; None before the first step.
        checked: the best divergence on answers that are not learned from, so far; None if it is not known.
    """

    def __init__(
        self,
        network: Network,
        answers: Sequence[TargetAnswer],
        checkpoint: Path,
        label: str,
        *,
        method: TrainingMethod = USUAL,
        seed: int = 0,
    ) -> None:
        self._network = network
        self._answers = answers
        self._method = method
        self.rate = method.rate
        self._learned, self._checks = _divided(len(answers))
        # Products with a copy of the rows that are needed, not with all of them.
        self._columns = tokens_seen(answers)
        self._output = network.output.index_select(0, self._columns)
        self._lower: dict[int, Tensor] = {}
        self._lower_bytes = 0
        self._checkpoint = checkpoint
        self._best = checkpoint.with_name(f"{checkpoint.name}.best")
        self._label = label
        self._seed = seed
        self._optimizer = self._new_optimizer()
        self.half = products_gain_from_bfloat16()
        self.steps = 0
        self.seconds = 0.0
        self.loss: float | None = None
        self.checked: float | None = None
        self._without_gain = 0  # checks since the best one
        self._has_gained = False  # at any check
        self._first_losses: list[float] = []  # while the rate is still low: how far the start is
        self._changing = False
        self._resume()

    def _new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self._network.trained().values(), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def _restart_at(self, rate: float) -> None:
        """Train at another rate, without the moments of earlier steps."""
        self.rate = rate
        self._optimizer = self._new_optimizer()

    def train(self, budget: TrainingBudget, on_progress: Progress) -> None:
        """Train until the budget is spent, or nothing has been gained for long; keep the best weights.

        After some checks without a gain, training returns to the best weights, at a lower rate.
        Whatever ends it, the progress is saved; of a step whose weights are half changed, that before it.
        """
        if not self.steps and self._checks:
            self.checked = self._divergence_of_checks()
            self._save_best()
        saved = time.monotonic()
        try:
            while (done := budget(self.steps, self.seconds)) < 1 and self._without_gain < _PATIENCE:
                divergence_now = "" if self.loss is None else f", divergence {self.loss:.2f}"
                on_progress(f"Tuning, step {self.steps + 1}{divergence_now}", done)
                self._timed_step(done)
                if self._checks and self.steps % _CHECK_EVERY == 0:
                    self._check()
                    slowed_after = _SLOWED_AFTER if self._has_gained else 1
                    if 0 < self._without_gain < _PATIENCE and self._without_gain % slowed_after == 0:
                        self._restore_best()
                        self._restart_at(self.rate / _SLOWER)
                if time.monotonic() - saved > _SAVE_EVERY_S:
                    self.save()
                    saved = time.monotonic()
        finally:
            if not self._changing:
                self.save()
        if self._checks:
            self._check()
            self._restore_best()

    def _check(self) -> None:
        """Measure on the answers that are not learned from, and keep the weights if they are the best."""
        begun = time.monotonic()
        found = self._divergence_of_checks()
        self.seconds += time.monotonic() - begun
        if self.checked is None or found < self.checked:
            self.checked, self._without_gain, self._has_gained = found, 0, True
            self._save_best()
        else:
            self._without_gain += 1

    def _divergence_of_checks(self) -> float:
        """The mean divergence on the answers that are not learned from."""
        size = self._method.texts
        groups = [self._checks[at : at + size] for at in range(0, len(self._checks), size)]
        with torch.no_grad():
            losses = [float(self._loss(chosen, torch.cat(self._lower_of(chosen)))) for chosen in groups]
        return sum(losses) / len(losses)

    def _timed_step(self, done: float) -> None:
        order = answers_of_step(len(self._learned), self.steps, self._method.texts, self._seed)
        chosen = [self._learned[place] for place in order]
        start = time.monotonic()
        self._step(chosen, torch.cat(self._lower_of(chosen)), done)
        self.seconds += time.monotonic() - start

    def _loss(self, chosen: Sequence[int], x: Tensor) -> Tensor:
        batch = batch_of([self._answers[index] for index in chosen])
        x, lengths = F.pad(x, (0, 0, 0, -len(x) % _ROUND_ROWS)), _filled_up(batch.lengths)
        known = len(batch.rows)
        with self._precision():
            rows = F.pad(batch.rows, (0, -known % _ROUND_ROWS))
            logits = F.linear(self._network.upper(x, lengths)[rows], self._output)[:known]
        return divergence(logits.float(), torch.searchsorted(self._columns, batch.top), batch.logprobs)

    def _step(self, chosen: Sequence[int], x: Tensor, done: float) -> None:
        loss = self._loss(chosen, x)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._network.trained().values(), _CLIP)
        found = float(loss.detach())
        if len(self._first_losses) < _WARM_UP:
            self._first_losses.append(found)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate_at(done)
        self._changing = True
        self._optimizer.step()
        self.loss = found if self.loss is None else _SMOOTHED * self.loss + (1 - _SMOOTHED) * found
        self.steps += 1
        self._changing = False

    def _rate_at(self, done: float) -> float:
        """The rate of a step, when this share of the training is done."""
        near = min(sum(self._first_losses) / len(self._first_losses) / self._method.far, 1.0)
        warm = min((self.steps + 1) / _WARM_UP, 1.0)
        return self.rate * near * warm * (1 - (1 - self._method.least) * done)

    def _precision(self) -> AbstractContextManager[None]:
        return torch.autocast("cpu", torch.bfloat16) if self.half else nullcontext()

    def _lower_of(self, chosen: Sequence[int]) -> list[Tensor]:
        """(length, width) for each of these answers, what the first trained layer reads of its text."""
        texts = {index: text_of(self._answers[index]) for index in chosen if index not in self._lower}
        found = {index: self._lower[index] for index in chosen if index in self._lower}
        if texts:
            lengths = _filled_up([len(text) for text in texts.values()])
            tokens = torch.tensor([token for text in texts.values() for token in text])
            with self._precision():
                x = self._network.lower(F.pad(tokens, (0, -len(tokens) % _ROUND_ROWS)), lengths).float()
            for index, part in zip(texts, x.split_with_sizes(list(lengths)), strict=False):
                found[index] = part
                if self._lower_bytes + part.nbytes <= _REMEMBERED_BYTES:
                    self._lower[index] = part
                    self._lower_bytes += part.nbytes
        return [found[index] for index in chosen]

    def save(self) -> None:
        """Save everything that the next run needs to resume."""
        state = {
            "label": self._label,
            "steps": self.steps,
            "seconds": self.seconds,
            "loss": self.loss,
            "checked": self.checked,
            "without_gain": self._without_gain,
            "rate": self.rate,
            "has_gained": self._has_gained,
            "first_losses": self._first_losses,
            "weights": self._weights(),
            "optimizer": self._optimizer.state_dict(),
        }
        _write(self._checkpoint, state)

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self._network.trained().items()}

    def _save_best(self) -> None:
        """Write the weights to a file: a copy in memory would take as much as the gradients."""
        _write(self._best, {"label": self._label, "weights": self._weights()})

    def _restore_best(self) -> None:
        state = _read(self._best)
        if not self._fits(state):
            raise OutputError(f"{self._best} was changed or removed while it was in use.", "Tune again.")
        self._load(state)

    def _fits(self, state: dict[str, Any]) -> bool:
        return state.get("label") == self._label and state["weights"].keys() == self._network.trained().keys()

    def _load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, weight in self._network.trained().items():
                weight.copy_(state["weights"][name])

    def _resume(self) -> None:
        state = _read(self._checkpoint)
        if not self._fits(state) or "rate" not in state:
            return
        if self._checks and not self._fits(_read(self._best)):
            return
        self._load(state)
        self.rate, self._has_gained = state["rate"], state["has_gained"]
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps, self.seconds, self.loss = state["steps"], state["seconds"], state["loss"]
        self.checked, self._without_gain = state["checked"], state["without_gain"]
        self._first_losses = state["first_losses"]


def _divided(count: int) -> tuple[list[int], list[int]]:
    """Places of the answers to learn from, and of a few, evenly spaced, to check on."""
    few = min(_CHECKED_ANSWERS, count // (_LEAST_ANSWERS + 1))
    few = few if few >= _LEAST_CHECKS else 0
    checks = [(2 * n + 1) * count // (2 * few) for n in range(few)]
    return sorted(set(range(count)) - set(checks)), checks


def _filled_up(lengths: Sequence[int]) -> tuple[int, ...]:
    """Lengths of texts, and behind them that of a filler up to a round number of rows."""
    filler = -sum(lengths) % _ROUND_ROWS
    return (*lengths, filler) if filler else tuple(lengths)


def _write(path: Path, state: dict[str, Any]) -> None:
    """Write a file of tensors."""
    try:
        with atomic_write(path, suffix=".partial") as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        raise OutputError(f"{path} cannot be written: {error}.", "Free some space on that disk.") from error


def _read(path: Path) -> dict[str, Any]:
    """A checkpoint; empty if there is none that can be read."""
    try:
        found = torch.load(path, weights_only=True)
    except Exception:  # torch has no common base for what damaged files make it raise
        return {}
    return found if isinstance(found, dict) else {}


def products_gain_from_bfloat16() -> bool:
    """True if this processor multiplies matrices in bfloat16 faster than in float32: measured."""
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


_MAX_TOKENS = 512  # of a text; what is behind them is cut off


@dataclass(frozen=True)
class TrainingBatch:
    """A few texts, one after another."""

    lengths: tuple[int, ...]  # of each text
    tokens: Tensor  # (length of all texts) prompts and answers
    rows: Tensor  # (known rows) places of the tokens behind which the target's distribution is known
    top: Tensor  # (known rows, k) its most likely tokens
    logprobs: Tensor  # (known rows, k) their log-probabilities


def batch_of(answers: Sequence[TargetAnswer]) -> TrainingBatch:
    texts = [text_of(answer) for answer in answers]
    rows, top, logprobs = [], [], []
    begin = 0
    for answer, text in zip(answers, texts, strict=True):
        first = len(answer.text.prompt) - 1
        count = max(min(len(answer.top), len(text) - first), 0)
        rows.append(torch.arange(begin + first, begin + first + count))
        top.append(answer.top[:count])
        logprobs.append(answer.logprobs[:count])
        begin += len(text)
    return TrainingBatch(
        tuple(map(len, texts)),
        torch.tensor([token for text in texts for token in text]),
        torch.cat(rows),
        torch.from_numpy(np.concatenate(top).astype(np.int64)),
        torch.from_numpy(np.concatenate(logprobs).astype(np.float32)),
    )


def text_of(answer: TargetAnswer) -> tuple[int, ...]:
    """The tokens of a prompt and its answer, as far as they are learned from."""
    return (*answer.text.prompt, *answer.text.answer)[:_MAX_TOKENS]


def answers_of_step(count: int, step: int, size: int, seed: int) -> list[int]:
    """Return which of `count` answers a step learns from: each once, in a new order each time around."""
    steps = max(count // size, 1)
    turn, place = divmod(step, steps)
    order: list[int] = np.random.default_rng([seed, turn]).permutation(count).tolist()
    return order[place * size : (place + 1) * size]


def tokens_seen(answers: Sequence[TargetAnswer]) -> Tensor:
    """(count) every token that is among the most likely of any row, in order of its id.

    The output layer is computed for these alone: other tokens have next to none of the target's probability,
    and a drafter that is near its target gives them as little.
    """
    found = np.unique(np.concatenate([answer.top.ravel() for answer in answers]))
    return torch.from_numpy(found.astype(np.int64))
