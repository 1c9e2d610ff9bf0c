"""Headers that name the recipient of a message, where an answer is a row of messages to several recipients.

Functionary 3.2 writes `>>>all`, or `>>>` and the name of a tool, before each; Muse `to=user`, `to=self` for a
thought, or `to=` and the name of a tool. The prompt ends with what each header begins with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgespec.text.calls.layout import common_length
from edgespec.text.calls.probes import ANSWER, MARK, NAMES, THOUGHT, segments

_RECIPIENT = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class Headers:
    """The headers of a model's messages.

    Attributes:
        again: what each begins with, and the prompt ends with.
        before, behind: the text around the recipient.
        text, thought: the recipients of texts and of thoughts; the latter is empty if there are none.
        joint: the mark between a message and the header of another one; empty if there is none.
        ends: the marks that end a message.
    """

    again: str
    before: str
    behind: str
    text: str
    thought: str = ""
    joint: str = ""
    ends: tuple[str, ...] = ()

    def first(self, recipient: str) -> str:
        """The header to a recipient behind the prompt."""
        return f"{self.before}{recipient}{self.behind}"

    def of(self, recipient: str) -> str:
        """The header to a recipient."""
        return self.again + self.first(recipient)

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts in headers and before further ones that may be control tokens."""
        texts = (self.again, self.before, self.behind, self.joint)
        return tuple(dict.fromkeys(mark for text in texts for mark in MARK.findall(text)))


@dataclass(frozen=True)
class ShownAnswers:
    """The texts that a template puts behind a question; None where it puts nothing.

    Attributes:
        prompt: where the model answers.
        text: a text.
        thought: a thought and a text.
        call, calls: one call, and two.
        text_and_call: a text and a call.
    """

    prompt: str | None
    text: str | None
    thought: str | None = None
    call: str | None = None
    calls: str | None = None
    text_and_call: str | None = None


def headers_of(shown: ShownAnswers) -> Headers | None:
    """The headers that answers to several recipients have; None if they have none."""
    if not (shown.prompt and shown.text and shown.call and shown.calls):
        return None
    begun = [_behind(text, shown.prompt) for text in (shown.text, shown.call, shown.calls)]
    text, call, calls = begun
    if text is None or call is None or calls is None:
        return None
    header, before = text.partition(ANSWER)[0], call.partition(NAMES[0])[0]
    recipient = _RECIPIENT.match(header.removeprefix(before))
    if not header.startswith(before) or recipient is None:
        return None
    behind = header.removeprefix(before)[recipient.end() :]
    first, second = before + NAMES[0] + behind, before + NAMES[1] + behind
    if not behind or not call.startswith(first) or not calls.startswith(first):
        return None
    # Behind the first call, a message alone ends in one way, and one that another follows in another.
    alone, followed = segments(call[len(first) :]), segments(calls[len(first) :].partition(second)[0])
    message = common_length(alone, followed)
    joint, asked = followed[message:], segments(shown.prompt)
    size = common_length(joint[::-1], asked[::-1])
    again = "".join(joint[len(joint) - size :])
    if second not in calls or not again:
        return None
    end = "".join(joint[: len(joint) - size])
    ends = tuple(dict.fromkeys(filter(None, (end, "".join(alone[message:]).strip()))))
    return Headers(again, before, behind, recipient[0], _thought(shown, before, behind), end, ends)


def _thought(shown: ShownAnswers, before: str, behind: str) -> str:
    """The recipient of thoughts; empty if they have none."""
    text = _behind(shown.thought, shown.prompt or "")
    if text is None or THOUGHT not in text:
        return ""
    header = text.partition(THOUGHT)[0]
    recipient = header.removeprefix(before).removesuffix(behind)
    return recipient if header == before + recipient + behind and _RECIPIENT.fullmatch(recipient) else ""


def _behind(text: str | None, prompt: str) -> str | None:
    return text[len(prompt) :] if text is not None and text.startswith(prompt) else None


@dataclass(frozen=True)
class TextTags:
    """The tags around a thought, and around the text that follows it."""

    thought_opens: str
    thought_closes: str
    text_opens: str
    text_closes: str


def text_tags_of(shown: ShownAnswers) -> TextTags | None:
    """The tags that a template shows around texts and thoughts; None if there are none."""
    if not (shown.thought and shown.text_and_call and THOUGHT in shown.thought):
        return None
    before, _, rest = shown.thought.partition(THOUGHT)
    between, answered, behind = rest.partition(ANSWER)
    _, called, behind_with_call = shown.text_and_call.partition(ANSWER)
    if not (answered and called):
        return None
    ends = segments(behind)
    closes = ends[: common_length(ends, segments(behind_with_call))]
    joint = segments(between)
    thought_closes, text_opens = joint[: len(closes)], joint[len(closes) :]
    words = [pair for pair in zip(thought_closes, closes, strict=False) if pair[0] != pair[1]]
    if len(words) != 1 or not text_opens or len(thought_closes) != len(closes):
        return None
    thought, text = words[0]
    thought_opens = "".join(thought if segment == text else segment for segment in text_opens)
    if text not in text_opens or not before.endswith(thought_opens):
        return None
    return TextTags(thought_opens, "".join(thought_closes), "".join(text_opens), "".join(closes))
