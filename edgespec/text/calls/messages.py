"""Conversations with tool calls, in the form that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgespec.generation.tools import Tool
from edgespec.text.calls.gemma import with_results_in_calls
from edgespec.text.calls.syntax import CallSyntax, described

Message = Mapping[str, Any]


def with_calls_for(
    syntax: CallSyntax, messages: Sequence[Message], tools: Sequence[Tool]
) -> Sequence[Message]:
    """The messages with calls, their results and the tools as a template of this syntax takes them."""
    if syntax.results_in_calls:
        messages = with_results_in_calls(messages)
    if syntax.in_channels:
        messages = [_with_thought_by_its_name(message) for message in messages]
    if syntax.single:
        messages = list(_one_call_each(messages))
    if not syntax.shows_calls:
        messages = [_with_written_calls(syntax, message) for message in messages]
    else:
        messages = [_with_calls_in_form(syntax, message) for message in messages]
    if not syntax.shows_results:
        messages = _with_results_as_questions(messages)
    return messages if syntax.shows_tools or not tools else _taught(messages, tools, syntax)


def _with_thought_by_its_name(message: Message) -> Message:
    """The message as gpt-oss' template takes it: a thought before a call is `thinking`."""
    thought = message.get("reasoning_content")
    if not thought or message.get("content") or not message.get("tool_calls"):
        return message
    return {**message, "thinking": thought}


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """A message for each call, with its result behind it."""
    moved: set[int] = set()
    for at, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if at not in moved:
                yield message
            continue
        results: dict[str, int] = {}  # clients may use the same ids in each turn
        for place in range(at + 1, len(messages)):
            if messages[place].get("role") != "tool":
                break
            if identifier := messages[place].get("tool_call_id"):
                results.setdefault(identifier, place)
        for n, call in enumerate(calls):
            yield {**message, "tool_calls": [call]} | ({"content": ""} if n else {})
            if call.get("id") in results:
                place = results.pop(call["id"])
                moved.add(place)
                yield messages[place]


def _with_written_calls(syntax: CallSyntax, message: Message) -> Message:
    """The message with its calls as text, as the model writes them."""
    calls = message.get("tool_calls")
    if not calls or syntax.spelling is None:
        return message
    written = syntax.spelling.written([(c["function"]["name"], c["function"]["arguments"]) for c in calls])
    text = "\n".join(filter(None, [message.get("content"), written]))
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}


def _with_calls_in_form(syntax: CallSyntax, message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    if syntax.arguments_as_text:
        calls = [
            {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
            for c in calls
        ]
    return {**message, "content": message.get("content") or syntax.empty_content, "tool_calls": calls}


def _with_results_as_questions(messages: Sequence[Message]) -> list[Message]:
    """The messages with what tools return as messages of the user."""
    plain: list[Message] = []
    in_results = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if in_results:  # templates want questions and answers to alternate
                text = f"{plain.pop()['content']}\n{text}"
            message = {"role": "user", "content": text}
        plain.append(message)
        in_results = is_result
    return plain


def _taught(messages: Sequence[Message], tools: Sequence[Tool], syntax: CallSyntax) -> list[Message]:
    """The messages with a description of the tools in the system message."""
    text = described(tools, syntax)
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
