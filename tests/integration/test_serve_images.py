"""Images in requests to a server, with a tiny model that sees and the real clients of its APIs."""

from __future__ import annotations

import base64
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

import edgespec
from edgespec.api.limits import Limits
from edgespec.base.progress import report_waiting
from edgespec.engine.engine import Engine
from edgespec.errors import EdgeSpecError
from edgespec.llama.projector import NoImageLibrary, load_library
from edgespec.processes.trial import Verdict, attempt_in_child
from tests.links import put
from tests.serving import CHAT, RESPONSE, Running, serving
from tests.tiny_images import ROWS, png, png_of, write_seeing
from tests.waiting import PATIENCE_S, wait_until

PICTURE, ANOTHER = png(), png(seed=2)
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
HUGE = png_of(
    (b"IHDR", struct.pack(">IIBBBBB", 32_768, 21_845, 8, 2, 0, 0, 0)), (b"IEND", b"")
)  # 2 GiB of pixels
TEXT = "one two one two one two one"
MANY = 24  # tokens of an answer
MESSAGES = "/v1/messages"


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


pytestmark = pytest.mark.usefixtures("images_read_once")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, smol_path: Path) -> Path:
    try:
        load_library()
    except NoImageLibrary as missing:
        pytest.skip(f"llama.cpp was compiled without images: {missing}")
    return write_seeing(tmp_path_factory.mktemp("seeing"), "idefics3", smol_path, damped=0.3)


def opened(path: Path) -> Engine:
    return edgespec.load(path, draft="lookup", tree_budget=8, context=512, threads=1, exact=True)


@pytest.fixture(scope="module")
def server(seeing: Path) -> Iterator[Running]:
    with serving(lambda: opened(seeing), Limits(images=3), parallel=4, max_tokens=MANY) as server:
        yield server


@pytest.fixture(scope="module")
def direct(seeing: Path) -> Iterator[Engine]:
    """The same model in the library."""
    with opened(seeing) as engine:
        yield engine


def messages_with(*images: bytes, text: str = TEXT, role: str = "user") -> list[dict[str, Any]]:
    """As the library takes them."""
    parts: list[dict[str, Any]] = [{"type": "image", "data": data} for data in images]
    return [{"role": role, "content": [*parts, {"type": "text", "text": text}]}]


def answered(engine: Engine, messages: Any) -> tuple[str, int]:
    answer = engine.generate(messages, edgespec.GenerationConfig(max_tokens=MANY))
    return answer.text, answer.prompt_tokens


# What each client sends


def by_chat(server: Running, url: str, *, plain: bool = False) -> tuple[str, int]:
    part = {"type": "image_url", "image_url": url if plain else {"url": url, "detail": "low"}}
    content: Any = [part, {"type": "text", "text": TEXT}]
    with server.openai() as client:
        answer = client.chat.completions.create(
            model="model", messages=[{"role": "user", "content": content}], timeout=PATIENCE_S
        )
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens


def by_response(server: Running, url: str) -> tuple[str, int]:
    content: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": TEXT}]
    with server.openai() as client:
        answer = client.responses.create(
            model="model", input=[{"role": "user", "content": content}], timeout=PATIENCE_S
        )
    assert answer.usage is not None
    return answer.output_text, answer.usage.input_tokens


def block(data: str) -> Any:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def by_message(server: Running, data: str) -> tuple[str, int]:
    content: Any = [block(data), {"type": "text", "text": TEXT}]
    with server.anthropic() as client:
        answer = client.messages.create(
            model="model", messages=[{"role": "user", "content": content}], max_tokens=MANY
        )
    (said,) = answer.content
    assert said.type == "text"
    return said.text, answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def by_ollama(server: Running, data: str, *, chat: bool = True) -> tuple[str, int]:
    with server.ollama() as client:
        if not chat:
            written = client.generate("model", TEXT, images=[data])
            return written.response, written.prompt_eval_count or 0
        answer = client.chat("model", [{"role": "user", "content": TEXT, "images": [data]}])
        return answer.message.content or "", answer.prompt_eval_count or 0


