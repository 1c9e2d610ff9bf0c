"""When a server reloads its model, and what it then knows: the file may be that of another model by then."""

from __future__ import annotations

import os
import shutil
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from edgespec.base.units import readable_count
from edgespec.engine.engine import Engine
from edgespec.engine.sequence import TextSequence
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.serving.keep_alive import parse_keep_alive
from tests.least_memory import load_in_least_memory
from tests.serving import CHAT, RESPONSE, TEXT, Running, load, serving
from tests.tiny import ARCHITECTURES, N_LAYER, write_tiny
from tests.waiting import wait_until

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOP_P = 0.625
QUESTION = {"role": "user", "content": "Why is the sky blue?"}


def described(server: Running) -> tuple[dict[str, Any], dict[str, Any], float]:
    """The entry of the model in the list, its details, and the default of a setting."""
    (listed,) = server.get("/api/tags")[1]["models"]
    (running,) = server.get("/api/ps")[1]["models"]
    assert (running["size"], running["digest"]) == (listed["size"], listed["digest"])
    status, shown = server.post("/api/show", {"model": "model"})
    assert status == 200
    status, answer = server.post(RESPONSE, {"input": "Hi", "max_output_tokens": 1})
    assert status == 200, answer
    return listed, shown, answer["top_p"]


def test_one_odd_request_ends_no_other(
    short_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug that one request meets is told to its client and in the log; the model is not reloaded for it."""

    def loading() -> Engine:
        engine = load(short_path, 1024)
        begin = engine.maker.for_prompt

        def fragile(prompt: list[int], config: GenerationConfig, raw: bool, owner: Hashable) -> TextSequence:
            if config.seed == 13:
                raise KeyError("odd")
            return begin(prompt, config, raw, owner)

        monkeypatch.setattr(engine.maker, "for_prompt", fragile)
        return engine

    long = {"prompt": "la " * 50, "max_tokens": 300, "stream": True}
    with serving(loading, parallel=2) as server, server.connect() as client:
        client.send(TEXT, long)
        received = client.socket.recv(65536)
        status, answer = server.post(TEXT, {"prompt": "Hi", "seed": 13})
        assert (status, answer["error"]["message"]) == (500, "This is a bug in EdgeSpec: KeyError: 'odd'.")
        assert server.get("/health")[0] == 200
        while b"[DONE]" not in received:
            received += client.socket.recv(65536)
        assert b'"error"' not in received
        assert server.told == []
    assert capfd.readouterr().err.count("Traceback (most recent call last)") == 1


def test_everything_follows_the_file_after_a_reload(tmp_path: Path, short_path: Path) -> None:
    """Written answers, defaults and descriptions; the other model has fewer tokens."""

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template(TEMPLATE)
        writer.add_sampling_top_p(TOP_P)

    kind = replace(ARCHITECTURES["llama"], keys=keys)
    other = write_tiny(tmp_path / "other.gguf", "llama", short_path, kind=kind)
    model = tmp_path / "model.gguf"
    shutil.copy(short_path, model)

    def streamed(path: Path) -> Engine:
        return load_in_least_memory(path, context=256, exact=True, pack="never", threads=1)

    with serving(lambda: streamed(other), recommended=True) as untouched:
        expected = described(untouched)
        with serving(lambda: streamed(model), recommended=True) as server:
            before = described(server)
            assert before[2] != TOP_P == expected[2]

            def follow_up(server: Running) -> tuple[int, Any]:
                return server.post(CHAT, {"messages": talk, "max_tokens": 12, "temperature": 0})

            talk = [QUESTION]
            status, answer = follow_up(server)
            assert status == 200, answer
            talk += [answer["choices"][0]["message"], QUESTION]
            status, old = follow_up(server)
            assert status == 200, old
            read = [old["usage"]["prompt_tokens"]]

            away = model.rename(tmp_path / "away.gguf")
            shutil.copy(other, model)
            os.truncate(away, 4096)  # the open file cannot be read any more, and the model is reloaded
            assert follow_up(server)[0] == 500
            wait_until(lambda: server.get("/health")[0] == 200)

            for _ in range(2):  # the second one with an answer that the new model wrote
                status, new = follow_up(server)
                assert status == 200, new
                status, right = follow_up(untouched)
                assert new["choices"] == right["choices"]
                read.append(new["usage"]["prompt_tokens"])
                assert read[-1] == right["usage"]["prompt_tokens"]
                talk += [new["choices"][0]["message"], QUESTION]
            assert read[1] > read[0], "the same conversation takes more tokens of the other model"
            listed, shown, top_p = described(server)
    assert (listed["size"], top_p) == (other.stat().st_size, TOP_P)
    assert listed["digest"] == expected[0]["digest"] != before[0]["digest"]
    assert shown["model_info"]["llama.block_count"] == N_LAYER != before[1]["model_info"]["llama.block_count"]
    parameters = shown["model_info"]["general.parameter_count"]
    assert listed["details"]["parameter_size"] == readable_count(parameters)
    assert shown == {**expected[1], "modelfile": "FROM model.gguf"}


def test_an_idle_model_is_unloaded_until_a_request_needs_it(short_path: Path) -> None:
    loaded: list[Engine] = []

    def loading() -> Engine:
        loaded.append(load(short_path, 1024))
        return loaded[-1]

    with serving(loading) as server:
        text = server.text()
        unload = {"prompt": "", "keep_alive": 0}
        short: dict[str, Any] = {"prompt": "a", "stream": False, "options": {"num_predict": 2}}
        assert server.post("/api/generate", unload)[1]["done_reason"] == "unload"
        wait_until(lambda: server.get("/api/ps")[1] == {"models": []})
        wait_until(lambda: loaded[0].closed)
        assert server.get("/health")[0] == 200
        assert len(server.get("/v1/models")[1]["data"]) == len(server.get("/api/tags")[1]["models"]) == 1
        assert (server.text(), len(loaded)) == (text, 2)
        assert len(server.get("/api/ps")[1]["models"]) == 1
        # It is unloaded at once behind an answer, too, and any number of requests load it once.
        assert server.post("/api/generate", short | {"keep_alive": "0s"})[0] == 200
        wait_until(lambda: loaded[1].closed)
        with ThreadPoolExecutor(4) as users:
            assert set(users.map(lambda _: server.text(), range(4))) == {text}
        assert len(loaded) == 3
        assert server.post("/api/generate", {"prompt": "a", "keep_alive": "soon"})[0] == 400


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("0", 0), (0, 0), (30, 30), ("-1", -1), ("-1m", -60)],
)
def test_times_to_stay_loaded(given: str | int, seconds: float) -> None:
    assert parse_keep_alive(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", "5mm", "1e3", True, None, "9" * 80, [5]])
def test_what_is_no_time_to_stay_loaded(given: object) -> None:
    with pytest.raises(UsageError):
        parse_keep_alive(given)
