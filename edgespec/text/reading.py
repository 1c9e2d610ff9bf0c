"""Chooses what takes a model's answers apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from edgespec.generation.tools import Tool
from edgespec.text.answer_format import AnswerFormat
from edgespec.text.answer_parts import AnswerParts, PartsReader, call_id
from edgespec.text.calls.fenced import FenceReader
from edgespec.text.channels import ChannelParts


def reader_of(
    form: AnswerFormat,
    *,
    opened: bool = False,
    budgeted: bool = False,
    tools: Sequence[Tool] = (),
    fences: FenceReader | None = None,
    prompt: Sequence[int] = (),
) -> PartsReader:
    """Return the reader of one answer.

    Args:
        opened: the prompt has opened a thought.
        budgeted: the length of thoughts is limited.
        tools: those that may be called.
        fences: decides which code fences are calls; None if none is.
        prompt: its tokens, from which the ids of calls are made.
    """
    identify = partial(call_id, tuple(prompt))
    if form.thought is not None and form.thought.again and (form.in_channels or not tools):
        return ChannelParts(opened=opened, calls_tools=bool(tools), call_id=identify)
    syntax = form.calls if tools else None
    return AnswerParts(
        form.thought,
        opened=opened,
        budgeted=budgeted,
        text_closes=form.text_tags.text_closes if form.text_tags is not None else "",
        syntax=syntax,
        tools=tools,
        fences=fences,
        call_id=identify,
    )
