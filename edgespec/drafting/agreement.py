"""Measure how often a drafter agrees with its target, on text that the target generated.

The target decodes greedily, so every token of an answer is its first choice. The drafter reads the same text
in a few large batches, and its ranks of those tokens are counted. This is cheap, and it predicts acceptance:
a chain is accepted as far as first choices agree, a tree wherever one of the first few does.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgespec.base.progress import Progress
from edgespec.costs.pass_time import even_draft_seconds, pass_seconds, read_seconds, round_seconds
from edgespec.drafters.translation import Translation
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.llama.tokenizer.compatibility import differs
from edgespec.llama.tokenizer.vocabulary import Vocabulary
from edgespec.machine.cores import default_threads
from edgespec.profiles.stream_rate import StreamRate

_ROWS = 64
_AMONG = 4
STEP_ROWS = 4  # nodes read in a typical draft step: 2.7 to 5 were observed

# The first half is for choosing a drafter, the second for measuring the chosen one.
PROMPTS = (
    "Explain how bread rises.",
    "Write a Python function that checks whether a word is a palindrome.",
    "Tell a short story about a lighthouse keeper.",
    "List three uses of vinegar in the house.",
    "What is the difference between weather and climate?",
    "Translate into Spanish: The library opens at nine.",
    "Describe a walk through an old town at night.",
    "A train travels 120 km in 90 minutes. What is its speed?",
    "Write a short letter that declines an invitation.",
    "Explain photosynthesis to a child.",
    "Name five rivers in Europe and a city on each.",
    "Write a haiku about autumn, and explain it.",
    "How do I plant tomatoes?",
    "Write a shell command that counts the lines of all text files.",
    "Why do cats purr?",
    "Compare trains and buses for a daily trip.",
)


@dataclass(frozen=True)
class SampleAnswer:
    """Tokens of a prompt and of the answer that the target gave."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Agreement:
    """Shares of the target's tokens that a drafter ranks highly."""

    top1: float  # as its first choice
    top4: float  # among its first four
    tokens: int  # that were compared


@dataclass(frozen=True)
class PassCost:
    """The cost of a target's passes, with the memory that it had."""

    pass_s: float  # the median
    streamed_bytes: int = 0  # in every pass
    read_rate: float = 0.0  # bytes per second at which they were read; 0 if there were none


@dataclass(frozen=True)
class SampleAnswers:
    """Texts that the target generated, and the cost of that."""

    samples: tuple[SampleAnswer, ...]
    cost: PassCost


def write_sample_answers(
    engine: Engine, prompts: Sequence[str], n_tokens: int, on_progress: Progress | None = None
) -> SampleAnswers:
    """Generate the target's greedy answers to prompts, with at most `n_tokens` tokens each."""
    samples: list[SampleAnswer] = []
    passes: list[float] = []
    config = GenerationConfig(max_tokens=n_tokens)
    arriving = StreamRate(engine.target.model.weights)
    for number, prompt in enumerate(prompts):
        tokens = engine.encoder.encode(prompt)
        said = 0
        for chunk in engine.stream(tokens, config):
            said += len(chunk.tokens)
            if on_progress is not None:  # after every pass, so that an estimate is possible early
                share = min(said / n_tokens, 1.0)
                on_progress("Generating text with the target", (number + share) / len(prompts))
            if chunk.generation is not None:
                passes += [record.verify_s for record in chunk.generation.passes]
                samples.append(SampleAnswer(tuple(tokens), tuple(chunk.generation.tokens)))
    # Not bytes over pass seconds: the disk is idle while a pass is bound by its arithmetic.
    cost = PassCost(statistics.median(passes), engine.target.model.weights.streamed_bytes, arriving.rate)
    return SampleAnswers(tuple(samples), cost)


