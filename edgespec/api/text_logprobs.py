"""Log-probabilities in the form of `/v1/completions`, and the prompt in front of the text (`echo`)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.generation.result import TokenLogprob


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt that is to stand in front of the text."""

    text: str  # as it was sent, or as its tokens spell it
    first: bytes  # the spelling of its first token, which has no log-probability
    first_is_bos: bool  # whether that is the begin-of-text token, which is no part of the text


class TextLogprobs:
    """Builds the lists of one text's tokens, piece by piece.

    `text_offset` counts characters; a token that ends within a character begins where that character does.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of_prompt(self, prompt: EchoedPrompt, found: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The lists of a prompt's tokens; nothing is known of the first one."""
        start = self._advance(b"" if prompt.first_is_bos else prompt.first)
        known = self.of_answer([item for item in found if item is not None])
        first = {
            "tokens": [_text(prompt.first)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [start],
        }
        return joined(first, known)

    def of_answer(self, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The lists of tokens that follow."""
        return {
            "tokens": [_text(item.spelling) for item in found],
            "token_logprobs": [item.logprob for item in found],
            "top_logprobs": [_likeliest(item) for item in found],
            "text_offset": [self._advance(item.spelling) for item in found],
        }

    def _advance(self, spelling: bytes) -> int:
        """The position at which a token begins, in characters."""
        start = self._offset
        self._offset += len(self._decoder.decode(spelling))
        return start


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The lists of consecutive pieces."""
    return {name: one[name] + other[name] for name in one}


def _likeliest(item: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the token itself; of tokens that look alike, the likeliest counts."""
    found: dict[str, float] = {}
    for other in (*item.top, item):
        found.setdefault(_text(other.spelling), other.logprob)
    return found


def _text(spelling: bytes) -> str:
    return spelling.decode("utf-8", "replace")
