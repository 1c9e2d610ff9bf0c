"""Limits of requests: every one is a 4xx with a reason, and no field can make the server fail."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import select
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.api.limits import Limits
from edgespec.api.refusals import Refusal
from edgespec.serving.request_bodies import parse
from tests.serving import CHAT, RESPONSE, TEXT, Running, load, serving
from tests.tiers import examples
from tests.waiting import PATIENCE_S, wait_until

MIB = 1 << 20
HI = [{"role": "user", "content": "Hi"}]
N_VOCAB = 8192  # of `short_path`
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def server(short_path: Path) -> Iterator[Running]:
    """Limits as they are, but for the size of bodies; short answers."""
    with serving(partial(load, short_path), Limits(body=MIB), max_tokens=2) as running:
        yield running


@pytest.fixture(scope="module")
def impatient(short_path: Path) -> Iterator[Running]:
    """A server that waits for nobody."""
    limits = Limits(body=MIB, body_s=2.0, connections=8)
    with serving(partial(load, short_path), limits, max_tokens=2) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHAT, b'{"messages":[' + b"{}," * 300_000 + b"{}]}", "more than 200,256 values"),
        (CHAT, b'{"messages":"' + b'","' * 300_000 + b'"}', "more than 200,256 values"),
        (CHAT, b"[" * 100_000, "nested more than 128 levels deep"),
        (CHAT, b'{"a\\"[":' + b'{"\\\\":' * 200 + b"1" + b"}" * 201, "nested more than 128 levels deep"),
        (CHAT, b'{"messages":' + b"]" * 300_000, "not valid JSON: it closes more brackets than it opens"),
        (CHAT, b'{"messages": [\xff]}', "not UTF-8"),
        (CHAT, b'{"messages": [],\n}', "not valid JSON: "),
        (CHAT, b'{"messages": [],\n}', "(line 2, column 1)"),
        (CHAT, b'{"max_tokens": ' + b"9" * 5000 + b"}", "too many digits"),
        (CHAT, {"messages": HI * 5000}, "There are 5,000 messages"),
        (CHAT, {"messages": HI, "stop": ["a"] * 65}, "stop has too many strings"),
        (CHAT, {"messages": HI, "stop": "a" * 1025}, "stop has too many strings"),
        (CHAT, {"messages": HI, "grammar": 'root ::= "a"' + " " * 131_072}, "The grammar has 131,084 char"),
        (CHAT, {"messages": HI, "json_schema": {"enum": ["a" * 131_072]}}, "The JSON schema has"),
        (
            CHAT,
            {"messages": HI, "grammar": 'root ::= "a"', "json_schema": {}},
            "Several answer formats",
        ),
        (CHAT, {"messages": HI, "grammar": ["a"]}, "grammar must be a string, not a list"),
        (
            CHAT,
            {"messages": [{"role": [], "content": "Hi"}]},
            "messages[0].role must be one of assistant, ",
        ),
        (CHAT, {"messages": [{"role": "Bot"}]}, "tool, user, not 'Bot'."),
        (CHAT, {"messages": ["Hi"]}, "messages[0] must be an object, not 'Hi'."),
        (
            CHAT,
            {"messages": HI, "logit_bias": "a"},
            "logit_bias must be an object of token ids and numbers from -100 to 100, not 'a'.",
        ),
        (CHAT, {"messages": HI, "logit_bias": {"a": 1}}, "token ids and numbers from -100 to 100."),
        (CHAT, {"messages": HI, "logit_bias": {"5": 101}}, "token ids and numbers from -100 to 100."),
        (CHAT, {"messages": HI, "logit_bias": [5]}, "token ids and numbers from -100 to 100."),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "json_schema"}},
            'Missing "response_format.json_schema".',
        ),
        (CHAT, {"messages": HI, "n": True}, "n must be an integer, not true"),
        (CHAT, {"messages": HI, "n": 0}, "n must be an integer from 1 to 128, not 0"),
        (CHAT, {"messages": HI, "stream": "no"}, "stream must be true or false, not 'no'."),
        (
            CHAT,
            {"messages": HI, "temperature": 10**400},
            "temperature must be a number, not a very large number",
        ),
        (CHAT, {"messages": HI, "top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
        (CHAT, {"messages": HI, "max_tokens": 1.5}, "max_tokens must be an integer"),
        (CHAT, {"messages": HI, "seed": -(2**63) - 1}, "not -9223372036854775809"),
        (
            CHAT,
            {"messages": HI, "logprobs": True, "top_logprobs": 21},
            "top_logprobs must be an integer from 0 to 20, not 21",
        ),
        (CHAT, {"messages": HI, "think": "deeply"}, "of tokens, not 'deeply'"),
        (CHAT, {"messages": HI, "reasoning_effort": "some"}, "high, not 'some'"),
        (CHAT, {"messages": HI, "tool_choice": "required"}, "there are no tools"),
        (CHAT, {"messages": HI, "tools": {}}, "tools must be a list, not an object"),
        (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": "g"}, "'g', which is not one of the tools"),
        (
            CHAT,
            {"messages": HI, "functions": [TOOL["function"]], "function_call": {"name": "g"}},
            "function_call names 'g', which",
        ),
        (CHAT, {"messages": HI, "guided_json": True}, "guided_json must be an object or a string, not true"),
        ("/completion", {"prompt": "One", "n": 2}, "This path gives one answer. Ask /v1/completions"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "A tool call in a message is invalid",
        ),
        (CHAT, {"messages": HI, "max_tokens": "many"}, "max_tokens must be an integer, not 'many'."),
        (CHAT, {"messages": HI, "seed": 2**64}, "not 18446744073709551616"),
        (RESPONSE, {"input": []}, "input must be a non-empty string"),
        (TEXT, {"prompt": [-1]}, "There is no token -1"),
        (TEXT, {"prompt": [1, N_VOCAB]}, f"There is no token {N_VOCAB}"),
        (TEXT, {"prompt": [True]}, "must be a non-empty string or list of tokens"),
    ],
)
def test_what_is_refused(server: Running, path: str, body: object, reason: str) -> None:
    status, answer = server.post(path, body)
    assert status == 400
    assert reason in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 500
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "a " * 40_000},
        {"prompt": "a " * 2000},
        {"prompt": [1] * 256},
        {"prompt": "a", "suffix": "a " * 40_000},
    ],
)
def test_a_prompt_that_is_too_long(server: Running, asked: dict[str, object]) -> None:
    status, answer = server.post(TEXT, {**asked, "stream": True})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "context" in answer["error"]["message"]


@given(
    st.recursive(st.none() | st.text() | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_what_is_within_the_limits_is_parsed_as_it_is(value: Any) -> None:
    assert parse(json.dumps(value).encode(), values=1000, depth=200) == value


@given(st.lists(st.text('["\\{,'), max_size=5), st.integers(1, 8))
def test_depth_is_counted_outside_of_texts(texts: list[str], depth: int) -> None:
    value: Any = texts
    for _ in range(depth - 1):
        value = {"".join(texts): value}
    data = json.dumps(value).encode()
    assert parse(data, values=1000, depth=depth) == value
    with pytest.raises(Refusal, match="nested"):
        parse(data, values=1000, depth=depth - 1)


def test_a_body_that_is_too_large(server: Running) -> None:
    with server.connect() as client:
        client.begin(CHAT, 64 * MIB)  # refused before any of it is sent
        status, answer = client.answer()
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        assert "--max-body" in answer["error"]["message"]
    with server.connect() as client:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.socket.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(17):  # each is more than the socket holds unread
            client.socket.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert client.answer()[0] == 413


@pytest.mark.parametrize(
    ("path", "content_type", "status"),
    [(CHAT, "application/json", 413), (CHAT, "text/plain", 413), ("/v1/nothing", "application/json", 404)],
)
def test_who_sends_all_of_a_refused_body_gets_the_answer(
    server: Running, path: str, content_type: str, status: int
) -> None:
    """Closing the connection at once would reset it, and many clients read only after they have sent."""
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    client.request("POST", path, b" " * (9 * MIB), {"Content-Type": content_type})
    answer = client.getresponse()
    assert answer.status == status
    assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"
    client.request("GET", "/health")  # on the same connection
    assert client.getresponse().status == 200
    client.close()


PROMPT = b'{"prompt": "Once", "max_tokens": 2}'


def compressed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    ("encoding", "body", "status", "said"),
    [
        ("gzip", compressed(PROMPT), 200, ""),
        ("X-GZip", compressed(PROMPT + b" " * (MIB - len(PROMPT))), 200, ""),
        ("identity", PROMPT, 200, ""),
        ("gzip", compressed(b" " * (MIB + 1)), 413, "more than 1,048,576 bytes"),
        ("gzip", compressed(b" " * (64 * MIB)), 413, "more than 1,048,576 bytes"),
        ("gzip", PROMPT, 400, "not valid gzip"),
        ("gzip", compressed(PROMPT)[:-1], 400, "not one whole gzip stream"),
        ("gzip", compressed(PROMPT) + compressed(b""), 400, "not one whole gzip stream"),
        ("gzip", b"", 400, "not one whole gzip stream"),
        ("br", PROMPT, 415, "Content-Encoding 'br' is not supported. Send gzip"),
    ],
)
def test_compressed_bodies(server: Running, encoding: str, body: bytes, status: int, said: str) -> None:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    client.request("POST", TEXT, body, {"Content-Encoding": encoding})
    answer = client.getresponse()
    assert (answer.status, said in answer.read().decode()) == (status, True)
    client.close()


def test_seeds_as_clients_send_them(server: Running) -> None:
    def text(**more: object) -> str:
        return server.text("The", max_tokens=12, temperature=100, **more)

    assert text(seed=7) == text(seed=7)
    assert text(seed=-2) == text(seed=-2)
    assert len({text(seed=-1) for _ in range(4)}) > 1  # -1 is none at all, as in llama.cpp


def test_fields_that_change_nothing_are_left_aside(server: Running) -> None:
    plain = server.text()
    assert (
        server.text(user="me", store=False, metadata={"a": 1}, tools=[], logit_bias=None, echo=False) == plain
    )


_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(st.characters(), max_size=20) | st.integers(),
    lambda x: (
        st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=8) | st.sampled_from(["type", "role"]), x)
    ),
    max_leaves=12,
)
_FIELDS = [
    *(
        "model",
        "messages",
        "prompt",
        "n",
        "best_of",
        "stream",
        "stream_options",
        "stop",
        "seed",
        "temperature",
    ),
    *(
        "max_tokens",
        "max_completion_tokens",
        "top_p",
        "top_k",
        "min_p",
        "repeat_penalty",
        "frequency_penalty",
    ),
    *("presence_penalty", "penalty_window", "response_format", "grammar", "json_schema", "tools", "logprobs"),
    *("logit_bias", "suffix", "echo", "user", "tool_choice", "parallel_tool_calls", "top_logprobs", "think"),
    *("reasoning_effort", "chat_template_kwargs", "input", "instructions", "text", "reasoning"),
]


@settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from([CHAT, TEXT, RESPONSE]),
    st.sampled_from(_FIELDS),
    _VALUES | st.builds(lambda v: [{"role": "user", "content": v}], _VALUES),
)
def test_any_value_in_any_field_is_answered_or_refused(
    server: Running, path: str, field: str, value: object
) -> None:
    if path == RESPONSE:
        body = {"input": "Hi", "max_output_tokens": 2, field: value}
    else:
        body = {"messages": HI, "prompt": "Hi", "max_tokens": 2, field: value}
    if field == "n" and isinstance(value, int) and value > 3:
        return  # it would be answered, but takes long
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    client.request("POST", path, json.dumps(body), {"Connection": "close"})
    with client.getresponse() as answer:
        response = answer.read()
    assert answer.status == 200 or 400 <= answer.status < 500, (answer.status, response[-500:])
    assert b'"server_error"' not in response


def test_unfinished_bodies_are_bounded_together(server: Running) -> None:
    """Four of a MiB may wait; then large ones are refused, and small ones are not."""
    before = server.text()
    clients = [server.connect() for _ in range(8)]
    for client in clients:
        client.begin(TEXT, MIB)
    for client in clients:
        with contextlib.suppress(ConnectionError):
            client.socket.sendall(b" " * (MIB - 1000))
    waiting = {client.socket: client for client in clients}
    while len(waiting) > 4:
        ready, _, _ = select.select(waiting, [], [], PATIENCE_S)
        assert ready, "more than four are waited for"
        for connection in ready:
            status, body = waiting.pop(connection).answer()
            assert (status, body["error"]["code"]) == (503, "too_many_bodies")
    assert server.text() == before
    for client in clients:
        client.socket.close()

    def is_received() -> bool:
        status, answer = server.post(TEXT, {"prompt": "Hi", "user": "x" * (MIB - 1000)})
        assert status == 200 or answer["error"]["code"] == "too_many_bodies"
        return status == 200

    wait_until(is_received)  # once the server has seen them leave


def test_silent_connections_and_slow_bodies_end(impatient: Running) -> None:
    with impatient.connect() as silent, impatient.connect() as body:
        body.begin(TEXT, 1000)
        body.socket.sendall(b'{"prompt": ')
        status, answer = body.answer()
        assert (status, answer["error"]["message"]) == (408, "The body did not arrive within 2 seconds.")
        assert body.is_closed()  # the rest is not waited for either
        assert silent.is_closed()


def test_connections_are_bounded(impatient: Running) -> None:
    clients = [impatient.connect() for _ in range(12)]
    for client in clients:
        client.socket.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert any(client.socket.recv(65536).startswith(b"HTTP/1.1 503") for client in clients)
    for client in clients:
        client.socket.close()

    def is_answered() -> bool:
        with contextlib.suppress(ConnectionError, AssertionError):
            return bool(impatient.text())
        return False

    wait_until(is_answered)
    assert impatient.get("/health") == (200, {"status": "ok"})


def test_the_headers_are_bounded(server: Running) -> None:
    with server.connect() as client:
        client.socket.settimeout(PATIENCE_S)
        try:
            client.socket.sendall(b"GET /health HTTP/1.1\r\n" + b"X-A: " + b"b" * 10 * MIB)
        except ConnectionError:
            return
        assert client.is_closed()
    assert server.get("/health")[0] == 200
