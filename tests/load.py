"""Load: many clients of all three APIs at once, of which half leave in the middle of their answers.

    python -m tests.load [MODEL] [--requests 2000] [--clients 32] [--parallel 8] [--tokens 32]

Starts the server as a program of its own, asks each question once without company, and then lets the clients
ask them all at once, with the `openai`, `anthropic` and `ollama` packages, whole and streamed. Every answer
must be the one that was given without company. Then the server must hold no more descriptors and threads than
before, and hardly more memory. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anthropic
import ollama
import openai
import psutil

from edgespec.models.hub import catalog
from tests.serving import Running, started
from tests.waiting import PATIENCE_S, wait_until

_QUESTIONS = 24
_WARM = 0.1  # of the requests, after which memory is measured for the first time
_MAX_GROWTH = 32 << 20  # bytes over a run


class Client(Protocol):
    """A client of one API."""

    def ask(self, question: str, tokens: int) -> str:
        """A whole answer."""

    def stream(self, question: str, tokens: int) -> Iterator[str]:
        """The pieces of an answer; closing the iterator leaves."""

    def close(self) -> None:
        """Close its connections."""


class OpenAI:
    def __init__(self, address: str) -> None:
        self._client = openai.OpenAI(
            base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    def _create(self, question: str, tokens: int, **more: Any) -> Any:
        create: Any = self._client.chat.completions.create
        return create(model="load", messages=_asked(question), max_tokens=tokens, **more)

    def ask(self, question: str, tokens: int) -> str:
        return str(self._create(question, tokens).choices[0].message.content)

    def stream(self, question: str, tokens: int) -> Iterator[str]:
        with self._create(question, tokens, stream=True) as events:
            yield ""
            for event in events:
                yield event.choices[0].delta.content or ""

    def close(self) -> None:
        self._client.close()


class Anthropic:
    def __init__(self, address: str) -> None:
        self._client = anthropic.Anthropic(
            base_url=address, api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    def _asked(self, question: str, tokens: int) -> Any:
        return {"model": "load", "messages": _asked(question), "max_tokens": tokens}

    def ask(self, question: str, tokens: int) -> str:
        answer = self._client.messages.create(**self._asked(question, tokens))
        return "".join(block.text for block in answer.content)

    def stream(self, question: str, tokens: int) -> Iterator[str]:
        with self._client.messages.stream(**self._asked(question, tokens)) as stream:
            yield ""
            yield from stream.text_stream

    def close(self) -> None:
        self._client.close()


class Ollama:
    def __init__(self, address: str) -> None:
        self._client = ollama.Client(address, timeout=PATIENCE_S)

    def _chat(self, question: str, tokens: int, *, stream: bool) -> Any:
        chat: Any = self._client.chat
        return chat("load", _asked(question), stream=stream, options={"num_predict": tokens})

    def ask(self, question: str, tokens: int) -> str:
        return str(self._chat(question, tokens, stream=False).message.content)

    def stream(self, question: str, tokens: int) -> Iterator[str]:
        lines = self._chat(question, tokens, stream=True)
        try:
            for line in lines:
                yield line.message.content or ""
        finally:
            lines.close()

    def close(self) -> None:
        self._client.close()


_APIS = (OpenAI, Anthropic, Ollama)


def _asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@dataclass(frozen=True)
class Held:
    """Resources of the idle server."""

    memory: int
    descriptors: int
    threads: int


@dataclass
class Report:
    """Outcomes of the requests.

    Attributes:
        problems: answers that were lost or wrong, and what else went wrong.
        outcomes: requests by what the client did: "whole", "streamed" or "left".
        warm, end: what the server held after the first requests, and in the end.
        counted: the server's own count of requests, by their outcome.
        seconds: of the whole run.
    """

    problems: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    warm: Held = Held(0, 0, 0)
    end: Held = Held(0, 0, 0)
    counted: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def judge(self, requests: int) -> None:
        """Add what is wrong with the figures."""
        if sum(self.outcomes.values()) != requests:
            self.problems.append(f"{requests} requests were made, and {sum(self.outcomes.values())} ended")
        for outcome in ("refused", "turned_away", "failed"):
            if self.counted[outcome]:
                self.problems.append(f"{self.counted[outcome]} requests were {outcome}")
        for name in ("descriptors", "threads"):
            before, after = getattr(self.warm, name), getattr(self.end, name)
            if after > before:
                self.problems.append(f"{name}: {before} became {after}")
        if self.end.memory - self.warm.memory > _MAX_GROWTH:
            self.problems.append(f"memory: {self.warm.memory} bytes became {self.end.memory}")

    def __str__(self) -> str:
        grown = (self.end.memory - self.warm.memory) / (1 << 20)
        lines = [
            f"{sum(self.outcomes.values())} requests in {self.seconds:.0f} s: {dict(self.outcomes)}",
            f"the server counted {self.counted}",
            f"memory {self.warm.memory >> 20} MiB when warm, {grown:+.1f} MiB since; descriptors "
            f"{self.warm.descriptors} and {self.end.descriptors}, threads {self.warm.threads} and "
            f"{self.end.threads}",
        ]
        return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in self.problems)])


def questions() -> list[str]:
    """Questions of several lengths; some begin alike."""
    chance = random.Random(0)
    return [
        "Listen. " * chance.choice([0, 3, 40]) + f"Name a thing that fits the number {number}."
        for number in range(_QUESTIONS)
    ]


def load_test(
    model: Path | str, *, requests: int, clients: int, parallel: int = 8, tokens: int = 32
) -> Report:
    """Start a server, put it under load, and report."""
    report = Report()
    options = ["--draft", "none", "--exact", "--context", "512", "--alias", "load"]
    more = ["--parallel", parallel, "--queue", 2 * clients]
    with started(model, *options, *map(str, more)) as (server, program), ExitStack() as stack:
        address = f"http://127.0.0.1:{server.port}"
        process = psutil.Process(program.pid)
        drain = threading.Thread(target=collections.deque, args=(program.stderr, 0), daemon=True)
        drain.start()
        alone = OpenAI(address)
        expected = {question: alone.ask(question, tokens) for question in questions()}
        alone.close()
        users = [_APIS[number % len(_APIS)](address) for number in range(clients)]
        for user in users:
            stack.callback(user.close)
        first = max(round(_WARM * requests), min(clients, requests))
        begun = time.monotonic()
        _run(users, range(first), expected, tokens, report)
        report.warm = _held_when_idle(server, process)
        _run(users, range(first, requests), expected, tokens, report)
        report.end = _held_when_idle(server, process)
        report.seconds = time.monotonic() - begun
        wait_until(
            lambda: report.problems or sum(_counted(server).values()) >= requests + len(expected),
            lambda: (_counted(server), report.outcomes, report.problems),
        )
        report.counted = _counted(server)
    report.judge(requests)
    return report


def _counted(server: Running) -> dict[str, int]:
    """The server's own count of requests, by their outcome."""
    figures = server.figures()
    names = ("answered", "abandoned", "refused", "turned_away", "failed")
    return {name: round(figures.get(name, 0)) for name in names}


