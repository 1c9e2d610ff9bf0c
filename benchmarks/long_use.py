"""The memory of a server that many clients use for long, in all the ways that they do.

    python -m benchmarks.long_use MODEL.gguf [--requests 2000] [--kinds tools schemas] [--apart]

`edgespec serve` runs as a program of its own. A few clients send requests of all kinds: texts, chats, tools
and schemas that differ every time, grammars, streams, streams that are left in the middle, long prompts,
several answers, wrong requests. Every 100 requests, when the server is idle, its memory is read from
/proc/PID/smaps_rollup (Linux). No two requests are alike. `--apart` gives each kind a server of its own,
which shows the kind that makes memory grow.

`--serve` takes options of the server, such as `--serve "--context 8192"`. The prompt cache is off unless they
say otherwise.
"""

from __future__ import annotations

import collections
import http.client
import json
import random
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import parser_of, print_head
from tests.serving import CHAT, RESPONSE, TEXT, Running, started
from tests.waiting import PATIENCE_S, wait_until

MESSAGES, OLLAMA = "/v1/messages", "/api/chat"
_WORDS = ("river", "stone", "lantern", "copper", "window", "garden", "silver", "mountain", "engine", "paper")
_TYPES: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "string", "maxLength": 20},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    {"enum": ["red", "green", "blue"]},
)


@dataclass(frozen=True)
class Asked:
    """A request, the status of its answer, and after how many bytes of it the client leaves, if it does."""

    path: str
    body: Any
    status: int = 200
    leaves: int | None = None