def test_all_apis_show_the_model_the_same_image(server: Running, direct: Engine) -> None:
    expected = answered(direct, messages_with(PICTURE))
    assert expected[0] != answered(direct, messages_with(ANOTHER))[0]  # it sees
    url, data = data_url(PICTURE), encoded(PICTURE)
    assert by_chat(server, url) == expected
    assert by_chat(server, url, plain=True) == expected
    assert by_response(server, url) == expected
    assert by_message(server, data) == expected
    assert by_ollama(server, data) == expected
    assert by_ollama(server, data, chat=False) == expected


def test_streams_and_several_images(server: Running, direct: Engine) -> None:
    expected, n_tokens = answered(direct, messages_with(PICTURE, ANOTHER))
    content: Any = [{"type": "image_url", "image_url": {"url": data_url(d)}} for d in (PICTURE, ANOTHER)]
    asked: Any = [{"role": "user", "content": [*content, {"type": "text", "text": TEXT}]}]
    with server.openai() as client:
        options: Any = {"include_usage": True}
        stream = client.chat.completions.create(
            model="model", messages=asked, stream=True, stream_options=options
        )
        chunks = list(stream)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == expected
    assert [chunk.usage.prompt_tokens for chunk in chunks if chunk.usage] == [n_tokens]


def test_results_of_tools_have_images(server: Running, direct: Engine) -> None:
    image = len(direct.encoder.images.read(PICTURE, "it"))  # type: ignore[union-attr]
    call: Any = {"type": "tool_use", "id": "a", "name": "look", "input": {}}

    def counted(*content: Any) -> int:
        result = {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": [*content]}
        told: Any = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        with server.anthropic() as client:
            return client.messages.count_tokens(model="model", messages=told).input_tokens

    text = {"type": "text", "text": TEXT}
    assert abs(counted(block(encoded(PICTURE)), text) - counted(text) - image) < 4  # and a line's end

    def responded(*output: Any) -> int:
        items = [
            {"role": "user", "content": "Look."},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [*output]},
        ]
        status, answer = server.post(RESPONSE, {"input": items})
        assert status == 200, answer
        return int(answer["usage"]["input_tokens"])

    said = {"type": "input_text", "text": TEXT}
    shown = {"type": "input_image", "image_url": data_url(PICTURE)}
    assert responded(shown, said) == responded(said) + image


def test_tokens_are_counted_with_images(server: Running, direct: Engine) -> None:
    tokens = direct.encoder.encode(messages_with(PICTURE))
    content = [{"type": "image_url", "image_url": data_url(PICTURE)}, {"type": "text", "text": TEXT}]
    asked = {"messages": [{"role": "user", "content": content}]}
    status, counted = server.post("/tokenize", {**asked, "return_token_strs": True})
    assert (status, counted["tokens"]) == (200, tokens)
    assert sum(token < 0 for token in counted["tokens"]) == 3 * ROWS  # it is wide: two halves


def test_a_conversation_goes_on_with_its_image(server: Running) -> None:
    url = data_url(ANOTHER)
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "a b c"}]
    asked = {"role": "user", "content": content}
    _, first = server.post(RESPONSE, {"input": [asked]})
    said = first["output"][0]["content"][0]["text"]
    _, second = server.post(RESPONSE, {"input": "d e f", "previous_response_id": first["id"]})
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > first["usage"]["input_tokens"]
    told = [asked, {"role": "assistant", "content": said}, {"role": "user", "content": "d e f"}]
    _, whole = server.post(CHAT, {"messages": told})
    assert whole["choices"][0]["message"]["content"] == second["output"][0]["content"][0]["text"]
    assert whole["usage"]["prompt_tokens"] == second["usage"]["input_tokens"]
    told[0] = {
        "role": "user",
        "content": [*content[1:], {"type": "input_image", "image_url": data_url(PICTURE)}],
    }
    _, other = server.post(CHAT, {"messages": told})  # another image, so it is another conversation
    assert other["choices"][0]["message"]["content"] != whole["choices"][0]["message"]["content"]