class AgreementMeter:
    """A candidate drafter in memory, which reads texts.

    Args:
        target: whose tokens the texts are in; None if they are the candidate's.
    """

    def __init__(
        self,
        path: Path,
        samples: Sequence[SampleAnswer],
        target: Vocabulary | None = None,
    ) -> None:
        self.model = Model(path)
        try:
            own = self.model.vocabulary
            translates = target is not None and differs(target, own)
            self._translation = Translation(target, own) if target is not None and translates else None
            longest = max(len(self._read_as(sample)[0]) for sample in samples)
            self.context = Context(
                self.model,
                n_cells=longest + _ROWS,
                n_rows=_ROWS,
                n_outputs=_ROWS,
                n_sequences=1,
                n_threads=default_threads(),
            )
        except BaseException:
            self.model.close()
            raise

    def agreement(
        self, samples: Sequence[SampleAnswer], on_sample: Callable[[int], None] | None = None
    ) -> Agreement:
        """The shares of the answers' tokens that the model ranks first, and among the first four."""
        ranks: list[int] = []
        for number, sample in enumerate(samples):
            if on_sample is not None:
                on_sample(number)
            ranks += self._ranks(sample)
        self.context.clear()
        return Agreement(
            sum(rank == 0 for rank in ranks) / len(ranks),
            sum(rank < _AMONG for rank in ranks) / len(ranks),
            len(ranks),
        )

    def step_s(self) -> float:
        """Median seconds of a draft step that reads `STEP_ROWS` tokens.

        Kernels that are equally fast for one token may differ greatly for four.
        """
        times = []
        for _ in range(24):
            self.context.clear()
            start = time.perf_counter()
            self.context.decode(TokenBatch.run([1] * STEP_ROWS, 0, n_sequences=1, logits="all"))
            self.context.logits()
            times.append(time.perf_counter() - start)
        self.context.clear()
        return statistics.median(times[4:])

    def _ranks(self, sample: SampleAnswer) -> list[int]:
        """The rank of each of the answer's tokens, 0 for a first choice.

        Of a token that the model reads as several, it is the worst of theirs.
        """
        tokens, counts = self._read_as(sample)
        first = len(tokens) - sum(counts) - 1  # the row whose logits predict the first token of the answer
        wanted = np.array(tokens[first + 1 :])
        tokens.pop()
        ranks: list[int] = []
        self.context.clear()
        for start, end in _pieces(first, len(tokens)):
            asked = start >= first
            self.context.decode(
                TokenBatch.run(tokens[start:end], start, n_sequences=1, logits="all" if asked else "none")
            )
            if asked:
                logits = self.context.logits()
                said = wanted[start - first : end - first]
                scores = logits[np.arange(len(said)), said]
                ranks += np.count_nonzero(logits > scores[:, None], axis=1).tolist()
        ends = itertools.accumulate(counts)
        return [max(ranks[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    def _read_as(self, sample: SampleAnswer) -> tuple[list[int], list[int]]:
        """The tokens that the model reads of a text, and how many of them belong to each of the answer's."""
        if self._translation is None:
            return [*sample.prompt, *sample.answer], [1] * len(sample.answer)
        parts = [self._translation.parts(token) for token in sample.answer]
        tokens = [*self._translation.read(sample.prompt), *itertools.chain.from_iterable(parts)]
        return tokens, [len(part) for part in parts]

    def close(self) -> None:
        self.context.close()
        self.model.close()

    def __enter__(self) -> AgreementMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pieces(first: int, end: int) -> list[tuple[int, int]]:
    """Ranges of at most _ROWS that do not cross `first`."""
    bounds = [*range(0, first, _ROWS), *range(first, end, _ROWS), end]
    return list(itertools.pairwise(bounds))


def measure(target: str | os.PathLike[str], drafter: Path, on_progress: Progress | None = None) -> Agreement:
    """The agreement of a pair, on half a dozen prompts."""
    from edgespec.loading.load import load

    with load(target, draft="lookup", context=1024, on_progress=on_progress) as engine:
        written = write_sample_answers(engine, PROMPTS[len(PROMPTS) // 2 :], 64, on_progress)
        path = engine.target.model.path

    def report(number: int) -> None:
        if on_progress is not None:
            on_progress("Reading it with the drafter", number / len(written.samples))

    with (
        Model(path, vocabulary_only=True) as large,
        AgreementMeter(drafter, written.samples, large.vocabulary) as meter,
    ):
        return meter.agreement(written.samples, report)


_DEEPEST = 16


@dataclass(frozen=True)
class CostModel:
    """The speed of a target with a drafter."""

    pass_s: float  # of the target, over a tree
    # Bytes per second at which a streamed target is read; 0 if it is in memory. What the drafter takes of the
    # memory must be read from disk in every pass.
    read_rate: float = 0.0
    read_s: float | None = None  # of a pass, during which the disk reads; None if it reads all the time

    @classmethod
    def of(cls, cost: PassCost, pass_s: float | None = None) -> CostModel:
        """The model of a target whose passes were measured.

        Args:
            pass_s: seconds of a pass to count with instead.
        """
        pass_s = pass_s or cost.pass_s
        if not cost.streamed_bytes or not cost.read_rate:
            return cls(pass_s)
        return cls(pass_s, cost.read_rate, min(read_seconds(cost.streamed_bytes, cost.read_rate), pass_s))

    def tokens_per_second(self, agreement: Agreement, step_s: float, n_bytes: int) -> float:
        """Expected speed with trees of the best depth.

        A level of the tree holds the target's choice if the drafter's first choice is right, and about half
        of the time if only one of its first four is.
        """
        level = (agreement.top1 + agreement.top4) / 2
        pass_s = self.pass_s
        if self.read_rate:
            read_s = pass_s if self.read_s is None else self.read_s
            pass_s = pass_seconds(read_s + read_seconds(n_bytes, self.read_rate), pass_s)
        expected, reached, best = 1.0, 1.0, 0.0
        for depth in range(1, _DEEPEST + 1):
            reached *= level
            expected += reached
            draft_s = even_draft_seconds(step_s, 0.0, steps=depth, rows=depth)
            best = max(best, expected / round_seconds(draft_s, pass_s))
        return best
