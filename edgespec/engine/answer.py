"""An answer that is being generated: its text so far, what is safe to show of it, and where it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edgespec.engine.loop import DecodingText, Sizer
from edgespec.engine.target import CachedText
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Chunk, FinishReason, Generation, PassRecord
from edgespec.machine.probe import peak_rss
from edgespec.models.llama.tokenizer.vocabulary import Vocabulary
from edgespec.models.text.stream import TextStream
from edgespec.speculation.methods import Method


class AnswerInProgress:
    """One answer from its prompt to its end.

    Args:
        room: most tokens that the context has room for behind the prompt.

    Attributes:
        config: its settings.
        generation: the answer so far.
        decoding: the text, prompt and answer, as the loop extends it.
        builder: turns accepted tokens into text, and knows where the answer ends.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        room: int,
        config: GenerationConfig,
        generation: Generation,
        vocabulary: Vocabulary,
        method: Method,
        sizer: Sizer,
    ) -> None:
        self.config = config
        self.generation = generation
        self.builder = AnswerBuilder(generation, vocabulary, config.stop)
        most = room if config.max_tokens is None else min(config.max_tokens, room)
        self.decoding = DecodingText(list(prompt), method, len(prompt) + most, sizer)
        self._room = room
        self._prompt_tokens = len(prompt)
        self._start = time.perf_counter()

    @property
    def cached(self) -> CachedText | None:
        """Where the target caches the text; None for the target's own text."""
        return self.decoding.cached

    @property
    def missing(self) -> int:
        """Tokens that must be read before the text can be extended; the last one is read by the next pass."""
        held = len(self.decoding.cached.tokens) if self.decoding.cached is not None else 0
        return len(self.decoding.tokens) - 1 - held

    @property
    def is_full(self) -> bool:
        """Whether it has as many tokens as it may have."""
        return len(self.decoding.tokens) >= self.decoding.end

    @property
    def length_to_settle(self) -> int:
        """Tokens of the text that plain decoding has read by the end of the answer."""
        return self._prompt_tokens + self.builder.tokens_to_cache

    def prompt_was_read(self) -> None:
        """Note that everything before the answer is in the cache."""
        if not self.generation.passes:
            self.generation.timings.prefill_s = time.perf_counter() - self._start

    def add(self, record: PassRecord) -> Chunk:
        """Add what a pass has appended to the text; whatever follows the end of the answer is not counted."""
        answer, timings, builder = self.generation, self.generation.timings, self.builder
        before, known = builder.count, len(answer.tokens)
        said = builder.take(self.decoding.tokens[self._prompt_tokens + before :])
        record = record.cut(builder.count - before)
        answer.passes.append(record)
        timings.draft_s += record.draft_s
        timings.verify_s += record.verify_s
        timings.io_wait_s += record.wait_s
        timings.decode_s += record.seconds
        return Chunk(said, tuple(answer.tokens[known:]), record)

    def finish(self, reason: FinishReason, settle: Callable[[int], None]) -> Chunk:
        """Finish the answer.

        Args:
            reason: why it ends, unless the answer has ended by itself.
            settle: makes the cache end where plain decoding would have stopped.
        """
        answer = self.generation
        rest = self.builder.finish(reason)
        settle(self.length_to_settle)
        answer.context_full = answer.finish_reason == "length" and len(answer.tokens) == self._room
        answer.memory.peak_rss_bytes = peak_rss()
        return Chunk(rest, generation=answer)


class AnswerBuilder:
    """Takes tokens as they are accepted, and stops at the end token or stop string.

    Attributes:
        generation: the answer so far.
        ended: whether an end token or stop string was met; later tokens are not part of the answer.
        count: tokens that the target chose for the answer, the end token included if there is one.
    """

    def __init__(self, generation: Generation, vocabulary: Vocabulary, stop: Sequence[str]) -> None:
        self.generation = generation
        self.ended = False
        self.count = 0
        self._vocabulary = vocabulary
        self._stream = TextStream(stop)
        self._text: list[str] = []
        self._end_token = False

    def take(self, tokens: Sequence[int]) -> str:
        """Add tokens up to the end of the answer; returns the text that can no longer change."""
        before = len(self._text)
        for token in tokens:
            self.count += 1
            if self._vocabulary.is_end(token):
                self.ended = self._end_token = True
                break
            self.generation.tokens.append(token)
            self._text.append(self._stream.push(self._vocabulary.piece(token)))
            if self._stream.stopped:
                self.ended = True
                break
        return "".join(self._text[before:])

    def finish(self, reason: FinishReason) -> str:
        """Finish the answer; returns the text that was held back until now."""
        rest = self._stream.flush()
        self.generation.text = "".join(self._text) + rest
        # Only now that nothing can follow is it certain that a held-back stop string is one.
        self.ended = self.ended or self._stream.stopped
        self.generation.finish_reason = "stop" if self.ended else reason
        return rest

    @property
    def tokens_to_cache(self) -> int:
        """Tokens of the answer that plain decoding has read by its end: all but the last one chosen."""
        return len(self.generation.tokens) - (0 if self._end_token else 1)
