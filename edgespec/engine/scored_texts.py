"""Scores of given texts: as tokens, then as requests, then as what became of these."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from edgespec.engine.requests import AnswerCollector, Event, Request, refuse_text
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from edgespec.generation.score import Score
from edgespec.llama.cache.kv_cache import common_prefix
from edgespec.text.encoding import Encoder, Prompt


@dataclass(frozen=True)
class ScoredText:
    """A text to score, and where its score begins."""

    tokens: tuple[int, ...]
    first: int = 0  # position of the first token whose log-probability is wanted


def scored_texts(
    encoder: Encoder, prompts: Iterable[Prompt], continuations: Iterable[str | Sequence[int]] | None = None
) -> list[ScoredText]:
    """Encode texts, or continuations of prompts; raises as `Engine.score`."""
    refuse_text(prompts)
    refuse_text(continuations)
    contexts = list(prompts)
    if continuations is None:
        return [_whole(encoder, prompt) for prompt in contexts]
    added = list(continuations)
    if len(added) != len(contexts):
        raise UsageError(
            f"There are {len(contexts)} prompts and {len(added)} continuations.",
            "Give one continuation for each prompt.",
        )
    return [scored_text(encoder, *pair) for pair in zip(contexts, added, strict=True)]


def scored_text(encoder: Encoder, prompt: Prompt, continuation: str | Sequence[int]) -> ScoredText:
    """Encode the continuation of a prompt.

    Two plain texts are encoded together, as the model would see them in one text.
    """
    if not continuation:
        raise UsageError("A continuation is empty.", "Give the text to score.")
    before = _encoded(encoder, prompt)
    if isinstance(prompt, str) and isinstance(continuation, str):
        tokens = encoder.encode(prompt + continuation, raw=True)
        # A text that is closed by an end token is longer than its beginning in the longer text.
        first = common_prefix(before, tokens)
    else:
        added = encoder.appended(continuation) if isinstance(continuation, str) else continuation
        tokens, first = [*before, *encoder.encode(added)], len(before)
    return ScoredText(tuple(tokens), min(first, len(tokens) - 1))


def _whole(encoder: Encoder, prompt: Prompt) -> ScoredText:
    return ScoredText(tuple(_encoded(encoder, prompt)))


def _encoded(encoder: Encoder, prompt: Prompt) -> list[int]:
    tokens = encoder.encode(prompt, raw=True)
    if min(tokens, default=0) < 0:
        raise UsageError("The tokens of a prompt with images cannot be scored.", "Leave the images out.")
    return tokens


def scores_of(
    texts: Sequence[ScoredText],
    answer: Callable[[Iterable[Request]], Generator[Event, None, None]],
    top: int,
    on_prefill: Callable[[int, int], None] | None,
    on_result: Callable[[int, Score], None],
) -> list[Score]:
    """The scores of texts; see `Engine.score`.

    Args:
        answer: answers requests.
    """
    config, progress = GenerationConfig(max_tokens=0, logprobs=top), _Progress(texts, on_prefill)
    requests = [
        Request(
            text.tokens, config, raw=True, key=index, scored_from=text.first,
            on_prefill=progress.observer(index),
        )
        for index, text in enumerate(texts)
    ]  # fmt: skip
    scores: dict[int, Score] = {}

    def add(index: int, generation: Generation) -> None:
        scores[index] = Score.of(texts[index].tokens, texts[index].first, generation)
        progress.scored(index)
        on_result(index, scores[index])

    answers = AnswerCollector(add)
    with closing(answer(requests)) as events:
        for event in events:
            answers.add(event)
    return [scores.get(index) or Score.none(text.tokens, text.first) for index, text in enumerate(texts)]


class _Progress:
    """Counts the tokens of all texts that were read.

    Args:
        on_progress: called with (tokens read, tokens to read) whenever that changes; None if nobody asks.
    """

    def __init__(self, texts: Sequence[ScoredText], on_progress: Callable[[int, int], None] | None) -> None:
        self._missing = [len(text.tokens) - 1 for text in texts]
        self._total = sum(self._missing)
        self._on_progress = on_progress

    def observer(self, index: int) -> Callable[[int, int], None] | None:
        """A callback that takes the tokens read of one text, and those to be read."""
        if self._on_progress is None:
            return None
        return lambda read, to_read: self._now_missing(index, to_read - read)

    def scored(self, index: int) -> None:
        """A text is done."""
        self._now_missing(index, 0)

    def _now_missing(self, index: int, missing: int) -> None:
        if self._on_progress is not None and self._missing[index] != missing:
            self._missing[index] = missing
            self._on_progress(self._total - sum(self._missing), self._total)
