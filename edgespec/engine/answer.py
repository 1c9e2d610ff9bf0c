"""From accepted tokens to an answer: text that is safe to show, and where the answer ends."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.generation.result import FinishReason, Generation
from edgespec.models.llama.tokenizer.vocabulary import Vocabulary
from edgespec.models.text.stream import TextStream


class AnswerBuilder:
    """Takes tokens as they are accepted, and stops at the end token or stop string.

    Attributes:
        generation: the answer so far.
        ended: an end token or stop string was met; later tokens are not part of the answer.
        count: tokens that the target gave for the answer: its own, and the end token if it has one.
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
        """Add tokens, up to where the answer ends; returns the text that is now certain."""
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
        """Close the answer; returns the text that was held back until now."""
        rest = self._stream.flush()
        self.generation.text = "".join(self._text) + rest
        # A stop string may become certain only now that nothing can follow it.
        self.ended = self.ended or self._stream.stopped
        self.generation.finish_reason = "stop" if self.ended else reason
        return rest

    @property
    def tokens_to_cache(self) -> int:
        """Tokens of the answer that plain decoding has read when it ends: all before the last one drawn."""
        return len(self.generation.tokens) - (0 if self._end_token else 1)
