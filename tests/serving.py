"""Servers for tests: in this process with limits of its own, and as the program that people start."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

import edgespec
from edgespec.api.limits import Limits
from edgespec.cli.options.sampling import SamplingOptions
from edgespec.config import Config
from edgespec.engine.embedder import Embedder
from edgespec.engine.engine import Engine
from edgespec.serving.app import Application
from edgespec.serving.completion_handler import CompletionHandler
from edgespec.serving.embeddings import EmbeddingHandler, EmbeddingWorker, ServedEmbedder
from edgespec.serving.engine_worker import EngineWorker
from edgespec.serving.request_log import RequestLogEntry
from edgespec.serving.served_model import ServedModel
from edgespec.serving.server import Server
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    import anthropic
    import ollama
    import openai

CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@dataclass
class Running:
    """A server that runs.

    Attributes:
        told: what it said to the person who started it.
    """

    port: int
    told: list[str] = field(default_factory=list)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("GET", path)
        answer = connection.getresponse()
        status, body = answer.status, json.loads(answer.read())
        connection.close()
        return status, body

    def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and JSON of an answer; `body` is bytes, or sent as JSON."""
        with self.connect() as client:
            client.send(path, body)
            return client.answer()

    def text(self, prompt: str = "Once upon a time", **more: object) -> str:
        """The text that an ordinary client gets."""
        status, answer = self.post(TEXT, {"prompt": prompt, "max_tokens": 8, **more})
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def is_idle(self) -> bool:
        """True if no answer waits or is under way."""
        figures = self.figures()
        return not figures["edgespec_queue_length"] and not figures["edgespec_sequences_in_flight"]

    def figures(self) -> dict[str, float]:
        """Values of /metrics by name; requests by their outcome."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == 200
        page = answer.read().decode()
        connection.close()
        return {
            sample.labels.get("outcome", sample.name): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    def openai(self, key: str = "none") -> openai.OpenAI:
        """The OpenAI client."""
        import openai

        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE_S)

    def anthropic(self, key: str = "none") -> anthropic.Anthropic:
        """The Anthropic client."""
        import anthropic

        url = f"http://127.0.0.1:{self.port}"
        return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE_S)

    def ollama(self) -> ollama.Client:
        """Ollama's client."""
        import ollama

        return ollama.Client(f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S)

    def connect(self) -> Client:
        """A client whose every byte the test decides."""
        return Client(socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S))


class Client:
    """A connection to a server."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, path: str, body: object) -> None:
        """Send a whole request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.begin(path, len(data))
        self.socket.sendall(data)

    def begin(self, path: str, length: int) -> None:
        """Send the head of a request whose body has this many bytes."""
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())

    def answer(self) -> tuple[int, Any]:
        """Status and JSON of the answer; interim ones are skipped, as every client does."""
        answer = http.client.HTTPResponse(self.socket)
        answer.begin()
        return answer.status, json.loads(answer.read())

    def is_closed(self) -> bool:
        """Wait for the server to end the connection, reading what it still sends."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True


@contextmanager
def serving(
    load: Callable[[], Engine],
    limits: Limits | None = None,
    *,
    waiting: int = 16,
    parallel: int = 1,
    aliases: Sequence[str] = (),
    on_request: Callable[[RequestLogEntry], None] | None = None,
    system: str | None = None,
    api_key: str | None = None,
    recommended: bool = False,
    **defaults: Any,
) -> Iterator[Running]:
    """A server in this process.

    Args:
        load: loads the model, the first time and again after a failure.
        waiting: requests that may wait.
        parallel: answers at once.
        aliases: other names of the model.
        on_request: called when a request is done.
        system: the system prompt of conversations that have none.
        api_key: what clients must send.
        recommended: what requests leave open is as the model's maker recommends.
        defaults: settings that requests leave open.
    """
    limits = limits or Limits()

    def served() -> ServedModel:
        engine = load()
        sampling = SamplingOptions(sampling="recommended" if recommended else "greedy")
        chosen = sampling.chosen_for(Config(), engine.target.model.path, default="greedy")
        return ServedModel(engine, chosen.config.with_(**defaults))

    told: list[str] = []
    worker = EngineWorker(served(), waiting, lambda _report: served(), told.append, parallel=parallel)
    handler = CompletionHandler(
        worker, "model", limits, aliases=aliases, on_request=on_request, system=system
    )
    with _answering(handler, limits, api_key, told) as running:
        yield running


@contextmanager
def serving_embeddings(
    load: Callable[[], Embedder],
    *,
    aliases: Sequence[str] = (),
    on_request: Callable[[RequestLogEntry], None] | None = None,
) -> Iterator[Running]:
    """A server of an embedding model in this process; see `serving`."""
    told: list[str] = []
    worker = EmbeddingWorker(
        ServedEmbedder(load()), 16, lambda _report: ServedEmbedder(load()), told.append, parallel=8
    )
    handler = EmbeddingHandler(worker, "model", Limits(), aliases=aliases, on_request=on_request)
    with _answering(handler, Limits(), None, told) as running:
        yield running


@contextmanager
def _answering(
    handler: CompletionHandler | EmbeddingHandler, limits: Limits, api_key: str | None, told: list[str]
) -> Iterator[Running]:
    """A server in a thread, with a handler whose worker is closed in the end."""
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        server = Server(Application(handler, api_key=api_key), limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Running(listener.getsockname()[1], told)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    finally:
        handler.worker.close()


@contextmanager
def started(*arguments: str | Path) -> Iterator[tuple[Running, subprocess.Popen[str]]]:
    """The program; it is killed in the end if it still runs."""
    fixed = ["--port", "0", "--sampling", "greedy"]
    command = [sys.executable, "-m", "edgespec", "serve", *fixed, *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        said = []
        match = None
        for line in program.stderr:  # warnings come first, and on a slow machine what is waited for
            said.append(line)
            match = re.fullmatch(
                r"Serving .+ at http://127\.0\.0\.1:(\d+)/v1; chat at \S+\. Ctrl-C ends it\.\n", line
            )
            if match is not None:
                break
        try:
            assert match, "".join(said)
            second = program.stderr.readline()
            assert second.startswith("Base URLs: "), second
            yield Running(int(match[1]), [said[-1], second]), program
        finally:
            program.kill()


def free_port() -> int:
    """A port that nobody listens on now, for programs that must be told one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def end_of(program: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a program that was told to end, and what it said since its first line."""
    assert program.stderr is not None
    # Not by `communicate`, which does not see what was read ahead together with the first line.
    told = program.stderr.read()
    return program.wait(PATIENCE_S), told


def load(model: Path, context: int = 256, **more: Any) -> Engine:
    """A model that answers the same whatever was asked before."""
    return edgespec.load(model, **{"draft": "none", "context": context, "threads": 1, "exact": True, **more})