def _run(
    users: Sequence[Client], numbers: range, expected: dict[str, str], tokens: int, report: Report
) -> None:
    """Let the users ask until all requests were made."""
    left = iter(numbers)
    lock = threading.Lock()
    asked = list(expected)

    def work(user: Client) -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            question = asked[number * 7 % len(asked)]
            outcome, problem = _ask(user, question, expected[question], tokens, number)
            with lock:
                report.outcomes[outcome] += 1
                if problem:
                    report.problems.append(f"request {number} ({type(user).__name__}): {problem}")

    threads = [threading.Thread(target=work, args=(user,)) for user in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _ask(user: Client, question: str, expected: str, tokens: int, number: int) -> tuple[str, str]:
    """Make a request: every second one is left in the middle.

    Returns:
        What the client did, and what is wrong with the answer.
    """
    outcome = "left" if number % 2 else "streamed" if number % 4 else "whole"
    try:
        if outcome == "whole":
            found = user.ask(question, tokens)
        else:
            pieces = user.stream(question, tokens)
            stop = 1 + number // 2 % (tokens // 2) if outcome == "left" else None
            found = "".join(itertools.islice(pieces, stop))
            pieces.close()  # type: ignore[attr-defined]  # a generator
    except Exception as error:  # whatever it is, the answer is lost
        return outcome, f"{type(error).__name__}: {error}"
    fine = expected.startswith(found) if outcome == "left" else found == expected
    return outcome, "" if fine else f"{found!r} instead of {expected!r}"


def _held_when_idle(server: Running, process: psutil.Process) -> Held:
    """Resources of the server once all requests have ended, with the connections that clients keep."""
    wait_until(server.is_idle)
    lowest = None
    for _ in range(20):  # connections that clients have given up are closed in a moment
        now = Held(
            process.memory_info().rss, process.num_fds() - _connections(process), process.num_threads()
        )
        if lowest is None or now.descriptors < lowest.descriptors:
            lowest = now
        time.sleep(0.05)
    assert lowest is not None
    return lowest


def _connections(process: psutil.Process) -> int:
    """Connections that a client keeps open for its next request."""
    return sum(c.status == psutil.CONN_ESTABLISHED for c in process.net_connections("tcp"))


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default=catalog.DEFAULT)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    asked = parser.parse_args()
    report = load_test(
        asked.model,
        requests=asked.requests,
        clients=asked.clients,
        parallel=asked.parallel,
        tokens=asked.tokens,
    )
    print(report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
