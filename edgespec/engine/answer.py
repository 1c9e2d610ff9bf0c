"""An answer that is being generated: its text so far, what is safe to show of it, and where it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from edgespec.engine.logprobs import Logprobs, PromptScores
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Chunk, FinishReason, Generation, PassRecord
from edgespec.generation.tools import CallPiece
from edgespec.llama.tokenizer.vocabulary import Vocabulary
from edgespec.processes.limits import peak_rss
from edgespec.speculation.tree import Acceptance, FloatArray, TokenTree
from edgespec.text.answer_parts import AnswerPart, PartsReader
from edgespec.text.answer_plan import AnswerPlan
from edgespec.text.stream import TextStream


class Answer:
    """The answer of one sequence, from its prompt to its end.

    Args:
        prompt_tokens: tokens before it.
        room: most tokens that the context has room for behind the prompt.
        plan: how it is constrained and taken apart; None for free text.

    Attributes:
        config: its settings.
        generation: the answer so far.
        most: tokens that it may have.
        constrained: whether not every token may follow everywhere.
        builder: turns accepted tokens into text, and knows where the answer ends.
        on_accept: called in each pass with the target's logits (nodes, n_vocab), the tree and what was
            accepted of it.
    """

    def __init__(
        self,
        prompt_tokens: int,
        room: int,
        config: GenerationConfig,
        generation: Generation,
        vocabulary: Vocabulary,
        plan: AnswerPlan | None = None,
    ) -> None:
        plan = plan or AnswerPlan()
        self.config = config
        self.generation = generation
        self.most = room if config.max_tokens is None else min(config.max_tokens, room)
        self.constrained = plan.constraint is not None
        self.builder = AnswerBuilder(
            generation, vocabulary, config.stop, plan.parts, plan.shown, frozenset(config.stop_tokens)
        )
        self.on_accept: Callable[[FloatArray, TokenTree, Acceptance], None] | None = None
        self._room = room
        self._spell = partial(vocabulary.piece, control=True)  # no method of this object, which it would keep
        self._prompt_tokens = prompt_tokens
        self._start = time.perf_counter()
        self._logprobs: Logprobs | None = None
        if config.logprobs is not None:
            self._logprobs = self.on_accept = Logprobs(config.logprobs, self._spell)
        self._scores: PromptScores | None = None

    def score_prompt(self, tokens: Sequence[int], first: int) -> PromptScores:
        """Report the log-probabilities of the prompt's tokens from this position on, which are returned."""
        self._scores = PromptScores(tokens, first, self.config.logprobs or 0, self._spell)
        return self._scores

    @property
    def final_length(self) -> int:
        """Tokens of the sequence that plain decoding has read by the end of the answer."""
        return self._prompt_tokens + self.builder.tokens_to_cache

    def prompt_was_read(self, n_tokens: int) -> None:
        """Note that everything before the answer is in the cache, after reading so many tokens of it."""
        if not self.generation.passes:
            self.generation.timings.prefill_s = time.perf_counter() - self._start
            # The last token is read by the first pass, whatever is in the cache.
            self.generation.cached_tokens = max(self._prompt_tokens - 1 - n_tokens, 0)

    def add(self, sequence: Sequence[int], record: PassRecord) -> Chunk:
        """Add what a pass has appended to its sequence; what follows the end of the answer is not counted."""
        answer, timings, builder = self.generation, self.generation.timings, self.builder
        before, known = builder.count, len(answer.tokens)
        delta = builder.feed(sequence[self._prompt_tokens + before :])
        record = record.cut(builder.count - before)
        if answer.passes:
            timings.decode_s += record.seconds
        else:
            timings.prefill_s += record.seconds
        scored = () if answer.passes or self._scores is None else tuple(self._scores.values)
        answer.passes.append(record)
        timings.draft_s += record.draft_s
        timings.verify_s += record.verify_s
        timings.io_wait_s += record.wait_s
        if self._logprobs is not None:
            answer.logprobs += self._logprobs.taken()[: len(answer.tokens) - known]
        return Chunk(
            delta.text,
            tuple(answer.tokens[known:]),
            record,
            reasoning=delta.reasoning,
            calls=delta.calls,
            logprobs=tuple(answer.logprobs[known:]),
            prompt_logprobs=scored,
        )

    def finish(self, reason: FinishReason) -> Chunk:
        """Finish the answer.

        Args:
            reason: why it ends, unless it has ended by itself.
        """
        answer = self.generation
        rest = self.builder.finish(reason)
        if self._scores is not None:
            answer.prompt_logprobs = self._scores.values
        answer.context_full = answer.finish_reason == "length" and len(answer.tokens) == self._room
        answer.memory.peak_rss_bytes = peak_rss()
        return Chunk(
            rest.text,
            generation=answer,
            reasoning=rest.reasoning,
            calls=rest.calls,
            prompt_logprobs=() if answer.passes else tuple(answer.prompt_logprobs),
        )


