"""An agent's conversation with a server: the time to the first token of every turn, and what is read for it.

    python -m benchmarks.agents --target MODEL.gguf [--draft DRAFTER.gguf] [--scale 1] [--turns 12]

The agent has the instructions and 20 tools of a coding agent, 12,000 tokens in all, and works on this
repository. Every turn brings the result of a tool, 200 to 4,000 tokens of its files. `--scale` makes all of
that smaller. The conversation is held four times: for the first time, again, again after the server was
killed, and for the first time with other files, in turn with a second one of that kind. A server of its own
keeps its prompts in a folder that is deleted in the end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from benchmarks.harness import parser_of

ROOT = Path(__file__).parents[1]
_PROMPT_TOKENS = 12_000
_RESULTS = (900, 200, 2000, 400, 1200, 300, 4000, 600, 250, 1500, 800, 2500)  # tokens, turn after turn
_KNOWN = ("allocations", "kernels", "profiles", "rows", "vetted")
_CHARACTERS = 3.6  # of a token of this repository, at most
_INSTRUCTIONS = """\
You are a coding agent that works in a person's terminal, in the repository that is described below. You read
and change files and run programs with the tools that you are given, and answer when the work is done.

# How you work
- Read before you write. Look for what the repository already has, and follow its conventions.
- Change as little as the task needs. Leave files that have nothing to do with it as they are.
- Run the tests that concern a change, and say which ones you ran and what they showed.
- Ask when the task can be understood in two ways that lead to different work.
- Never print secrets, never push, and never delete what you did not create.
- Prefer the tools for searching and reading over shell commands that do the same.
- Several calls that do not depend on each other may be made at once.

# How you answer
- Be brief: one to four sentences, unless a person asks for more.
- Name files with their lines, as in edgespec/engine/engine.py:120.
- Do not repeat what a tool has shown.

