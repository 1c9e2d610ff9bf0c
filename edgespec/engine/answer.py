"""Building an answer from accepted tokens: which text is safe to show, and where the answer ends."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.generation.result import FinishReason, Generation
from edgespec.models.llama.tokenizer.vocabulary import Vocabulary
from edgespec.models.text.stream import TextStream


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
