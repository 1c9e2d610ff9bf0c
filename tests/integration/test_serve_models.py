"""One server with several models: each request is answered by the model that it names, within the memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import HubServer
from tests.program import run_here
from tests.serving import CHAT, Running, started
from tests.waiting import wait_until

_QUESTIONS = ("Why is the sky blue?", "Name a fruit.")


@pytest.fixture(scope="module")
def models(smol_path: Path, q4_drafter_path: Path, dropped_drafter_path: Path) -> list[Path]:
    return [smol_path, q4_drafter_path, dropped_drafter_path]


@pytest.fixture
def server(own_environment: None, models: list[Path]) -> Iterator[Running]:
    """A server whose memory holds one of its models, and gives it back when it is idle."""
    limits = ("--memory", "500MiB", "--keep-alive", "1s", "--draft", "none", "--context", "512")
    with started(*models, *limits, "--alias", f"gpt-*={models[1].stem}") as (running, _):
        yield running


def _ask(server: Running, model: str, question: str) -> str:
    body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": question}]}
    status, answer = server.post(CHAT, body)
    assert status == 200, answer
    assert answer["model"] == model
    return str(answer["choices"][0]["message"]["content"])


def _loaded(server: Running) -> list[str]:
    return [one["name"] for one in server.get("/api/ps")[1]["models"]]


def test_eight_clients_share_memory_for_one_of_three_models(server: Running, models: list[Path]) -> None:
    names = [path.stem for path in models]
    assert [one["id"] for one in server.get("/v1/models")[1]["data"]] == names
    assert _loaded(server) == []
    expected = {(name, asked): _ask(server, name, asked) for name in names for asked in _QUESTIONS}
    done, most = threading.Event(), []

    def watch() -> None:
        while not done.wait(0.05):
            most.append(len(_loaded(server)))

    watching = threading.Thread(target=watch)
    watching.start()

    def client(number: int) -> tuple[tuple[str, str], str]:
        one = sorted(expected)[number % len(expected)]
        return one, _ask(server, *one)

    try:
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(client, range(8)))
    finally:
        done.set()
        watching.join()
    assert len(answers) == 8
    assert all(expected[asked] == answer for asked, answer in answers), "no answer is another model's"
    assert max(most) == 1
    wait_until(lambda: _loaded(server) == [])
    assert _ask(server, names[0], _QUESTIONS[0]) == expected[names[0], _QUESTIONS[0]]
    assert _ask(server, "gpt-4o", _QUESTIONS[0]) == expected[names[1], _QUESTIONS[0]]


def test_what_no_model_can_answer_is_refused_by_itself(server: Running, models: list[Path]) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    status, answer = server.post(CHAT, {"model": "nosuch", "messages": messages})
    assert status == 404
    assert all(path.stem in answer["error"]["message"] for path in models)
    status, answer = server.post("/v1/embeddings", {"model": models[0].stem, "input": "Hi"})
    assert status == 404, answer
    status, answer = server.post(CHAT, {"model": models[0].stem, "messages": []})
    assert status == 400, answer
    assert server.get("/health")[0] == 200
    status, shown = server.post("/api/show", {"model": models[1].stem})
    assert (status, shown["capabilities"]) == (200, ["completion", "tools"])
    assert server.get("/v1/models/nosuch")[0] == 404
    pull = {"model": models[1].stem, "stream": False}
    assert server.post("/api/pull", pull) == (200, {"status": "success"})
    assert server.post("/api/pull", {**pull, "model": "nosuch"})[0] == 404


def test_a_name_for_several_models_is_refused(models: list[Path]) -> None:
    for option, value in (("--name", "one"), ("--alias", "one"), ("--alias", "one=nosuch")):
        done = run_here("serve", *map(str, models), option, value, "--port", "0")
        assert done.returncode == 2
        assert "several are served" in done.stderr


def test_a_model_that_cannot_be_loaded_is_an_error_for_its_requests(
    own_environment: None, short_path: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(short_path.read_bytes()[: 1 << 20])
    with started(short_path, broken, "--draft", "none", "--context", "512") as (server, _):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
        for _ in range(2):
            status, answer = server.post(CHAT, {"model": "broken", "messages": messages})
            assert status >= 400, answer
            assert "broken.gguf" in answer["error"]["message"]
        assert _ask(server, short_path.stem, "Hi")


def test_a_model_is_downloaded_for_a_client_if_that_is_allowed(
    own_environment: None, short_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer({"acme/Tiny-GGUF": {"tiny-Q4_K_M.gguf": short_path.read_bytes()}}) as hub:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with started(short_path, "--allow-pull", "--draft", "none", "--context", "512") as (server, _):
            name = "acme/Tiny-GGUF:Q4_K_M"
            assert server.post(CHAT, {"model": name, "messages": []})[0] == 404
            status, answer = server.post("/api/pull", {"model": "../etc/passwd", "stream": False})
            assert (status, "not the name of a model" in answer["error"]) == (400, True)
            assert server.post("/api/pull", {"model": "acme/None-GGUF", "stream": False})[0] == 404
            assert server.post("/api/pull", {"model": "smollm2-135m", "stream": False})[0] == 200
            with server.connect() as client:
                client.send("/api/pull", {"model": name})
                lines = HTTPResponse(client.socket)
                lines.begin()
                steps = [json.loads(line) for line in lines]
            assert steps[-1] == {"status": "success"}
            assert any("Downloading" in step["status"] for step in steps)
            assert server.post("/api/pull", {"model": name, "stream": False}) == (200, {"status": "success"})
            assert name in [one["id"] for one in server.get("/v1/models")[1]["data"]]
            assert _ask(server, name, "Hi") == _ask(server, short_path.stem, "Hi")
            again = f"hf.co/{name}"
            assert server.post("/api/pull", {"model": again, "stream": False})[0] == 200
            assert _ask(server, again, "Hi") == _ask(server, name, "Hi")
            listed = [one["id"] for one in server.get("/v1/models")[1]["data"]]
            assert len(listed) == len({*listed}), "another name is no other model"