class Requests:
    """Makes requests of each kind; no two are alike.

    Args:
        tokens: most tokens of an answer.
        longest: words of the longest prompt.
    """

    def __init__(self, tokens: int = 12, longest: int = 1500) -> None:
        self._tokens = tokens
        self._longest = longest

    def __call__(self, kind: str, number: int) -> Asked:
        """The request of a kind with this number."""
        chance = random.Random(f"{kind} {number}")
        return KINDS[kind](self, chance)

    def text(self, chance: random.Random) -> Asked:
        return self._asked({"prompt": _words(chance, 20)}, TEXT)

    def chat(self, chance: random.Random) -> Asked:
        return self._asked({"messages": _said(chance, chance.choice([1, 3, 5]))})

    def sampled(self, chance: random.Random) -> Asked:
        sampling = {"temperature": 1, "seed": chance.randrange(1 << 30), "frequency_penalty": 0.5}
        bias = {str(chance.randrange(1000)): chance.randrange(-5, 5) for _ in range(3)}
        return self._asked({"messages": _said(chance), "logit_bias": bias, **sampling})

    def tools(self, chance: random.Random) -> Asked:
        offered = [{"type": "function", "function": _function(chance)} for _ in range(chance.randint(1, 8))]
        body = {"messages": _said(chance), "tools": offered}
        return self._asked(body | {"tool_choice": chance.choice(["auto", "required"])})

    def schemas(self, chance: random.Random) -> Asked:
        form = {"name": _name(chance), "schema": _schema(chance, chance.randint(1, 12))}
        return self._asked(
            {"messages": _said(chance), "response_format": {"type": "json_schema", "json_schema": form}}
        )

    def large_schemas(self, chance: random.Random) -> Asked:
        """So large that a child process compiles them first."""
        schema = _schema(chance, 150, about=25)
        return self._asked({"messages": _said(chance), "json_schema": schema})

    def grammars(self, chance: random.Random) -> Asked:
        choices = " | ".join(f'"{_words(chance, 3)}"' for _ in range(20))
        return self._asked({"prompt": _words(chance, 10), "grammar": f"root ::= ({choices}) root?"}, TEXT)

    def streams(self, chance: random.Random) -> Asked:
        return self._asked({"messages": _said(chance), "stream": True})

    def left(self, chance: random.Random) -> Asked:
        """The client leaves in the middle of a long answer."""
        body = {"messages": _said(chance), "stream": True, "max_tokens": 500, "model": "any"}
        return Asked(CHAT, body, leaves=chance.choice([0, 100, 1000]))

    def long(self, chance: random.Random) -> Asked:
        words = chance.randint(self._longest // 4, self._longest)
        return self._asked({"messages": [{"role": "user", "content": _words(chance, words)}]})

    def agents(self, chance: random.Random) -> Asked:
        """A coding agent's first question: long instructions, many tools; some leave before the answer."""
        words = chance.randint(self._longest // 2, self._longest)
        offered = [{"type": "function", "function": _function(chance, about=50)} for _ in range(20)]
        messages = [{"role": "system", "content": _words(chance, words)}, *_said(chance)]
        asked = self._asked({"messages": messages, "tools": offered, "stream": True})
        return replace(asked, leaves=0) if chance.random() < 0.3 else asked

    def logprobs(self, chance: random.Random) -> Asked:
        return self._asked({"prompt": _words(chance, 60), "logprobs": 5, "echo": True}, TEXT)

    def choices(self, chance: random.Random) -> Asked:
        return self._asked({"messages": _said(chance), "n": 3, "temperature": 1})

    def anthropic(self, chance: random.Random) -> Asked:
        function = _function(chance)
        schema = function.pop("parameters")
        return self._asked(
            {"messages": _said(chance), "tools": [function | {"input_schema": schema}]}, MESSAGES
        )

    def responses(self, chance: random.Random) -> Asked:
        tool = {"type": "function", **_function(chance)}
        body = {"input": _words(chance, 20), "tools": [tool], "max_output_tokens": self._tokens}
        return Asked(RESPONSE, {"model": "any", **body})

    def ollama(self, chance: random.Random) -> Asked:
        body = {"messages": _said(chance), "format": _schema(chance, 3), "stream": False}
        return Asked(OLLAMA, {"model": "any", **body, "options": {"num_predict": self._tokens}})

    def refused(self, chance: random.Random) -> Asked:
        """Embeddings of a model that makes none, paths that do not exist, what has no meaning."""
        return chance.choice(
            [
                Asked("/v1/embeddings", {"input": _words(chance, 5), "model": "any"}, 404),
                Asked(f"/v1/{_name(chance)}", {}, 404),
                Asked(CHAT, {"messages": _name(chance), "model": "any"}, 400),
                Asked(TEXT, {"prompt": _words(chance, 20_000), "model": "any"}, 400),
                Asked(TEXT, {"prompt": "a", "grammar": f"root ::= {_name(chance)}", "model": "any"}, 400),
                Asked(CHAT, {"messages": _said(chance), "temperature": _name(chance)}, 400),
            ]
        )

    def _asked(self, body: dict[str, Any], path: str = CHAT) -> Asked:
        return Asked(path, {"model": "any", "max_tokens": self._tokens, **body})


KINDS: dict[str, Callable[[Requests, random.Random], Asked]] = {
    name: making for name, making in vars(Requests).items() if callable(making) and not name.startswith("_")
}


@dataclass(frozen=True)
class Held:
    """Memory of an idle server, in bytes.

    Attributes:
        rss: of the server.
        anonymous: of that, what is no file's.
        pss: what it takes from the machine: its share of what others hold too.
        children: of the processes that it started.
        threads: how many it has.
    """

    requests: int
    rss: int
    anonymous: int
    pss: int
    children: int
    threads: int


@dataclass
class Use:
    """What clients did with a server.

    Attributes:
        held: its memory, before the first request and every so many requests.
        statuses: answers by their status; 0 if the client left.
        problems: answers of another status than expected.
    """

    held: list[Held] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def used(
    model: Path | str,
    kinds: Sequence[str],
    *,
    requests: int,
    every: int = 100,
    clients: int = 4,
    tokens: int = 12,
    longest: int = 1500,
    options: Sequence[str] = (),
    on_held: Callable[[Held], None] = lambda held: None,
) -> Use:
    """Start a server, let clients use it, and measure its memory.

    Args:
        every: requests between two measurements.
        on_held: called with each measurement.
    """
    use = Use()
    make = Requests(tokens, longest)
    given = ["--draft", "none", "--alias", "any", "--no-prompt-cache", *options]
    with started(model, *given) as (server, program):
        threading.Thread(target=collections.deque, args=(program.stderr, 0), daemon=True).start()
        process = psutil.Process(program.pid)

        def measure(done: int) -> None:
            use.held.append(_held_when_idle(server, process, done))
            on_held(use.held[-1])

        begun = time.monotonic()
        measure(0)
        numbers = iter(_mixed(kinds, requests))
        for done in range(0, requests, every):
            _ask_all(server, islice(numbers, every), make, clients, use)
            measure(min(done + every, requests))
        use.seconds = time.monotonic() - begun
    return use


def _mixed(kinds: Sequence[str], requests: int) -> Iterator[tuple[str, int]]:
    """Kinds in a mixed order that is the same in every run, each with a number."""
    chance = random.Random(0)
    for number in range(requests):
        if number % len(kinds) == 0:
            round_of_kinds = chance.sample(list(kinds), len(kinds))
        yield round_of_kinds[number % len(kinds)], number


def _ask_all(
    server: Running, asked: Iterator[tuple[str, int]], make: Requests, clients: int, use: Use
) -> None:
    """Let clients send all requests, each its next one when the one before is answered."""
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                kind, number = next(asked, ("", 0))
            if not kind:
                return
            request = make(kind, number)
            try:
                status, answer = _ask(server, request)
            except OSError as error:
                status, answer = -1, str(error)
            with lock:
                use.statuses[status] += 1
                if status not in (request.status, 0):
                    use.problems.append(f"{kind} {number}: {status} {answer[:300]}")

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _ask(server: Running, asked: Asked) -> tuple[int, str]:
    """Status and text of an answer; status 0 if the client left before its end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", asked.path, json.dumps(asked.body), headers)
        answer = connection.getresponse()
        if asked.leaves is not None:
            answer.read(asked.leaves)
            return 0, ""
        return answer.status, answer.read().decode("utf-8", "replace")
    finally:
        connection.close()


def _held_when_idle(server: Running, process: psutil.Process, requests: int) -> Held:
    wait_until(server.is_idle)
    time.sleep(1.5)  # what a server does when it is idle
    rows = _rollup(process.pid)
    children = sum(_rollup(child.pid).get("Pss", 0) for child in process.children(recursive=True))
    return Held(requests, rows["Rss"], rows["Anonymous"], rows["Pss"], children, process.num_threads())


def _rollup(pid: int) -> dict[str, int]:
    """The rows of smaps_rollup, in bytes; empty if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}


def _words(chance: random.Random, count: int) -> str:
    return " ".join(
        f"{chance.choice(_WORDS)}{chance.choice(['', chance.randrange(99)])}" for _ in range(count)
    )


def _name(chance: random.Random) -> str:
    return f"{chance.choice(_WORDS)}_{chance.choice(_WORDS)}_{chance.randrange(10**6)}"


def _said(chance: random.Random, messages: int = 1) -> list[dict[str, str]]:
    roles = ["user" if index % 2 == 0 else "assistant" for index in range(messages)]
    return [{"role": role, "content": _words(chance, chance.randint(5, 30))} for role in roles]


def _schema(chance: random.Random, count: int, about: int = 0) -> dict[str, Any]:
    """A schema of an object; `about` words describe each of its values."""
    properties = {_name(chance): {**chance.choice(_TYPES)} for _ in range(count)}
    if about:
        for value in properties.values():
            value["description"] = _words(chance, about)
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:2],
        "additionalProperties": False,
    }


