"""The amount of thinking that a request asks for, by the fields that clients of several servers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.generation.thinking import EFFORTS, MOST_BUDGET, think_text
from edgespec.serving.api.values import integer, wrong
from edgespec.serving.api.warnings import Warnings

_KWARGS = ("enable_thinking", "thinking", "reasoning_effort", "thinking_budget")


def read_think(body: Mapping[str, Any], warnings: Warnings) -> str | None:
    """Read the request for thinking: `think`, the API's `reasoning_effort`, or variables of the template.

    Returns:
        The value for GenerationConfig; None if the request leaves it open.

    Raises:
        UsageError: a field has another form.
    """
    kwargs = body.get("chat_template_kwargs")
    if not isinstance(kwargs, dict | None):
        raise wrong("chat_template_kwargs", kwargs, "an object")
    for name in kwargs or {}:
        if name not in _KWARGS:
            warnings.ignored(f"chat_template_kwargs.{name}", f"It may have {', '.join(_KWARGS)} here.")
    own, effort = body.get("think"), body.get("reasoning_effort")
    if own is not None:
        return think_text(own)
    given = kwargs or {}
    budget = integer(given, "thinking_budget", 0, MOST_BUDGET)
    if budget is not None:
        return str(budget)
    switches = [given[name] for name in ("enable_thinking", "thinking") if given.get(name) is not None]
    if switches and not isinstance(switches[0], bool):
        raise wrong("enable_thinking", switches[0], "true or false")
    if switches and not switches[0]:
        return "off"
    effort = effort if effort is not None else given.get("reasoning_effort")
    if effort is None:
        return "on" if switches else None
    named = {
        "none": "off",
        "minimal": "low",
        "xhigh": "high",
        "max": "high",
        **{word: word for word in EFFORTS},
    }
    if not isinstance(effort, str) or effort not in named:
        raise wrong("reasoning_effort", effort, f"one of {', '.join(named)}")
    return named[effort]