# What is refused


DAMAGED = {
    "an address": ("https://example.com/a.png", "not fetched"),
    "a file": ("file:///etc/passwd", "not fetched"),
    "nothing": ("", "has no data"),
    "no Base64": ("data:image/png,abc", "is not in Base64"),
    "wrong Base64": ("data:image/png;base64,a*b=", "Base64 cannot be decoded"),
    "truncated": (data_url(PICTURE[:100]), "is damaged or incomplete"),
    "a vector graphic": (data_url(SVG), "is not an image that can be read"),
    "two gigabytes": (data_url(HUGE), "has 32768 x 21845 pixels"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_cannot_be_read_is_refused_in_the_form_of_each_api(server: Running, case: str) -> None:
    url, said = DAMAGED[case]
    for ask in (by_chat, by_response):
        with pytest.raises(openai.BadRequestError, match=said) as by_openai:
            ask(server, url)
        assert by_openai.value.type == "invalid_request_error"
        if said in ("not fetched", "has no data"):
            assert "Send it as a data URL in Base64." in by_openai.value.message
    source = block(url.partition(",")[2])["source"] if "," in url else {"type": "url", "url": url}
    content = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    status, answer = server.post(
        MESSAGES, {"messages": [{"role": "user", "content": content}], "max_tokens": 9}
    )
    if case != "no Base64":  # this API has no data URLs, so what they lack is added
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
        assert said in answer["error"]["message"]
    told = [{"role": "user", "content": TEXT, "images": [url]}]
    if url.startswith("data:") or not url:
        status, answer = server.post("/api/chat", {"messages": told})
        assert status == 400
        assert said in answer["error"]


def test_ollamas_images_are_base64_and_nothing_else(server: Running) -> None:
    for image in ("https://example.com/a.png", 7, None, {"a": 1}):
        status, answer = server.post("/api/chat", {"messages": [{"role": "user", "images": [image]}]})
        assert (status, list(answer)) == (400, ["error"])
        assert answer["error"].startswith("Image 1 ")
        assert answer["error"].endswith(' Send its data in Base64, in "images".')
    status, answer = server.post("/api/generate", {"prompt": "a", "images": "b"})
    assert (status, answer["error"]) == (400, "images must be a list, not 'b'.")
    image = base64.b64encode(PICTURE).decode()
    for more in ({"raw": True}, {"suffix": "end"}):
        status, answer = server.post("/api/generate", {"prompt": "a", "images": [image], **more})
        assert status == 400
        assert answer["error"].startswith("Images are shown in conversations only")


def test_anthropics_images_are_base64_sources(server: Running) -> None:
    for source in ({"type": "url", "url": "https://example.com/a.png"}, {"type": "file", "file_id": "f"}, {}):
        content = [{"type": "image", "source": source}]
        status, answer = server.post(
            MESSAGES, {"messages": [{"role": "user", "content": content}], "max_tokens": 9}
        )
        assert status == 400
        assert answer["error"]["message"].endswith('a "source" of the type "base64" with its "data".')


def test_files_of_the_server_are_not_read(server: Running, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(PICTURE)
    for part in ({"type": "image", "path": str(picture)}, {"type": "image_url", "image_url": str(picture)}):
        status, answer = server.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
        assert status == 400, answer


def test_there_may_be_only_so_many(server: Running) -> None:
    content = [{"type": "image_url", "image_url": data_url(PICTURE)}] * 4
    status, answer = server.post(CHAT, {"messages": [{"role": "user", "content": content}]})
    assert (status, answer["error"]["message"]) == (400, "There are more than 3 images in the request.")


def test_an_image_may_be_larger_than_a_text() -> None:
    assert Limits().body > 4 * (20 << 20) // 3


# Beside others


def is_done(ask: Callable[[], object]) -> bool:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(ask).result(PATIENCE_S)
    return True


def test_others_are_answered_while_an_image_is_read(
    server: Running, direct: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_chat(server, data_url(PICTURE))  # which is known from now on
    begun, may_read = threading.Event(), threading.Event()

    def late(module: str, *arguments: Any, **more: Any) -> Verdict:
        begun.set()
        assert may_read.wait(PATIENCE_S)
        return attempt_in_child(module, *arguments, **more)

    monkeypatch.setattr("edgespec.images.reader.attempt_in_child", late)
    new = [png(seed=seed) for seed in (11, 12, 13)]  # more than there are threads that prepare requests
    with ThreadPoolExecutor(3) as clients:
        waiting = [clients.submit(by_chat, server, data_url(data)) for data in new]
        assert begun.wait(PATIENCE_S)
        assert server.text()
        by_chat(server, data_url(PICTURE))
        assert not any(answer.done() for answer in waiting)
        may_read.set()
        found = [answer.result(PATIENCE_S) for answer in waiting]
    assert found == [answered(direct, messages_with(data)) for data in new]


def test_an_image_is_not_read_for_a_client_that_left(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def endless(*_arguments: Any, **_more: Any) -> Verdict:
        begun.set()
        try:
            while True:  # as waiting for a child process does
                report_waiting("An image", 1.0)
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr("edgespec.images.reader.attempt_in_child", endless)
    content = [{"type": "image_url", "image_url": data_url(png(seed=21))}]
    with server.connect() as client:
        client.send(CHAT, {"messages": [{"role": "user", "content": content}]})
        assert begun.wait(PATIENCE_S)
    assert ended.wait(PATIENCE_S)
    monkeypatch.undo()
    assert server.text()


def test_a_model_that_fails_does_not_wait_for_an_image(seeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def endless(*_arguments: Any, **_more: Any) -> Verdict:
        begun.set()
        while True:
            report_waiting("An image", 1.0)
            time.sleep(0.01)

    engines: list[Engine] = []

    def load() -> Engine:
        engines.append(opened(seeing))
        return engines[-1]

    with serving(load, max_tokens=4) as server, ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr("edgespec.images.reader.attempt_in_child", endless)
        content = [{"type": "image_url", "image_url": data_url(PICTURE)}]
        asked = {"messages": [{"role": "user", "content": content}]}
        image = thread.submit(server.post, CHAT, asked)
        assert begun.wait(PATIENCE_S)

        def fail(*_: object) -> None:
            raise EdgeSpecError("The disk failed.")

        monkeypatch.setattr(engines[0].target, "verify", fail)
        assert server.post("/v1/completions", {"prompt": "a"})[0] == 500
        status, answer = image.result(PATIENCE_S)
        assert (status, answer["error"]["code"]) == (503, "model_unavailable")
        wait_until(lambda: len(engines) == 2 and server.post("/v1/completions", {"prompt": "a"})[0] == 200)


# What clients are told of the model


def test_models_say_whether_they_see(server: Running, seeing: Path, tmp_path: Path) -> None:
    def told(running: Running) -> tuple[bool, list[str]]:
        with running.ollama() as client:
            vision = "vision" in (client.show("model").capabilities or ())
        (model,) = running.get("/v1/models")[1]["data"]
        assert running.get("/v1/models/model")[1] == model
        return vision, model["architecture"]["input_modalities"]

    assert told(server) == (True, ["text", "image"])
    blind = tmp_path / "blind.gguf"
    put(seeing, blind)
    with serving(lambda: opened(blind), max_tokens=4) as running:
        assert told(running) == (False, ["text"])
        content = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
        status, answer = running.post(CHAT, {"messages": [{"role": "user", "content": content}]})
        assert status == 200
        assert answer["warnings"] == ["An image was replaced by a note. This model reads text only."]
        assert by_ollama(running, encoded(PICTURE))[0]
