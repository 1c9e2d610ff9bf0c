"""From prompts to tokens: plain text, questions and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from edgespec.errors import TemplateError
from edgespec.models.llama.tokenizer.vocabulary import Vocabulary
from edgespec.models.text.template import ChatTemplate, Segment, render_segments

# Prompts are tokenized up to this multiple of the context, so that errors can state their length.
_COUNTED = 4

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Encoded:
    """A rendered conversation and its tokens."""

    text: str
    tokens: tuple[int, ...]


class Encoder:
    """Turns prompts into the target's tokens.

    Only text of the chat template may become control tokens; the user's text never does, whatever
    it spells.

    Args:
        context: tokens that the target's context holds. Far longer prompts are refused before they are fully
            rendered or tokenized, so that they take neither time nor memory; None has no limit.
    """

    def __init__(
        self, vocabulary: Vocabulary, template: ChatTemplate | None, context: int | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._context = context
        self._most = None if context is None else _COUNTED * context

    @property
    def has_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._template is not None

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The tokens of a prompt, which is text, chat messages, or already tokens.

        Args:
            raw: do not put a text into the chat template.

        Raises:
            TemplateError: messages were given to a model without a template, or the template failed.
            ContextLengthError: the prompt is several times as long as the context, or more.
        """
        if isinstance(prompt, str):
            self._vocabulary.refuse_longer(prompt, self._context)
            if raw or self._template is None:
                return self._vocabulary.tokenize(prompt, control=False, bos=True, most=self._most)
            return list(self.conversation([{"role": "user", "content": prompt}]).tokens)
        if prompt and isinstance(prompt[0], Mapping):
            return list(self.conversation(prompt).tokens)  # type: ignore[arg-type]
        return [int(token) for token in prompt]  # type: ignore[arg-type]

    def conversation(self, messages: Sequence[Message], known: Encoded | None = None) -> Encoded:
        """A conversation, up to where the model answers.

        Args:
            known: an encoding of its beginning. If the text still begins like this, its tokens are kept,
                because tokenizing an answer again may split it differently than the model did.

        Raises:
            TemplateError: the model has no template, or it failed.
            ContextLengthError: the conversation is several times as long as the context, or more.
        """
        if self._template is None:
            raise TemplateError(
                "The model has no chat template, so it cannot hold a conversation.",
                "Have it continue a text instead: edgespec generate --raw -p TEXT.",
            )
        for message in messages:
            for value in message.values():
                self._vocabulary.refuse_longer(value, self._context)
        controls = partial(self._vocabulary.controls_in, most=self._most)
        segments = render_segments(self._template, messages, controls)
        text = "".join(segment.text for segment in segments)
        tokens: list[int] = []
        if known is not None and text.startswith(known.text):
            tokens.extend(known.tokens)
            segments = _without_prefix(segments, len(known.text))
        for segment in segments:
            tokens += self._vocabulary.tokenize(segment.text, control=not segment.literal, most=self._most)
        if self._vocabulary.adds_bos and tokens[:1] != [self._vocabulary.bos]:
            tokens.insert(0, self._vocabulary.bos)
        return Encoded(text, tuple(tokens))

    def begun(self, messages: Sequence[Message], answer: str) -> Encoded:
        """A conversation with the beginning of an answer, which the model goes on with.

        Raises:
            TemplateError, ContextLengthError: as `conversation`.
        """
        encoded = self.conversation(messages)
        self._vocabulary.refuse_longer(answer, self._context)
        tokens = self._vocabulary.tokenize(answer, control=False, most=self._most)
        return Encoded(encoded.text + answer, (*encoded.tokens, *tokens))

    def answered(self, encoded: Encoded, text: str, tokens: Sequence[int]) -> Encoded | None:
        """The encoding with an answer behind it; None if the tokens do not spell the text."""
        spelled = b"".join(self._vocabulary.piece(token) for token in tokens)
        if spelled != text.encode("utf-8", "replace"):
            return None
        return Encoded(encoded.text + text, (*encoded.tokens, *tokens))

    def close(self) -> None:
        """End the template's process."""
        if self._template is not None:
            self._template.close()


def _without_prefix(segments: list[Segment], length: int) -> list[Segment]:
    rest = []
    for segment in segments:
        cut = min(length, len(segment.text))
        length -= cut
        if cut < len(segment.text):
            rest.append(Segment(segment.text[cut:], segment.literal))
    return rest