@dataclass(frozen=True)
class AnswerDelta:
    """The part of an answer that has become certain; see `generation.result.Chunk`."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()


class AnswerBuilder:
    """Takes tokens as they are accepted, and stops at the end token or stop string.

    Args:
        stop: strings that end the answer, if its text has them; its thought and its calls may.
        parts: takes it apart; None if it is nothing but text.
        shown: control tokens whose text counts.
        stop_tokens: tokens that end the answer, besides the vocabulary's.

    Attributes:
        generation: the answer so far.
        ended: whether an end token or stop string was met; later tokens are not part of the answer.
        count: tokens that the target chose for the answer, the end token included if there is one.
    """

    def __init__(
        self,
        generation: Generation,
        vocabulary: Vocabulary,
        stop: Sequence[str],
        parts: PartsReader | None = None,
        shown: frozenset[int] = frozenset(),
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.generation = generation
        self.ended = False
        self.count = 0
        self._vocabulary = vocabulary
        self._parts = parts
        self._shown = shown
        self._stop_tokens = stop_tokens
        self._characters = TextStream()  # whole ones, to be taken apart
        self._stream = TextStream(stop)
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallPiece] = []
        self._end_token = False

    def feed(self, tokens: Sequence[int]) -> AnswerDelta:
        """Add tokens up to the end of the answer; returns what can no longer change."""
        before = self._sizes()
        for token in tokens:
            self.count += 1
            if token in self._stop_tokens or self._vocabulary.is_end(token):
                self.ended = self._end_token = True
                break
            self.generation.tokens.append(token)
            if self._parts is None:
                self._text.append(self._stream.push(self._vocabulary.piece(token)))
            else:
                self.generation.reasoning_tokens += self._parts.thinking
                self._add(self._parts.push(self._characters.push(self._spelled(token))))
            if self._stream.stopped:
                self.ended = True
                break
        return self._delta_since(before)

    def finish(self, reason: FinishReason) -> AnswerDelta:
        """Finish the answer; returns what was held back until now."""
        before = self._sizes()
        if self._parts is not None:
            self._add([*self._parts.push(self._characters.flush()), *self._parts.flush()])
            self.generation.tool_calls = list(self._parts.calls)
        self._text.append(self._stream.flush())
        self.generation.text = "".join(self._text)
        self.generation.reasoning = "".join(self._reasoning)
        # Only now that nothing can follow is it certain that a held-back stop string is one.
        self.ended = self.ended or self._stream.stopped
        if self._stream.stopped:
            self.generation.stop_string = self._stream.stop_string
        ending: FinishReason = "tool_calls" if self.generation.tool_calls else "stop"
        self.generation.finish_reason = ending if self.ended else reason
        return self._delta_since(before)

    def _spelled(self, token: int) -> bytes:
        if token in self._shown:
            return self._vocabulary.piece(token, control=True)
        return self._vocabulary.piece(token)

    def _add(self, parts: Iterable[AnswerPart]) -> None:
        for part in parts:
            if self._stream.stopped:
                return
            self._reasoning.append(part.reasoning)
            self._text.append(self._stream.push(part.text.encode()))
            if part.call is not None:
                self._calls.append(part.call)

    def _sizes(self) -> tuple[int, int, int]:
        return len(self._text), len(self._reasoning), len(self._calls)

    def _delta_since(self, sizes: tuple[int, int, int]) -> AnswerDelta:
        text, reasoning, calls = sizes
        return AnswerDelta(
            "".join(self._text[text:]), "".join(self._reasoning[reasoning:]), tuple(self._calls[calls:])
        )

    @property
    def tokens_to_cache(self) -> int:
        """Tokens of the answer that plain decoding has read by its end: all but the last one chosen."""
        return len(self.generation.tokens) - (0 if self._end_token else 1)
