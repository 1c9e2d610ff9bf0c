"""The HTTP server with the real OpenAI client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.desk import EDGESPEC
from tests.gate import Gate
from tests.program import run_here
from tests.waiting import PATIENCE_S, wait_until

SKY = "Why is the sky blue?"
MODEL = "SmolLM2-135M-Instruct.Q4_1"


@contextmanager
def server(*arguments: str, program: Sequence[str] = EDGESPEC) -> Iterator[str]:
    """A running server's base URL."""
    fixed = ["--port", "0", "--context", "1024", "--sampling", "greedy"]
    command = [*program, "serve", *fixed, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = process.stderr.readline()
        match = re.fullmatch(
            r"Serving \S+ at (http://127\.0\.0\.1:\d+/v1); chat at \S+\. Ctrl-C ends it\.\n", told
        )
        assert match, told
        try:
            yield match[1]
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server("--exact", "--queue", "8") as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, text: str = SKY, **more: object) -> Any:
    create: Any = client.chat.completions.create
    return create(model=MODEL, messages=[{"role": "user", "content": text}], **more)


def test_a_chat_answer_with_usage(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=6)
    longer = ask(client, max_tokens=12)
    assert len(answer.choices[0].message.content) > 6
    assert longer.choices[0].message.content.startswith(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


def test_streaming_gives_the_same_text(client: openai.OpenAI) -> None:
    whole = ask(client, max_completion_tokens=24, temperature=0.8, seed=3)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": SKY}]}],
        max_tokens=24,
        temperature=0.8,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage
    assert ask(client, max_tokens=24, temperature=0.8, seed=4).choices[0].message.content != text


def test_stop_and_several_answers(client: openai.OpenAI) -> None:
    text = ask(client, max_tokens=20).choices[0].message.content
    word = text[text.index(" ", len(text) // 2) :][:4]
    answer = ask(client, max_tokens=20, stop=[word], n=2)
    assert [c.message.content for c in answer.choices] == [text[: text.index(word)]] * 2
    assert [c.finish_reason for c in answer.choices] == ["stop"] * 2


def test_text_completions(client: openai.OpenAI, reply: Callable[..., str]) -> None:
    expected = reply("The capital of France is", 2, raw=True)
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=2)
    assert answer.choices[0].text == expected
    pieces = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=2, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == expected


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "edgespec"
    answer: Any = client.completions.create(model="gpt-9", prompt="Hi", max_tokens=1)
    assert answer.model == MODEL
    assert "'gpt-9' is not served here" in answer.warnings[0]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_what_is_wrong_is_said(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"temperature must be .*, not -1\."):
        ask(client, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="A tool has no valid name"):
        ask(client, tools=[{"type": "function", "function": {"name": "f g"}}])
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, text="x " * 2000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="the context holds 1024"):
        ask(client, text="x " * 2000, stream=True)


def test_eight_clients_at_once_get_what_each_gets_alone(url: str) -> None:
    async def talk() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def one(number: int, *, stream: bool) -> str:
                asked: Any = [{"role": "user", "content": f"Count to {number}."}]
                create: Any = client.chat.completions.create
                answer = await create(model=MODEL, messages=asked, max_tokens=8, stream=stream)
                if not stream:
                    return str(answer.choices[0].message.content)
                pieces = [piece async for piece in answer]
                assert pieces[-1].choices[0].finish_reason in ("length", "stop")
                return "".join(piece.choices[0].delta.content or "" for piece in pieces)

            together = await asyncio.gather(*(one(n, stream=n % 2 == 0) for n in range(8)))
            return together, [await one(n, stream=False) for n in range(8)]

    together, alone = asyncio.run(talk())
    assert together == alone
    assert len(set(alone)) > 1


def test_of_eight_clients_those_that_find_no_place_are_told_to_come_back(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.close()

    async def talk(url: str) -> tuple[list[Any], list[Any]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def one(_number: int) -> str:
                asked: Any = [{"role": "user", "content": SKY}]
                create: Any = client.chat.completions.create
                try:
                    stream = await create(model=MODEL, messages=asked, max_tokens=16, stream=True)
                except openai.RateLimitError as error:
                    refused.append(error)
                    if len(refused) == 5:
                        gate.open()  # nobody is answered before
                    raise
                return "".join([piece.choices[0].delta.content or "" async for piece in stream])

            refused: list[openai.RateLimitError] = []
            at_once = await asyncio.gather(*map(one, range(8)), return_exceptions=True)
            return list(at_once), [await one(8)]

    fixed = ["--exact", "--draft", "none", "--parallel", "1", "--queue", "2"]
    with server(*fixed, program=gate.program) as url:
        at_once, afterwards = asyncio.run(talk(url))
    refused = [answer for answer in at_once if isinstance(answer, openai.RateLimitError)]
    answered = [answer for answer in at_once if isinstance(answer, str)]
    assert (len(answered), len(refused)) == (3, 5), "one is answered, and two wait"
    assert len({*answered, *afterwards}) == 1
    assert all(answer.response.headers["retry-after"] for answer in refused)


def test_a_full_queue_is_a_429_and_gone_clients_are_forgotten(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.close()
    with (
        server("--draft", "none", "--parallel", "1", "--queue", "0", program=gate.program) as url,
        openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client,
    ):
        stream = ask(client, text="Tell a long story.", max_tokens=900, stream=True)
        gate.wait()
        with pytest.raises(openai.RateLimitError, match="Too many requests are waiting") as caught:
            ask(client)
        assert caught.value.response.headers["retry-after"] == "5"
        stream.close()
        gate.open()

        def answer() -> Any:
            with contextlib.suppress(openai.RateLimitError):
                return ask(client, max_tokens=4)

        assert wait_until(answer).usage.completion_tokens == 4
        root = client.with_options(base_url=url.removesuffix("/v1"))
        wait_until(lambda: 'outcome="abandoned"} 1.0' in root.get("/metrics", cast_to=str))


def test_an_api_key_keeps_others_out_and_what_was_asked_is_logged(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with server("--api-key", "secret", "--alias", "other", "--log", str(log)) as url:
        with openai.OpenAI(base_url=url, api_key="guess", max_retries=0) as client:
            wrong = pytest.raises(openai.AuthenticationError, match="The API key is invalid")
            with wrong:
                client.models.list()
            with wrong:
                client.with_options(base_url=url.removesuffix("/v1")).get("/metrics", cast_to=str)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/models")
        with refused.value as reply:
            assert (reply.code, b"The API key is missing. Send it" in reply.read()) == (401, True)
        with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            assert ask(client, max_tokens=4).usage.completion_tokens == 4
            assert [model.id for model in client.models.list()] == [MODEL, "other"]
    (entry,) = map(json.loads, log.read_text().splitlines())
    assert (entry["path"], entry["status"], entry["completion_tokens"]) == ("/v1/chat/completions", 200, 4)
    assert "secret" not in log.read_text()


def test_a_log_that_cannot_be_written_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    done = run_here("serve", "--port", "0", "--log", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: {tmp_path} cannot be written: Is a directory.\nGive another name to --log.\n"
    )


def test_web_pages_cannot_reach_it(url: str) -> None:
    import http.client

    connection = http.client.HTTPConnection(url.split("/")[2])
    connection.request("GET", "/v1/models", headers={"Host": "evil.example"})
    answer = connection.getresponse()
    assert answer.status == 403
    assert (
        "Host 'evil.example' is not allowed. Start the server with --allow-host evil.example."
        in json.load(answer)["error"]["message"]
    )
    for host in ("LOCALHOST:1", "[::1]:8080", "127.0.0.1"):
        connection.request("GET", "/v1/models", headers={"Host": host})
        answer = connection.getresponse()
        assert (answer.status, "data" in json.load(answer)) == (200, True)
    connection.close()


def test_others_are_not_served_without_a_key() -> None:
    done = run_here("serve", "--host", "0.0.0.0")
    assert done.returncode == 2
    assert done.stderr == (
        "Error: Other machines can reach this server at 0.0.0.0, but it has no API key.\n"
        "Set one with --api-key or EDGESPEC_API_KEY, or leave out --host.\n"
    )
    done = run_here("serve", "--host", "0.0.0.0", "--api-key", " ")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "Error: --api-key is empty.")
