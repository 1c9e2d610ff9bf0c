"""Every value of valid requests, replaced by values of other kinds: each request is read, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.api.completion_request import TranslatedRequest, read_request, translated
from edgespec.api.embeddings import OpenAIEmbeddings
from edgespec.api.images import RequestImages
from edgespec.api.limits import Limits
from edgespec.api.refusals import Refusal
from edgespec.api.response_store import ResponseStore
from edgespec.api.responses import as_chat as of_response
from edgespec.api.warnings import Warnings
from edgespec.errors import EdgeSpecError
from edgespec.generation.config import GenerationConfig
from edgespec.serving.anthropic.translation import as_chat as of_message
from edgespec.serving.ollama.embeddings import OllamaEmbed, OllamaEmbeddings
from edgespec.serving.ollama.translation import chat_as_chat, generate_as_chat
from tests.tiers import examples

_VALUES: tuple[Any, ...] = (
    *([], {}, [[]], [{}], {"x": []}, {"type": []}, [None], ["a", 1], None, True, False),
    *("", "x", "0" * 50, 1, -1, 1.5, 1e308, float("inf"), float("nan"), 10**60),
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "format": "date"},
        "t": {"type": "string", "pattern": "a", "minLength": 1, "maxLength": 3},
        "e": {"enum": ["x"]},
        "n": {"type": "integer", "minimum": 1, "multipleOf": 2},
        "l": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    "required": ["a"],
}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}
_GRAMMAR = {"type": "grammar", "grammar": {"definition": "x", "syntax": "lark"}}
_IMAGE = "data:image/png;base64,AAAA"
_CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "x-a-b: c\nHi"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "t"},
                {"type": "image_url", "image_url": {"url": _IMAGE}},
                {"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"},
            ],
        },
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "t"}, {"type": "thinking", "thinking": "th"}],
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                {"id": "d", "custom": {"name": "g", "input": "i"}},
            ],
            "audio": {"id": "x"},
            "refusal": "r",
        },
        {"role": "tool", "tool_call_id": "c", "name": "f", "content": "r"},
    ],
    "tools": [_TOOL, {"type": "custom", "custom": {"name": "g", "description": "d", "format": _GRAMMAR}}],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    },
    "parallel_tool_calls": True,
    "temperature": 0.5,
    "top_k": 3,
    "seed": 1,
    "stop": ["a"],
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1},
    "max_tokens": 5,
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": True, "thinking_budget": 5},
    "continue_final_message": False,
}
_FORMED = {
    "messages": [{"role": "user", "content": "t"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "functions": [{"name": "f", "parameters": _SCHEMA}],
    "function_call": {"name": "f"},
}
_TEXT = {
    "prompt": ["a", "b"],
    "suffix": "",
    "echo": True,
    "logprobs": 3,
    "best_of": 1,
    "json_schema": _SCHEMA,
}
_RESPONSE = {
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "t"},
                {"type": "input_image", "image_url": _IMAGE},
            ],
        },
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}], "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "i"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
        {"type": "web_search_call", "id": "w", "action": {"q": 1}},
        {"type": "custom_tool_call", "call_id": "e", "name": "g", "input": "i"},
        {"type": "local_shell_call", "call_id": "z", "output": "q"},
    ],
    "instructions": [{"role": "user", "content": "i"}],
    "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}],
    "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}, "verbosity": "low"},
    "reasoning": {"effort": "low"},
    "include": ["x"],
    "max_output_tokens": 5,
    "previous_response_id": "r",
}
_MESSAGE = {
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "t"},
                {"type": "image", "source": {"type": "base64", "data": "AAAA", "media_type": "image/png"}},
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "r"}],
                    "is_error": True,
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": "x"},
    ],
    "tools": [{"name": "f", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}, "effort": "low"},
    "stop_sequences": ["a"],
}
_OLLAMA = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "t", "images": ["AAAA"]},
        {
            "role": "assistant",
            "content": "",
            "thinking": "x",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_name": "f", "content": "r"},
    ],
    "tools": [_TOOL],
    "options": {"temperature": 1, "num_predict": 3, "repeat_last_n": 2, "stop": ["a"]},
    "format": _SCHEMA,
    "think": True,
    "keep_alive": "5m",
    "stream": False,
}
_GENERATE = {
    "prompt": "p",
    "system": "s",
    "images": ["AAAA"],
    "format": "json",
    "options": {},
    "raw": False,
    "suffix": "",
}
_EMBEDDINGS = {"model": "m", "input": ["a", "b"], "dimensions": 3, "encoding_format": "float", "user": "x"}


class _Store(ResponseStore):
    def conversation(self, identifier: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "e"}]


def _read(asked: TranslatedRequest | None) -> None:
    if asked is not None:  # or the model is only to be loaded
        images = RequestImages(Limits(), asked.warnings, lambda: False)
        read_request(asked, GenerationConfig(), model="m", aliases=("claude-*",), images=images)


_REQUESTS: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "chat": (_CHAT, lambda body: _read(translated(body, chat=True))),
    "a form": (_FORMED, lambda body: _read(translated(body, chat=True))),
    "text": (_TEXT, lambda body: _read(translated(body, chat=False))),
    "response": (_RESPONSE, lambda body: _read(of_response(body, Warnings(), _Store()))),
    "message": (_MESSAGE, lambda body: _read(of_message(body, Warnings()))),
    "ollama": (_OLLAMA, lambda body: _read(chat_as_chat(body, Warnings()))),
    "generate": (_GENERATE, lambda body: _read(generate_as_chat(body, Warnings()))),
    "embeddings": (_EMBEDDINGS, lambda body: OpenAIEmbeddings().read(body, ("m",), 8)),
    "embed": (
        {"model": "m", "input": ["a"], "truncate": True, "options": {}},
        lambda body: OllamaEmbed().read(body, ("m",), 8),
    ),
    "prompt": ({"model": "m", "prompt": "a"}, lambda body: OllamaEmbeddings().read(body, ("m",), 8)),
}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values within one."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from _paths(item, (*path, key))


def _with(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a body with another value at a place."""
    if not path:
        return value
    changed = copy.deepcopy(body)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


@pytest.mark.parametrize("kind", _REQUESTS)
@settings(max_examples=examples(1000))
@given(data=st.data())
def test_a_value_of_another_kind_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    body, read = _REQUESTS[kind]
    path = data.draw(st.sampled_from(list(_paths(body))))
    value = data.draw(st.sampled_from(_VALUES))
    with suppress(EdgeSpecError, Refusal):
        read(_with(body, path, value))


@pytest.mark.parametrize("kind", _REQUESTS)
def test_the_requests_are_valid(kind: str) -> None:
    body, read = _REQUESTS[kind]
    read(copy.deepcopy(body))
