"""Encoding of prompts as tokens: plain text, questions and conversations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from edgespec.base.option import named
from edgespec.errors import TemplateError, UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from edgespec.images.parts import Image, WithPlaceholders, has_images
from edgespec.llama.tokenizer.vocabulary import Vocabulary
from edgespec.printable import shown
from edgespec.text.template import ChatTemplate, Message, PromptSegment, render_segments

if TYPE_CHECKING:
    from edgespec.images.reader import ImageReader
    from edgespec.text.answer_format import AnswerFormat, ThoughtFormat
    from edgespec.text.replay import WrittenAnswer

# Prompts are tokenized up to this multiple of the context, so that errors can state their length.
_COUNTED = 4
_LATEST = 32  # tokens in which the mark of a thought fits

Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class EncodedConversation:
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

    Attributes:
        images: reads the images of prompts; None if none can be read.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: ChatTemplate | None,
        context: int | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self.images = images
        self._vocabulary = vocabulary
        self._template = template
        self._context = context
        self._most = None if context is None else _COUNTED * context

    @property
    def has_template(self) -> bool:
        """True if conversations can be encoded."""
        return self._template is not None

    @cached_property
    def format(self) -> AnswerFormat | None:
        """The format of the model's answers; None without a chat template."""
        if self._template is None:
            return None
        from edgespec.text.answer_format import AnswerFormat

        source = self._template.tools_source or self._template.source
        return AnswerFormat(source, self._show, self._is_end)

    def begins_in_thought(self, tokens: Sequence[int]) -> bool:
        """True if a prompt ends with the mark that opens a thought, so that its answer begins within one."""
        if self.format is None or self.format.thought is None:
            return False
        return self._end_of(tokens).rstrip().endswith(self.format.thought.opens.encode())

    def _end_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self._vocabulary.piece(token, control=True) for token in tokens[-_LATEST:])

    def encode(
        self, prompt: Prompt, *, raw: bool = False, config: GenerationConfig | None = None
    ) -> list[int]:
        """The tokens of a prompt, which is text, chat messages, or already tokens.

        Args:
            raw: do not put a text into the chat template.
            config: says which tools the template is to show, and whether the model is to think.

        Raises:
            UsageError: a token is not in the vocabulary.
            TemplateError: messages were given to a model without a template, or the template failed.
            ContextLengthError: the prompt is several times as long as the context, or more.
        """
        if isinstance(prompt, str):
            self._vocabulary.refuse_longer(prompt, self._context)
            if raw or self._template is None:
                return self._vocabulary.tokenize(prompt, control=False, bos=True, most=self._most)
            return list(self.conversation([{"role": "user", "content": prompt}], config=config).tokens)
        if prompt and isinstance(prompt[0], Mapping):
            return list(self.conversation(prompt, config=config).tokens)  # type: ignore[arg-type]
        tokens = [int(token) for token in prompt]  # type: ignore[arg-type]
        n_tokens = self._vocabulary.n_tokens
        pictured = self.knows(tokens)
        for token in tokens:
            if token >= n_tokens or (token < 0 and not pictured):
                raise UsageError(
                    f"The prompt has the token {shown(token)}.",
                    f"Tokens of this model are from 0 to {n_tokens - 1}.",
                )
        return tokens

    def knows(self, tokens: Sequence[int]) -> bool:
        """True if all images among these tokens were read."""
        return min(tokens, default=0) >= 0 or (self.images is not None and self.images.knows(tokens))

    def appended(self, text: str) -> list[int]:
        """The tokens of a text that follows others: without a begin-of-text token, and with no control token.

        Raises:
            ContextLengthError: as `encode`.
        """
        return self._vocabulary.tokenize(text, control=False, most=self._most)

    def conversation(
        self,
        messages: Sequence[Message],
        known: EncodedConversation | None = None,
        *,
        config: GenerationConfig | None = None,
        written: Mapping[int, WrittenAnswer] | None = None,
    ) -> EncodedConversation:
        """A conversation, up to where the model answers.

        Args:
            written: answers that the model wrote, by the index of their messages; their tokens are kept.
            config: as `encode`.
            known: an encoding of its beginning. If text and images still begin like this, its tokens are
                kept, because tokenizing an answer again may split it differently than the model did.

        Raises:
            TemplateError: the model has no template, or it failed.
            ContextLengthError: the conversation is several times as long as the context, or more.
            UsageError: an image cannot be read.
        """
        if self._template is None and has_images(messages):
            raise TemplateError(
                "The model has no chat template, so it cannot be shown images.", "Use another model."
            )
        if self._template is None:
            raise TemplateError(
                "The model has no chat template, so it cannot hold a conversation.",
                f"Use {named('raw', True)}, which continues the prompt as plain text.",
            )
        config = config or GenerationConfig()
        pictured = WithPlaceholders(messages) if has_images(messages) else None
        if pictured is not None:
            messages = pictured.messages
        for text in _texts([*messages]):
            self._vocabulary.refuse_longer(text, self._context)
        segments = self._replayed(messages, written, config) if written else None
        if segments is None:
            whole = [
                written[index].restored(message) if written and index in written else message
                for index, message in enumerate(messages)
            ]
            segments = self._rendered(whole, config)
        segments += self._ending("".join(segment.text for segment in segments), config)
        text = "".join(segment.text for segment in segments)
        if pictured is not None:
            pictured.require_all(text, _images_left_out)
            segments = self._with_images(segments, pictured)
            text = "".join(segment.text for segment in segments)
        tokens: list[int] = []
        if known is not None and text.startswith(known.text):
            rest = _without_prefix(segments, len(known.text))
            # Another projector gives other rows for the same images.
            if [*_rows_in(known.tokens), *_rows_of(rest)] == _rows_of(segments):
                tokens.extend(known.tokens)
                segments = rest
        for segment in segments:
            if segment.tokens is not None:
                tokens += segment.tokens
                continue
            tokens += self._vocabulary.tokenize(segment.text, control=not segment.literal, most=self._most)
        if self._vocabulary.adds_bos and tokens[:1] != [self._vocabulary.bos]:
            tokens.insert(0, self._vocabulary.bos)
        return EncodedConversation(text, tuple(tokens))

    def _with_images(
        self, segments: Sequence[PromptSegment], pictured: WithPlaceholders
    ) -> list[PromptSegment]:
        """The segments of a prompt with the tokens of its images in place of the placeholders."""
        if self.images is None:
            raise UsageError("Images cannot be read with this model.")
        found: list[PromptSegment] = []
        for segment in segments:
            if segment.tokens is not None:  # an answer of the model
                found.append(segment)
                continue
            for part in pictured.split(segment.text):
                if isinstance(part, Image):
                    found.append(
                        PromptSegment(
                            _mark(part), literal=True, tokens=self.images.read(part.data, part.name)
                        )
                    )
                else:
                    found.append(replace(segment, text=part))
        return found

    def written(self, prompt: Sequence[int], answer: Generation) -> WrittenAnswer | None:
        """An answer as the model wrote it, to be kept in the conversation; None if that is not possible.

        It is not where thoughts, calls and answers are messages of their own, where the thought was not
        finished, and where a stop string has cut the text.
        """
        from edgespec.text.replay import WrittenAnswer

        form = self.format
        if form is None or answer.stop_string or not answer.tokens:
            return None
        prompt = [token for token in prompt[-_LATEST:] if token >= 0]  # without images
        if form.in_channels or form.text_tags is not None:
            return None
        if answer.tool_calls and form.calls.results_in_calls:
            return None
        if not all(call.is_complete for call in answer.tool_calls):
            return None
        calls = tuple((call.name, call.arguments) for call in answer.tool_calls)
        written = WrittenAnswer(tuple(answer.tokens), answer.text, answer.reasoning, calls)
        if form.thought is None:
            return written
        if form.thought.again:
            return None
        opened = self.begins_in_thought(prompt)
        if not (opened or answer.reasoning):
            lead = self._empty_thought(prompt, form.thought)
            if not self._begins_with(answer.tokens, form.thought.closes):
                return replace(written, lead=lead)
        length = self._thought_length(answer.tokens, form.thought.closes.encode())
        return None if length is None else replace(written, thought=length, opened=opened)

    def _begins_with(self, tokens: Sequence[int], mark: str) -> bool:
        spelled = b"".join(self._vocabulary.piece(token, control=True) for token in tokens[:_LATEST])
        return spelled.lstrip().startswith(mark.encode())

    def _empty_thought(self, prompt: Sequence[int], thought: ThoughtFormat) -> tuple[int, ...]:
        """The tokens of an empty thought at the end of a prompt; none if there is none."""
        spelled = b""
        for n, token in enumerate(reversed(prompt[-_LATEST:]), 1):
            spelled = self._vocabulary.piece(token, control=True) + spelled
            if spelled.startswith(thought.opens.encode()):
                closed = spelled[len(thought.opens.encode()) :].strip() == thought.closes.encode()
                return tuple(prompt[-n:]) if closed else ()
        return ()

    def _thought_length(self, tokens: Sequence[int], closes: bytes) -> int | None:
        """Count the tokens of a thought, its closing mark and the space behind it.

        Returns:
            None if the thought is not closed, and -1 if a token belongs to both the thought and the answer.
        """
        tail = b""
        for n, token in enumerate(tokens, 1):
            tail += self._vocabulary.piece(token, control=True)
            at = tail.find(closes)
            if at >= 0:
                if tail[at + len(closes) :].strip():
                    return -1
                rest = (self._vocabulary.piece(token, control=True).strip() for token in tokens[n:])
                return n + next((place for place, said in enumerate(rest) if said), len(tokens) - n)
            tail = tail[-len(closes) :]
        return None

    def continued(
        self, messages: Sequence[Message], *, config: GenerationConfig, written: Mapping[int, WrittenAnswer]
    ) -> tuple[list[int], WrittenAnswer | None]:
        """The tokens of a conversation to the end of its last message, an answer that the model continues.

        Args:
            config, written: as `conversation`.

        Returns:
            The tokens; and that answer, if its own tokens are among them.

        Raises:
            TemplateError, ContextLengthError: as `conversation`.
        """
        *before, last = messages
        earlier = {index: answer for index, answer in written.items() if index < len(before)}
        own = written.get(len(before))
        if own is not None and not own.calls:
            spelled = b"".join(self._vocabulary.piece(token) for token in own.tokens)
            if spelled.endswith(own.text.encode()):  # and not with half a character
                prompt = self.conversation(before, config=config, written=earlier).tokens
                if self._fits(own, prompt):
                    return [*prompt, *own.tokens], own
        return list(self.begun(before, last["content"], earlier, config).tokens), None

    def _fits(self, answer: WrittenAnswer, prompt: Sequence[int]) -> bool:
        """True if a prompt ends as the answer's own did: with an open thought, an empty one, or none."""
        thought = self.format.thought if self.format is not None else None
        if thought is None:
            return True
        text = [token for token in prompt[-_LATEST:] if token >= 0]  # without images
        empty = self._empty_thought(text, thought)
        return (self.begins_in_thought(text), bool(empty)) == (answer.opened, bool(answer.lead))

    def begun(
        self,
        messages: Sequence[Message],
        answer: str,
        written: Mapping[int, WrittenAnswer] | None = None,
        config: GenerationConfig | None = None,
    ) -> EncodedConversation:
        """A conversation with the beginning of an answer, without its thought, which the model continues.

        Args:
            written, config: as `conversation`.

        Raises:
            TemplateError, ContextLengthError: as `conversation`.
        """
        config = (config or GenerationConfig()).with_(think="off", tool_choice="none")
        encoded = self.conversation(messages, config=config, written=written)
        self._vocabulary.refuse_longer(answer, self._context)
        tokens = self._vocabulary.tokenize(answer, control=False, most=self._most)
        return EncodedConversation(encoded.text + answer, (*encoded.tokens, *tokens))

    def _rendered(self, messages: Sequence[Message], config: GenerationConfig) -> list[PromptSegment]:
        """The messages as the chat template shows them."""
        assert self._template is not None
        told, variables = self._for_template(messages, config)
        controls = partial(self._vocabulary.controls_in, most=self._most)
        return render_segments(self._template, told, controls, variables=variables)

    def _replayed(
        self, messages: Sequence[Message], written: Mapping[int, WrittenAnswer], config: GenerationConfig
    ) -> list[PromptSegment] | None:
        """The messages as the chat template shows them, with the model's answers as they were written.

        Returns:
            None if the template does not show such answers in one piece.
        """
        assert self.format is not None, "there is a template"
        from edgespec.text.replay import Replay

        replay = Replay(written, self.format.thought)
        try:
            rendered = self._rendered(replay.marked(messages), config)
        except TemplateError:
            return None
        text = "".join(segment.text for segment in rendered)
        results = (message["content"].strip() for message in messages if message["role"] == "tool")
        # Without the calls, a template may not show what they returned.
        return replay.replayed(rendered) if all(result in text for result in results) else None

    def _for_template(
        self, messages: Sequence[Message], config: GenerationConfig
    ) -> tuple[Sequence[Message], dict[str, Any]]:
        """The messages and variables for the template, which may know neither tools nor thoughts."""
        assert self.format is not None, "there is a template"
        variables: dict[str, Any] = {}
        tools = config.tools  # also where none may be called: the beginning of the prompt stays the same
        if tools or any(m.get("tool_calls") or m.get("role") == "tool" for m in messages):
            from edgespec.text.calls.messages import with_calls_for

            messages = with_calls_for(self.format.calls, messages, tools)
            if tools and self.format.calls.shows_tools:
                variables |= self.format.tool_variables([tool.definition for tool in tools])
        thought, think = self.format.thought, config.thinking
        if thought is not None:
            if thought.switch and think.enabled is not None:
                variables[thought.switch] = thought.switched(think.enabled)
            if thought.knows_effort and think.effort:
                variables["reasoning_effort"] = thought.high if think.effort == "high" else think.effort
            if thought.knows_budget and think.budget is not None:
                variables["thinking_budget"] = think.budget
        return messages, variables

    def _ending(self, text: str, config: GenerationConfig) -> list[PromptSegment]:
        """A closed thought behind a rendered conversation, if the model cannot be told not to think."""
        assert self.format is not None, "there is a template"
        thought = self.format.thought
        if thought is None or thought.switch or config.thinking.enabled is not False:
            return []
        opened = text.rstrip().endswith(thought.opens)
        calls = config.offers_tools and self.format.in_channels
        closed = thought.cut(calls=calls).lstrip() if opened else thought.skipped(calls=calls)
        return [PromptSegment(closed, literal=False)]

    def _show(
        self, messages: Sequence[Message], variables: Mapping[str, Any], begin_answer: bool
    ) -> str | None:
        """A conversation as the template shows it; None if it does not."""
        assert self._template is not None, "only a template has a format"
        try:
            return self._template.render(messages, begin_answer, variables=variables)
        except TemplateError:
            return None

    def _is_end(self, mark: str) -> bool:
        """True if a mark is a token that ends answers."""
        tokens = self._vocabulary.tokenize(mark, control=True)
        return len(tokens) == 1 and self._vocabulary.is_end(tokens[0])

    def answered(
        self, encoded: EncodedConversation, text: str, tokens: Sequence[int]
    ) -> EncodedConversation | None:
        """The encoding with an answer behind it; None if the tokens do not spell the text."""
        spelled = b"".join(self._vocabulary.piece(token) for token in tokens)
        if spelled != text.encode("utf-8", "replace"):
            return None
        return EncodedConversation(encoded.text + text, (*encoded.tokens, *tokens))

    def close(self) -> None:
        """End the template's process."""
        if self._template is not None:
            self._template.close()


def _mark(image: Image) -> str:
    """The text in place of an image in a conversation, by which texts are compared."""
    return f"\N{OBJECT REPLACEMENT CHARACTER}{hashlib.blake2b(image.data, digest_size=16).hexdigest()}"


def _images_left_out() -> TemplateError:
    return TemplateError("The model's chat template does not show the images of this conversation.")


def _texts(value: Any) -> Iterator[str]:
    """The texts in a message, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _rows_in(tokens: Iterable[int]) -> list[int]:
    """The ids of images' rows among tokens."""
    return [token for token in tokens if token < 0]


def _rows_of(segments: Iterable[PromptSegment]) -> list[int]:
    return _rows_in(token for segment in segments for token in segment.tokens or ())


def _without_prefix(segments: list[PromptSegment], length: int) -> list[PromptSegment]:
    rest = []
    for segment in segments:
        cut = min(length, len(segment.text))
        length -= cut
        if cut < len(segment.text):
            rest.append(PromptSegment(segment.text[cut:], segment.literal) if cut else segment)
    return rest
