"""Tags around thoughts and texts, as Kimi K3 writes them: found by comparing rendered answers."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.text.calls.layout import common_length
from edgespec.text.calls.probes import ANSWER, THOUGHT, segments


@dataclass(frozen=True)
class TextTags:
    """The tags around a thought, and around the text that follows it."""

    thought_opens: str
    thought_closes: str
    text_opens: str
    text_closes: str


def text_tags_of(thoughtful: str, calling: str) -> TextTags | None:
    """The tags that a template shows around texts and thoughts; None if there are none.

    Args:
        thoughtful, calling: what it puts behind a question for a thought with a text, and a text with a call.
    """
    before, _, rest = thoughtful.partition(THOUGHT)
    between, answered, behind = rest.partition(ANSWER)
    _, called, behind_with_call = calling.partition(ANSWER)
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
