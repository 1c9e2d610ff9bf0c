"""Answers of the model within a conversation, as the tokens that it wrote.

A chat template shows an earlier answer by its parts, in a form of its own, and its tokens may be split in
another way than the model wrote them. So marks stand for such answers while the template is rendered, and the
answers' own tokens take the place of the marks. The template still decides what is shown: where it leaves out
the thought of an earlier answer, so does the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.base.placeholders import Placeholders
from edgespec.generation.result import Generation
from edgespec.text.answer_format import ThoughtFormat
from edgespec.text.template import Message, PromptSegment


@dataclass(frozen=True)
class WrittenAnswer:
    """An answer as the model wrote it.

    Attributes:
        tokens: all of it, without the end token.
        text, reasoning: its text and its thought, as clients get them.
        calls: the name and the arguments, as JSON, of each tool that it calls.
        thought: how many of the tokens are the thought and its marks.
        opened: the prompt had opened the thought.
        lead: the tokens of an empty thought at the end of the prompt.
    """

    tokens: tuple[int, ...]
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    thought: int = 0
    opened: bool = False
    lead: tuple[int, ...] = ()

    def extended(self, more: Generation) -> WrittenAnswer | None:
        """The answer with its continuation; None if a stop string has cut the text of that."""
        if more.stop_string:
            return None
        return replace(self, tokens=(*self.tokens, *more.tokens), text=self.text + more.text)

    def restored(self, message: Message) -> Message:
        """A message that a client sent back, with the text, thought and arguments that it had."""
        whole: dict[str, Any] = {**message, "content": self.text}
        if self.reasoning:
            whole["reasoning_content"] = self.reasoning
        if self.calls:
            whole["tool_calls"] = [
                {**call, "function": {"name": name, "arguments": json.loads(arguments or "{}")}}
                for call, (name, arguments) in zip(message["tool_calls"], self.calls, strict=True)
            ]
        return whole


class Replay:
    """Puts marks in the place of answers, and tokens in the place of marks.

    Args:
        written: the answers, by the index of their messages.
        thought: how the model's thoughts are marked; None if there are none.
    """

    def __init__(self, written: Mapping[int, WrittenAnswer], thought: ThoughtFormat | None) -> None:
        self._written = written
        self._thought = thought
        self._marks = Placeholders()

    def marked(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with marks in the place of answers."""
        marked: list[Message] = list(messages)
        for index, answer in self._written.items():
            message = {"role": "assistant", "content": self._marks.of(2 * index)}
            if answer.reasoning:
                message["reasoning_content"] = self._marks.of(2 * index + 1)
            marked[index] = message
        return marked

    def replayed(self, rendered: Sequence[PromptSegment]) -> list[PromptSegment] | None:
        """The rendered messages with tokens in the place of marks; None if the marks are not as expected."""
        segments: list[PromptSegment] = []
        thoughts: dict[int, int] = {}  # where the thought of an answer is shown
        left = sorted(self._written, reverse=True)
        for part in self._parts(rendered):
            if isinstance(part, PromptSegment):
                segments.append(part)
                continue
            index, is_thought = divmod(part, 2)
            if is_thought:
                thoughts[index] = len(segments)
                continue
            if not left or left.pop() != index:
                return None
            tokens = self._placed(self._written[index], segments, thoughts.get(index))
            if tokens is None:
                return None
            segments.append(PromptSegment("", literal=False, tokens=tokens))
        return None if left else segments

    def _parts(self, rendered: Sequence[PromptSegment]) -> Iterator[PromptSegment | int]:
        for segment in rendered:
            if segment.literal:
                yield segment
                continue
            for part in self._marks.split(segment.text):
                yield part if isinstance(part, int) else PromptSegment(part, literal=False)

    def _placed(
        self, answer: WrittenAnswer, segments: list[PromptSegment], thought_at: int | None
    ) -> tuple[int, ...] | None:
        """The tokens of an answer behind what was rendered before it, from which its marks are removed.

        Args:
            thought_at: which of the segments is the first one behind the thought; None if it is not shown.
        """
        if self._thought is None:
            return answer.tokens
        if thought_at is not None:
            del segments[thought_at:]
            if not answer.opened and not _cut_end(segments, self._thought.opens):
                return None
            return answer.tokens
        if answer.thought < 0:
            return None
        closed = bool(segments) and segments[-1].text.rstrip().endswith(self._thought.closes)
        return (() if closed else answer.lead) + answer.tokens[answer.thought :]


def _cut_end(segments: list[PromptSegment], mark: str) -> bool:
    """Remove a mark from the end of a text; False if it is not there."""
    text = segments[-1].text.rstrip() if segments else ""
    if not text.endswith(mark):
        return False
    segments[-1] = PromptSegment(text[: -len(mark)], literal=False)
    return True
