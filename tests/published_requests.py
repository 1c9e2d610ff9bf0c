"""Requests of the three APIs as their published packages declare them, as strategies of Hypothesis."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import pydantic
import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from hypothesis import strategies as st
from ollama._types import ChatRequest, GenerateRequest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

Strategy = st.SearchStrategy[Any]

REQUESTS: Mapping[str, Any] = {
    "/v1/chat/completions": chat_create_params.CompletionCreateParamsNonStreaming,
    "/v1/completions": completion_create_params.CompletionCreateParamsNonStreaming,
    "/v1/responses": response_create_params.ResponseCreateParamsNonStreaming,
    "/v1/messages": message_create_params.MessageCreateParamsNonStreaming,
    "/v1/messages/count_tokens": message_count_tokens_params.MessageCountTokensParams,
    "/v1/messages?beta=true": beta_message_create_params.MessageCreateParamsNonStreaming,
    "/api/chat": ChatRequest,
    "/api/generate": GenerateRequest,
}
"""The type of the body by the path."""

_DEPTH = 4
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "a", "é\u2028"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "type"]), inner, max_size=2)
    ),
    max_leaves=3,
)
_SCHEMAS = st.sampled_from(
    [
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "null"}]}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "boolean"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": r"\bx"}}},
        {"type": "object"},
    ]
)
# What a type cannot say: numbers have ranges, and answers are to be short.
_BY_NAME: dict[str, Strategy] = {
    "n": st.integers(1, 2),
    "best_of": st.integers(1, 2),
    "max_tokens": st.integers(1, 2),
    "max_completion_tokens": st.integers(1, 2),
    "max_output_tokens": st.integers(1, 2),
    "num_predict": st.integers(1, 2),
    "budget_tokens": st.integers(0, 2000),
    "logprobs": st.integers(0, 5) | st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "top_k": st.integers(-1, 50),
    "repeat_penalty": st.floats(1, 2),
    "repeat_last_n": st.integers(-1, 64),
    "temperature": st.sampled_from([0, 0.5, 1]),
    "top_p": st.sampled_from([0.5, 1]),
    "min_p": st.sampled_from([0, 0.1]),
    "seed": st.integers(-1, 9),
    "name": st.sampled_from(["f", "get_weather", "f" * 100]),
    "stop": st.sampled_from(["x", ["x", "y"]]),
    "stop_sequences": st.sampled_from([["x"], []]),
    "logit_bias": st.sampled_from([{}, {"5": -100}, {"99999999": 1}]),
    "arguments": st.sampled_from(["{}", "null", "", '{"a": "b', '{"a": 1}']),
    "parameters": _SCHEMAS,
    "input_schema": _SCHEMAS,
    "schema": _SCHEMAS,
    "format": st.none() | st.just("json") | _SCHEMAS,
    "prompt": st.sampled_from(["Hi", "Once upon a time"]),
    "content": st.sampled_from(["Hi", ""]),
    "previous_response_id": st.none(),
    "background": st.booleans(),
    "think": st.booleans() | st.sampled_from(["low", "high"]),
}
_IN_OTHER_TYPES = ("format", "content", "logprobs")  # names that have more to them in some types


def request(path: str) -> Strategy:
    """The bodies that the published type of a path permits; there is always something to answer."""
    found = _of(REQUESTS[path], "", 0)
    if path != "/v1/responses":
        return found
    items = _of(get_type_hints(REQUESTS[path])["input"], "input", 0)
    return st.tuples(found, items).map(lambda drawn: drawn[0] | {"input": drawn[1]})


def fields(path: str) -> set[str]:
    """The names of the fields of a request."""
    kind = REQUESTS[path]
    return set(kind.model_fields if _is_model(kind) else get_type_hints(kind))


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, pydantic.BaseModel)


def _of(hint: Any, name: str, depth: int) -> Strategy:
    """The values of a type; those of a field if it has a name."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (typing.Annotated, typing_extensions.Required, typing_extensions.NotRequired):
        return _of(parts[0], name, depth)
    is_plain = not _has_types(hint)
    if name in _BY_NAME and (is_plain or name not in _IN_OTHER_TYPES):
        return _BY_NAME[name]
    if origin in (Union, types.UnionType):
        return st.one_of([_of(part, name, depth) for part in parts])
    if origin is Literal:
        return st.sampled_from(parts)
    if isinstance(hint, TypeVar) or hint in (Any, object):
        return _JSON
    if hint is type(None):
        return st.none()
    if _is_model(hint):
        about = {key: field.annotation for key, field in hint.model_fields.items()}
        needed = {key for key, field in hint.model_fields.items() if field.is_required()}
        return _object(about, needed, depth)
    if typing.is_typeddict(hint) or typing_extensions.is_typeddict(hint):
        marked = get_type_hints(hint, include_extras=True)
        needed = {key for key, kind in marked.items() if get_origin(kind) is typing.Required}
        return _object(get_type_hints(hint), needed, depth)
    if origin in (list, collections.abc.Iterable, collections.abc.Sequence):
        if depth > _DEPTH:
            return st.just([])
        return st.lists(_of(parts[0], "", depth + 1), min_size=1 if depth < 2 else 0, max_size=2)
    if origin in (dict, collections.abc.Mapping):
        return st.dictionaries(st.just("a"), _of(parts[1], "", depth + 1), max_size=1)
    simple: dict[Any, Strategy] = {
        str: st.sampled_from(["a", "Hi", "é\u2028"]),
        int: st.integers(0, 9),
        float: st.sampled_from([0, 0.5, 1]),
        bool: st.booleans(),
    }
    return simple.get(hint, st.just("a"))


def _has_types(hint: Any) -> bool:
    """True if a type has one with fields in it."""
    return _is_model(hint) or typing.is_typeddict(hint) or any(map(_has_types, get_args(hint)))


def _object(about: Mapping[str, Any], needed: set[str], depth: int) -> Strategy:
    """Objects with the fields that they must have, and a few of the others."""
    fixed = {key: st.deferred(lambda k=key: _of(about[k], k, depth + 1)) for key in sorted(needed)}
    others = sorted(set(about) - needed) if depth <= _DEPTH else []

    def with_some(names: list[str]) -> Strategy:
        return st.fixed_dictionaries(fixed | {key: _of(about[key], key, depth + 1) for key in names})

    if not others:
        return st.fixed_dictionaries(fixed)
    return st.lists(st.sampled_from(others), unique=True, max_size=4).flatmap(with_some)
