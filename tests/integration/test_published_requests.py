"""Requests that the published types of the three APIs permit: each is answered, or refused with a reason."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.serving.response_sender import WARNINGS
from tests.published_requests import REQUESTS, fields, request
from tests.serving import Running, load, serving
from tests.templated import now_speaking
from tests.tiers import examples, slow_except
from tests.unit import templates
from tests.waiting import PATIENCE_S

_QUICK = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat")

# What the types permit and no server could answer.
_REASONS = "|".join(
    [
        "must be a non-empty",
        "prompt must be",
        "is not one of the tools",
        "there are no tools",
        "has no valid name",
        "must be an object whose type is",
        "Several answer formats",
        "max_tokens is missing",
        "have a function with a name",
        "has no function",
        "is not kept",
        "There is no token",
        "The JSON schema",
        r'Missing "(messages|input)\[',
        "format(.type)? must be",
        "role must be one of",
        "has no tool_use_id",
        "context holds|several times the context|prompt is too long",
        "tool_choice must be",
        "must be a JSON schema",
        "The prompt is empty",
        "The input has no messages",
        "cannot be enforced",
        "must be a time",
        "is not kept|are not stored|is referred to twice",
        "cannot fill in the middle",
        "whose form is given|have no other form",
    ]
)


@pytest.fixture(scope="module")
def server(short_path: Path) -> Iterator[Running]:
    with serving(lambda: now_speaking(load(short_path, 4096), templates.QWEN), max_tokens=2) as running:
        yield running


@pytest.mark.parametrize("path", slow_except(_QUICK, REQUESTS))
def test_what_the_published_types_permit_is_answered(server: Running, path: str) -> None:
    @settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def answered(data: st.DataObject) -> None:
        body = data.draw(request(path))
        shortened = {"think": False, "stream": False} if path.startswith("/api") else {"think": False}
        status, answer = server.post(path.partition("?")[0], {**body, **shortened})
        assert status in (200, 400, 404), answer
        if status != 200:
            assert re.search(_REASONS, str(answer)), answer

    answered()


def warned(server: Running, path: str, body: object) -> tuple[int, str, str]:
    """Status and text of an answer, and its warnings: not every answer has a place for them in its text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read().decode()
    connection.close()
    return response.status, answer, response.headers.get(WARNINGS, "")


@pytest.mark.parametrize("path", list(REQUESTS))
def test_every_published_field_is_known_here(server: Running, path: str) -> None:
    """A field that a new version of a package brings is answered with a warning; it has to be looked at."""
    needed: dict[str, Any] = {"max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    if path == "/v1/completions" or path == "/api/generate":
        needed = {"prompt": "Hi", "max_tokens": 2}
    if path == "/v1/responses":
        needed = {"input": "Hi", "max_output_tokens": 2}
    if path.startswith("/api"):
        needed["stream"] = False

    def is_unknown(field: str) -> bool:
        status, answer, warnings = warned(server, path.partition("?")[0], {**needed, field: {"odd": [1]}})
        assert status in (200, 400), answer
        return f"unknown field '{field}'" in f"{warnings}{answer}"

    assert is_unknown("unheard_of")
    assert [field for field in sorted(fields(path) - set(needed)) if is_unknown(field)] == []