def _function(chance: random.Random, about: int = 8) -> dict[str, Any]:
    """A tool that so many words describe."""
    schema = _schema(chance, chance.randint(1, 5))
    return {"name": _name(chance), "description": _words(chance, about), "parameters": schema}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=12, help="most tokens of most answers")
    parser.add_argument("--longest", type=int, default=1500, help="words of the longest prompts")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--apart", action="store_true", help="a server for each kind alone")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="further options of the server")
    asked = parser.parse_args()
    for kinds in [[kind] for kind in asked.kinds] if asked.apart else [asked.kinds]:
        print(f"\n{', '.join(kinds)}\n")
        print_head("requests", "RSS", "anonymous", "PSS", "children", "threads")
        use = used(
            asked.model,
            kinds,
            requests=asked.requests,
            every=asked.every,
            clients=asked.clients,
            tokens=asked.tokens,
            longest=asked.longest,
            options=shlex.split(asked.serve),
            on_held=_show,
        )
        print(f"\n{use.seconds:.0f} s; answers by status: {dict(use.statuses)}")
        for problem in use.problems[:20]:
            print(f"PROBLEM: {problem}")


def _show(held: Held) -> None:
    sizes = (held.rss, held.anonymous, held.pss, held.children)
    row = [held.requests, *(f"{size / (1 << 20):.1f}" for size in sizes), held.threads]
    print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
