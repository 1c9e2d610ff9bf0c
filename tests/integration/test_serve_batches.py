"""Batches of the OpenAI and Anthropic APIs, by their own clients."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from edgespec.api.refusals import Refusal
from edgespec.serving import batches
from tests.serving import CHAT, TEXT, Running, load, serving
from tests.waiting import wait_until

MESSAGES = [{"role": "user", "content": "One two three"}]
KEY = "known"


@pytest.fixture(scope="module")
def server(short_path: Path) -> Iterator[Running]:
    with serving(lambda: load(short_path, 512), parallel=2, waiting=0, api_key=KEY, max_tokens=8) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.openai(KEY) as client:
        yield client


def line(identifier: object, url: str = CHAT, **body: Any) -> str:
    asked = {"custom_id": identifier, "method": "POST", "url": url, "body": body}
    return json.dumps(asked) + "\n"


def test_a_file_of_requests_is_answered_as_the_requests_are(client: openai.OpenAI) -> None:
    lines = [line(str(seed), messages=MESSAGES, seed=seed, temperature=1) for seed in range(6)]
    lines += ["\n", line("text \u2028 \u00e9", messages=MESSAGES, stream=True), line("wrong", messages=[])]
    file = client.files.create(file=("asked.jsonl", "".join(lines).encode()), purpose="batch")
    assert (file.filename, client.files.content(file.id).text) == ("asked.jsonl", "".join(lines))
    assert [one.id for one in client.files.list()] == [file.id]
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"of": "mine"}
    )
    client.files.delete(file.id)

    def ended() -> bool:
        return client.batches.retrieve(batch.id).status == "completed"

    wait_until(ended)
    done = client.batches.retrieve(batch.id)
    assert done.metadata == {"of": "mine"}
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 8, "completed": 7, "failed": 1}
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    found = [json.loads(one) for one in client.files.content(done.output_file_id).text.splitlines()]
    assert [one["custom_id"] for one in found] == [*map(str, range(6)), "text \u2028 \u00e9"]
    for seed in range(6):
        settings: Any = {"messages": MESSAGES, "seed": seed, "temperature": 1}
        direct = client.chat.completions.create(model="model", **settings)
        body = found[seed]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == direct.choices[0].message.content
    (wrong,) = client.files.content(done.error_file_id).text.splitlines()
    assert json.loads(wrong)["response"]["status_code"] == 400
    assert [one.id for one in client.batches.list()] == [batch.id]


def test_what_is_wrong_with_a_batch_is_said_before_it_begins(client: openai.OpenAI) -> None:
    def told(*lines: str) -> str:
        file = client.files.create(file=("a.jsonl", "".join(lines).encode()), purpose="batch")
        with pytest.raises(openai.BadRequestError) as failure:
            client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        return str(failure.value)

    assert "Line 2 is not valid JSON" in told(line("a"), "{\n")
    assert "Line 1: url must be /v1/chat/completions." in told(line("a", TEXT))
    assert "Line 1: method must be POST." in told(line("a").replace("POST", "GET"))
    assert "Line 1: custom_id must be a non-empty string" in told(line(1))
    assert "same custom_id" in told(line("a"), line("a"))
    assert "The batch has 0 requests" in told("\n")
    for ask in (client.files.retrieve, client.files.content, client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="'nosuch'"):
            ask("nosuch")
    with pytest.raises(openai.BadRequestError, match="multipart/form-data"):
        client.post("/files", body={"purpose": "batch"}, cast_to=object)


def test_batches_of_messages(server: Running) -> None:
    with server.anthropic(KEY) as client:
        asked: Any = {"model": "model", "max_tokens": 8, "messages": MESSAGES}
        requests: Any = [
            {"custom_id": "right", "params": asked},
            {"custom_id": "wrong", "params": {**asked, "messages": []}},
        ]
        begun = client.messages.batches.create(requests=requests)
        wait_until(lambda: client.messages.batches.retrieve(begun.id).processing_status == "ended")
        counts = client.messages.batches.retrieve(begun.id).request_counts
        assert (counts.succeeded, counts.errored, counts.processing) == (1, 1, 0)
        found: dict[str, Any] = {
            one.custom_id: one.result for one in client.messages.batches.results(begun.id)
        }
        assert found["right"].message.content == client.messages.create(**asked).content
        assert found["wrong"].error.error.type == "invalid_request_error"
        many: Any = [{"custom_id": str(n), "params": {**asked, "max_tokens": 300}} for n in range(200)]
        begun = client.messages.batches.create(requests=many)
        client.messages.batches.cancel(begun.id)
        wait_until(lambda: client.messages.batches.retrieve(begun.id).processing_status == "ended")
        counts = client.messages.batches.retrieve(begun.id).request_counts
        assert counts.canceled > 0
        assert counts.canceled + counts.succeeded == 200
        assert next(one.id for one in client.messages.batches.list()) == begun.id
        client.messages.batches.delete(begun.id)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve(begun.id)


def test_batches_that_are_done_make_room_for_others(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_MAX_BATCH_BYTES", 3000)
    monkeypatch.setattr(batches, "_LINE_BYTES", 0)

    def begun(size: int) -> str:
        text = line("a", messages=[{"role": "user", "content": "x" * size}])
        file = client.files.create(file=("a.jsonl", text.encode()), purpose="batch")
        return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id

    first = begun(1)
    wait_until(lambda: client.batches.retrieve(first).status == "completed")
    second = begun(2800)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(first)
    with pytest.raises(openai.RateLimitError, match="too large"):
        begun(3000)
    wait_until(lambda: client.batches.retrieve(second).status == "completed")
    monkeypatch.setattr(batches, "_MAX_BATCH_BYTES", 300)
    third = begun(1)
    wait_until(lambda: client.batches.retrieve(third).status == "completed")
    batch = client.batches.retrieve(third)
    assert batch.request_counts is not None
    assert batch.request_counts.failed == 1
    assert batch.error_file_id is not None
    assert "too much memory" in client.files.content(batch.error_file_id).text


def test_another_key_finds_no_files_and_batches(short_path: Path) -> None:
    """Where a proxy checks the keys, and the server asks for none."""
    with serving(lambda: load(short_path, 512)) as server:
        mine, other = map(server.openai, ("mine", "other"))
        with mine, other:
            text = line("a", messages=MESSAGES, max_tokens=1)
            file = mine.files.create(file=("a.jsonl", text.encode()), purpose="batch").id
            batch = mine.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h").id
            wait_until(lambda: mine.batches.retrieve(batch).status == "completed")
            found = mine.batches.retrieve(batch).output_file_id
            assert {one.id for one in mine.files.list()} == {file, found}
            assert [one.id for one in mine.batches.list()] == [batch]
            assert [*other.files.list(), *other.batches.list()] == []
            asked: Any = {"endpoint": CHAT, "completion_window": "24h"}
            for ask in (
                lambda: other.files.content(str(found)),
                lambda: other.files.delete(file),
                lambda: other.batches.retrieve(batch),
                lambda: other.batches.cancel(batch),
                lambda: other.batches.create(input_file_id=file, **asked),
            ):
                with pytest.raises(openai.NotFoundError):
                    ask()


def test_a_form_is_read_no_further_than_forms_are_long() -> None:
    kind = "multipart/form-data; boundary=X"
    file = (
        b'--X\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\none\r\n\r\ntwo\r\n--X--\r\n'
    )
    for before in (b"", b"--X\r\n" + b"a: b\r\n" * 100_000):
        assert batches._uploaded(before + file, kind) == ("a", "batch", b"one\r\n\r\ntwo")
    with pytest.raises(Refusal, match="no closing boundary"):
        batches._uploaded(file.removesuffix(b"--X--\r\n"), kind)
    with pytest.raises(Refusal, match="multipart/form-data"):
        batches._uploaded(b"--X\r\n" * 100_000 + file, kind)
    for broken in (b"filename*", b"(" * 3000):  # on which Python's parser of headers fails
        with pytest.raises(Refusal, match="header of the form is invalid"):
            batches._uploaded(file.replace(b'filename="a"', broken), kind)


def test_what_clients_note_about_a_batch_is_bounded(client: openai.OpenAI) -> None:
    def refused(identifier: str = "a", purpose: Any = "batch", **asked: Any) -> str:
        file = client.files.create(
            file=("a.jsonl", line(identifier, messages=MESSAGES).encode()), purpose=purpose
        )
        assert len(client.files.retrieve(file.id).purpose) <= 512
        body = {"input_file_id": file.id, "endpoint": CHAT, **asked}
        with pytest.raises(openai.BadRequestError) as failure:
            client.post("/batches", body=body, cast_to=object)
        return str(failure.value)

    assert "custom_id" in refused("a" * 513, purpose="p" * 10_000)
    for notes in ({str(n): "" for n in range(17)}, {"a": "b" * 513}, {"a": 1}, [1]):
        assert "metadata must be an object" in refused(metadata=notes)
    assert "endpoint must be one of" in refused(endpoint="/v1/batches")
    assert "completion_window must be" in refused(completion_window="1h")
    assert "input_file_id" in refused(input_file_id=None)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_not_json_are_refused(server: Running, value: str) -> None:
    body = f'{{"input_file_id": "a", "metadata": {{"a": {value}}}}}'.encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/batches", body, {"Authorization": f"Bearer {KEY}"})
    assert connection.getresponse().status == 400
    connection.close()
