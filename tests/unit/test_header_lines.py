"""Lines in front of system prompts that are not for the model."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.api.contents import parts_of, without_header_lines
from edgespec.api.fields import converted
from edgespec.api.messages import ChatMessages, read_messages
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError
from edgespec.serving.anthropic.translation import as_chat

BILLING = "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch=1f3a;"
RULES = "You are an agent.\nx-kept-here: yes"
ASKED = {"role": "user", "content": "Hi"}


def read(messages: list[dict[str, Any]], warnings: Warnings) -> list[dict[str, Any]]:
    return read_messages(converted(messages, ChatMessages), warnings)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"{BILLING}\n{RULES}", ["x-anthropic-billing-header:"]),
        (f"{BILLING}\r\n\r\n{RULES}", ["x-anthropic-billing-header:"]),
        (f"{BILLING}\nX-Session-Id:7\n\n{RULES}", ["x-anthropic-billing-header:", "x-session-id:"]),
    ],
)
def test_header_lines_are_left_out_and_named(text: str, names: list[str]) -> None:
    warnings = Warnings()
    assert without_header_lines([text], warnings) == [RULES]
    said = [f"Left out the line {name!r} of the system prompt, which is not for the model." for name in names]
    assert list(warnings.sentences) == said


@pytest.mark.parametrize(
    "text",
    [
        RULES,
        "X-ray: describe what the picture shows.",
        "x-axis: time\ny-axis: price",
        "The first line.\nx-session-id: 7",
        " x-session-id: 7",
        "x-session-id is in the header.",
        "content-type-of-answers: text",
        "Today is Friday.",
        "",
    ],
)
def test_other_lines_stay(text: str) -> None:
    warnings = Warnings()
    assert without_header_lines([text], warnings) == [text]
    parts = parts_of([{"type": "text", "text": text}])
    assert without_header_lines(parts, warnings) == parts
    assert warnings.sentences == ()


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(
    "content",
    [
        f"{BILLING}\n{RULES}",
        [{"type": "text", "text": BILLING}, {"type": "text", "text": RULES}],
        [{"type": "text", "text": f"{BILLING}\n{RULES}"}],
    ],
)
def test_chats_lose_them(role: str, content: Any) -> None:
    warnings = Warnings()
    messages = read([{"role": role, "content": content}, ASKED], warnings)
    assert messages == [{"role": "system", "content": RULES}, ASKED]
    assert len(warnings.sentences) == 1
    alone = read([{"role": role, "content": BILLING}, ASKED], Warnings())
    assert alone == [ASKED]


def test_what_others_say_stays() -> None:
    """A user may ask about a header, and a result of a tool may begin with some."""
    said = [{"role": "user", "content": BILLING}, {"role": "system", "content": BILLING}]
    assert read(said, Warnings()) == said


def test_messages_lose_them_in_the_first_block_only() -> None:
    warnings = Warnings()
    blocks = [{"type": "text", "text": text} for text in (BILLING, RULES, BILLING)]
    body = {"max_tokens": 1, "system": blocks, "messages": [ASKED]}
    messages = as_chat(body, warnings).messages
    assert messages
    assert messages[0] == {"role": "system", "content": f"{RULES}\n\n{BILLING}"}
    assert len(warnings.sentences) == 1
    assert as_chat({**body, "system": BILLING}, Warnings()).messages == [ASKED]
    with pytest.raises(UsageError, match="system must be"):
        as_chat({**body, "system": 7}, Warnings())
