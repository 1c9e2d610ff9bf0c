"""How often a drafter would say what its target says, measured on text that the target wrote itself.

The target writes greedily, so every token of an answer is its first choice; the drafter reads the same text
in a few large batches, and its ranks of those tokens are counted. That is cheap, and it is what speculation
lives on: a chain is accepted as far as first choices agree, a tree where one of the first few does.
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

from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.machine.cores import default_threads
from edgespec.models.llama.runtime.batch import Batch
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model
from edgespec.profiles.stream_rate import StreamRate
from edgespec.progress import Progress

_ROWS = 64
_AMONG = 4
STEP_ROWS = 4  # that a step of growing a tree reads: seen from 2.7 to 5

# Our own, varied in kind. The first half is for choosing a drafter, the rest for judging the chosen one.
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
class Text:
    """Tokens of a prompt and of the answer that the target gave."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Agreement:
    """Shares of the target's tokens that a drafter would have had.

    Attributes:
        top1: as its first choice.
        top4: among its first four.
        tokens: how many were compared.
    """

    top1: float
    top4: float
    tokens: int


@dataclass(frozen=True)
class PassCost:
    """What passes of a target cost, in the memory that it had.

    Attributes:
        pass_s: seconds a pass took, the median.
        streamed_bytes: read from disk in every pass.
        read_rate: bytes a second at which they arrived; 0 if none did.
    """

    pass_s: float
    streamed_bytes: int = 0
    read_rate: float = 0.0


@dataclass(frozen=True)
class Written:
    """What the target wrote, and what that cost."""

    texts: tuple[Text, ...]
    cost: PassCost


def write_texts(
    engine: Engine, prompts: Sequence[str], n_tokens: int, on_progress: Progress | None = None
) -> Written:
    """Let the target answer prompts greedily, `n_tokens` tokens at most each."""
    texts, passes = [], []
    config = GenerationConfig(max_tokens=n_tokens)
    arriving = StreamRate(engine.target.model.weights)
    for number, prompt in enumerate(prompts):
        if on_progress is not None:
            on_progress("The target writes text to compare with", number / len(prompts))
        tokens = engine.encoder.encode(prompt)
        answer = engine.generate(tokens, config)
        passes += [record.verify_s for record in answer.passes]
        texts.append(Text(tuple(tokens), tuple(answer.tokens)))
    # Not the bytes over the seconds of a pass: the disk stands still while a pass is bound by its arithmetic.
    cost = PassCost(statistics.median(passes), engine.target.model.weights.streamed_bytes, arriving.rate)
    return Written(tuple(texts), cost)


class Reader:
    """A drafter candidate in memory, to be asked about texts.

    Args:
        repack: in the CPU's own layout, as it would draft; without it the weights are the file's bytes,
            mapped, so that what is written to the file is what is computed with.
    """

    def __init__(self, path: Path, texts: Sequence[Text], *, repack: bool) -> None:
        longest = max(len(text.prompt) + len(text.answer) for text in texts)
        self.model = Model(
            path, gpu_layers=0, memory_map=not repack, may_be_rewritten=not repack, repack=repack
        )
        try:
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

    def agreement(self, texts: Sequence[Text], on_text: Callable[[int], None] | None = None) -> Agreement:
        """How often the model ranks the answers' tokens first, or among the first four."""
        ranks: list[int] = []
        for number, text in enumerate(texts):
            if on_text is not None:
                on_text(number)
            ranks += self._ranks(text)
        self.context.clear()
        return Agreement(
            sum(rank == 0 for rank in ranks) / len(ranks),
            sum(rank < _AMONG for rank in ranks) / len(ranks),
            len(ranks),
        )

    def step_s(self) -> float:
        """Seconds for a draft step that reads `STEP_ROWS` tokens, the median of a few.

        Kernels that are alike for one token may be far apart for four.
        """
        times = []
        for _ in range(24):
            self.context.clear()
            start = time.perf_counter()
            self.context.decode(Batch.run([1] * STEP_ROWS, 0, n_sequences=1, logits="all"))
            self.context.logits()
            times.append(time.perf_counter() - start)
        self.context.clear()
        return statistics.median(times[4:])

    def _ranks(self, text: Text) -> list[int]:
        """The rank of each of the answer's tokens, 0 for a first choice."""
        tokens = [*text.prompt, *text.answer][:-1]
        wanted = np.array(text.answer)
        first = len(text.prompt) - 1  # the row whose logits are about the first token of the answer
        ranks: list[int] = []
        self.context.clear()
        for start, end in _pieces(first, len(tokens)):
            asked = start >= first
            self.context.decode(
                Batch.run(tokens[start:end], start, n_sequences=1, logits="all" if asked else "none")
            )
            if asked:
                logits = self.context.logits()
                said = wanted[start - first : end - first]
                scores = logits[np.arange(len(said)), said]
                ranks += np.count_nonzero(logits > scores[:, None], axis=1).tolist()
        return ranks

    def close(self) -> None:
        """Free it."""
        self.context.close()
        self.model.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pieces(first: int, end: int) -> list[tuple[int, int]]:
    """Ranges of at most _ROWS: those before `first` apart from the others."""
    bounds = [*range(0, first, _ROWS), *range(first, end, _ROWS), end]
    return list(itertools.pairwise(bounds))


def measure(target: str | os.PathLike[str], drafter: Path, on_progress: Progress | None = None) -> Agreement:
    """The agreement of a pair, on half a dozen prompts.

    Raises:
        EdgeSpecError: one of them cannot be loaded.
    """
    from edgespec.loading.load import load

    with load(target, draft="lookup", context=1024, on_progress=on_progress) as engine:
        written = write_texts(engine, PROMPTS[len(PROMPTS) // 2 :], 64, on_progress)
    if on_progress is not None:
        on_progress("The drafter reads it", 0.0)
    with Reader(drafter, written.texts, repack=True) as reader:
        return reader.agreement(written.texts)