# The repository
"""
_TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "read_file": (
        "Read a file, or some of its lines.",
        {"path": "Path.", "first": "First line.", "last": "Last line."},
    ),
    "write_file": (
        "Create a file or replace its content as a whole.",
        {"path": "Path.", "content": "All of it."},
    ),
    "edit_file": (
        "Replace a text in a file by another one.",
        {"path": "Path.", "old": "A text that occurs once.", "new": "What takes its place."},
    ),
    "list_files": (
        "List the files of a folder, newest first.",
        {"path": "Folder.", "pattern": "Such as **/*.py."},
    ),
    "search": (
        "Search the files for a regular expression.",
        {"pattern": "Expression.", "path": "Where to search.", "context": "Lines around each place."},
    ),
    "run": (
        "Run a command in a shell, and return what it prints.",
        {"command": "Command.", "timeout": "Seconds.", "folder": "Where it runs."},
    ),
    "run_in_background": (
        "Start a command that keeps running.",
        {"command": "Command.", "name": "A name for it."},
    ),
    "read_output": (
        "Read what a command in the background has printed.",
        {"name": "Its name.", "filter": "Expression for lines."},
    ),
    "stop": ("End a command in the background.", {"name": "Its name."}),
    "run_tests": (
        "Run tests and return those that fail.",
        {"paths": "Files of tests.", "expression": "Which tests.", "workers": "Processes."},
    ),
    "diff": ("Show what was changed since a commit.", {"commit": "Commit.", "path": "File or folder."}),
    "log": ("Show commits, newest first.", {"path": "File or folder.", "count": "How many."}),
    "blame": (
        "Show which commit each line of a file is from.",
        {"path": "File.", "first": "First line.", "last": "Last line."},
    ),
    "definition": ("Find where a name is defined.", {"name": "Name.", "path": "A file that uses it."}),
    "references": ("Find all places that use a name.", {"name": "Name.", "path": "Where it is defined."}),
    "fetch": ("Fetch a page and return its text.", {"url": "Address.", "question": "What it is read for."}),
    "plan": ("Write down the steps of the work, for the person to see.", {"steps": "One a line."}),
    "note": ("Keep a note for later conversations.", {"title": "Title.", "text": "Note."}),
    "ask": (
        "Ask the person a question, and wait for the answer.",
        {"question": "Question.", "choices": "Answers to choose from."},
    ),
    "delegate": (
        "Have another agent do a part of the work, and return its report.",
        {"task": "What to do.", "context": "What it has to know."},
    ),
}
_TASKS = ("Find out why answers end early in some batches.", "Find out why the disk is idle in some passes.")


@dataclass
class Turn:
    """One request: the tokens of its prompt, those that are new, those that were read, and the seconds."""

    prompt: int
    new: int
    read: int
    seconds: float


@dataclass
class Agent:
    """A conversation.

    Attributes:
        written: tokens of the last prompt and the answer to it.
    """

    task: str
    system: str
    results: list[str]
    messages: list[dict[str, Any]] = field(default_factory=list)
    written: int = 0

    def __post_init__(self) -> None:
        self.messages = [{"role": "system", "content": self.system}, {"role": "user", "content": self.task}]

    def turn(self, server: Server, tokens: int) -> Turn:
        """Ask for the next answer, and take the result of a tool into the conversation."""
        start = time.perf_counter()
        first = 0.0
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        usage: dict[str, Any] = {}
        for event in server.events(self.messages, tokens):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if (
                    "speculation" in event
                    or choice["delta"].get("content")
                    or "tool_calls" in choice["delta"]
                ):
                    first = first or time.perf_counter() - start
                _add(message, choice["delta"])
        prompt = int(usage["prompt_tokens"])
        read = prompt - int(usage["prompt_tokens_details"]["cached_tokens"])
        turn = Turn(prompt, prompt - self.written, read, first)
        self.written = prompt + int(usage["completion_tokens"])
        result = self.results.pop(0)
        self.messages.append(message)
        calls = message.get("tool_calls")
        if calls and not _is_json(calls[0]["function"]["arguments"]):
            del message["tool_calls"]  # the answer was cut off in the call
            calls = None
        if calls:
            self.messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls[:1]
            ]
        else:
            self.messages.append({"role": "user", "content": f"This is what the file has:\n\n{result}"})
        return turn


class Server:
    """`edgespec serve`, asked over HTTP."""

    def __init__(self, port: int, program: subprocess.Popen[str]) -> None:
        self._port = port
        self.program = program

    def events(self, messages: list[dict[str, Any]], tokens: int) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer."""
        body = {
            "messages": messages,
            "tools": tools(),
            "max_tokens": tokens,
            "stream": True,
            "speculation": True,
        }
        answer = self._post("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(event["error"]["message"])
                yield event

    def count(self, system: str) -> int:
        """The tokens of a prompt with these instructions and all tools."""
        given = [{"name": tool["function"]["name"], "description": tool["function"]["description"],
                  "input_schema": tool["function"]["parameters"]} for tool in tools()]  # fmt: skip
        body = {"system": system, "tools": given, "messages": [{"role": "user", "content": _TASKS[0]}]}
        return int(json.loads(self._post("/v1/messages/count_tokens", body).read())["input_tokens"])

    def _post(self, path: str, body: object) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(answer.read().decode())
        return answer


@contextmanager
def serving(options: argparse.Namespace, folder: str) -> Iterator[Server]:
    """A server whose prompts are kept in a folder; it is killed in the end."""
    command = [sys.executable, "-m", "edgespec", "serve", options.target, "--draft", options.draft]
    command += ["--port", "0", "--sampling", "greedy", "--context", str(options.context), "--no-learn"]
    environment = {**os.environ, "XDG_CACHE_HOME": folder}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stderr is not None
        for line in program.stderr:
            if match := re.search(r"at http://127\.0\.0\.1:(\d+)/v1; chat", line):
                break
        else:
            raise SystemExit("The server did not start.")
        try:
            yield Server(int(match[1]), program)
        finally:
            program.kill()


def tools() -> list[dict[str, Any]]:
    """The tools in the form of the API."""
    found = []
    for name, (text, parameters) in _TOOLS.items():
        properties = {key: {"type": "string", "description": about} for key, about in parameters.items()}
        schema = {"type": "object", "properties": properties, "required": [next(iter(parameters))]}
        found.append(
            {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
        )
    return found


def instructions(server: Server, tokens: int) -> str:
    """Instructions that make, with the tools, a prompt of so many tokens."""
    pages = "".join(
        (ROOT / page).read_text() for page in ("CONTRIBUTING.md", "docs/architecture.md", "docs/trees.md")
    )
    low, high = 0, min(len(pages), round(tokens * _CHARACTERS))
    while high - low > 8:
        middle = (low + high) // 2
        if server.count(_INSTRUCTIONS + pages[:middle]) < tokens:
            low = middle
        else:
            high = middle
    return _INSTRUCTIONS + pages[:low]


def results(scale: float, turns: int, start: int) -> list[str]:
    """Results of the tools: pieces of this repository's files."""
    source = "".join(path.read_text() for path in sorted((ROOT / "edgespec").rglob("*.py")))
    found = []
    for turn in range(turns):
        size = int(_RESULTS[turn % len(_RESULTS)] * scale * _CHARACTERS)
        found.append(source[start : start + size])
        start += size
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default="none")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--context", type=int, default=32768)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgespec-agents-") as folder:
        for known in _KNOWN:  # what was found out about the machine
            if (kept := user_cache_path("edgespec") / known).is_dir():
                shutil.copytree(kept, Path(folder) / "edgespec" / known)
        measure(options, folder)


