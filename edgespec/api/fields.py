"""The fields of requests for chats and completions, by what becomes of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from edgespec.api.settings import SETTINGS
from edgespec.api.values import shown
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError

CHAT_FIELDS = (
    *SETTINGS,
    *("model", "messages", "prompt", "n", "best_of", "stream", "stream_options", "suffix", "echo"),
    *("response_format", "grammar", "json_schema"),
    *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
    *("speculation", "continue_final_message", "add_generation_prompt"),
)
"""Fields that mean something in a request for a chat or a completion."""

# These would change the answer, or what it consists of.
_NOT_SUPPORTED = {
    "audio": "Answers are text.",
    "modalities": "Answers are text.",
    "web_search_options": "Nothing is searched here.",
    "moderation": "Answers are not moderated.",
    "verbosity": "Ask for the length in the prompt.",
}
# Clients send these, and they change nothing about an answer here.
_WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prompt_cache_options", "prediction", "cache_prompt", "id_slot"),
    *("timings_per_token", "return_progress"),
)
_PLAIN = {"modalities": ["text"], "verbosity": "medium"}  # values that ask for what is done anyway
_CLOSE = 0.85
_MAX_NAMED = 8


def warn_of_fields(body: Mapping[str, Any], warnings: Warnings, *, chat: bool, strict: bool) -> None:
    """Warn of the fields that have no effect.

    Args:
        strict: refuse a field whose name is nearly that of another one.

    Raises:
        UsageError: there is such a field.
    """
    for name, why in _NOT_SUPPORTED.items():
        if body.get(name) not in (None, False, 0, "", [], {}, _PLAIN.get(name)):
            warnings.ignored(name, why)
    known = {*CHAT_FIELDS, *_NOT_SUPPORTED, *_WITHOUT_EFFECT}
    unknown = [name for name, value in body.items() if name not in known and value is not None]
    for name in unknown:
        close = difflib.get_close_matches(name[:64], CHAT_FIELDS, n=1, cutoff=_CLOSE)
        hint = f"Did you mean {close[0]!r}?" if close else ""
        if close and strict:
            raise UsageError(f"There is no field {shown(name)}.", hint)
    for name in unknown[:_MAX_NAMED]:
        close = difflib.get_close_matches(name[:64], CHAT_FIELDS, n=1, cutoff=_CLOSE)
        warnings.add(f"Ignored unknown field {shown(name)}.{f' Did you mean {close[0]!r}?' if close else ''}")
    other = "prompt" if chat else "messages"
    if body.get(other) is not None:
        warnings.ignored(other, f"This path takes {'messages' if chat else 'a prompt'}.")