def measure(options: argparse.Namespace, folder: str) -> None:
    """Hold the conversations, and print a table of each."""

    def agent(system: str, which: int) -> Agent:
        return Agent(_TASKS[which % 2], system, results(options.scale, options.turns, 200_000 * which))

    with serving(options, folder) as server:
        system = instructions(server, round(_PROMPT_TOKENS * options.scale))
        for title in ("First time", "Again"):
            show(title, [held(agent(system, 0), server, options)])
        time.sleep(3)  # what is written when nothing else is to be done
    kept = [path for path in Path(folder).rglob("prompts/*") if path.is_file()]
    print(f"Kept on disk: {sum(path.stat().st_size for path in kept) / 1e6:.0f} MB in {len(kept)} files.\n")
    with serving(options, folder) as server:
        show("After the server was killed", [held(agent(system, 0), server, options)])
        pair = [agent(system, 1), agent(system, 2)]
        turns = [[talk.turn(server, options.tokens) for talk in pair] for _ in range(options.turns)]
        show("Two in turn", [list(column) for column in zip(*turns, strict=True)])


def held(agent: Agent, server: Server, options: argparse.Namespace) -> list[Turn]:
    """All turns of a conversation."""
    return [agent.turn(server, options.tokens) for _ in range(options.turns)]


def show(title: str, conversations: list[list[Turn]]) -> None:
    """Print the turns of conversations that were held in turn."""
    print(f"{title}\n\n| turn | prompt | new | read | first token (s) | s per 1,000 read |")
    print("|--:|--:|--:|--:|--:|--:|")
    for number, turns in enumerate(zip(*conversations, strict=True), 1):
        for turn in turns:
            rate = 1e3 * turn.seconds / max(turn.read, 1)
            print(
                f"| {number} | {turn.prompt} | {turn.new} | {turn.read} | {turn.seconds:.2f} | {rate:.2f} |"
            )
    print(flush=True)


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    message["content"] += delta.get("content") or ""
    for piece in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if len(calls) <= piece["index"]:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[piece["index"]]
        call["id"] += piece.get("id") or ""
        call["function"]["name"] += piece["function"].get("name") or ""
        call["function"]["arguments"] += piece["function"].get("arguments") or ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
