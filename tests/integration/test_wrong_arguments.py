"""Wrong arguments of the library's functions are refused by name, and leave the engine as it was.

Only an engine can show this: what is let through must not fail deeper down.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import Engine, GenerationConfig, Session
from edgespec.engine.requests import Request
from edgespec.engine.sessions.file import SessionFile
from edgespec.errors import EdgeSpecError, UsageError

# What parameters are given, by name, where they are not what is tried.
GOOD: dict[str, Callable[[Engine, Path], Any]] = {
    "prompt": lambda engine, folder: "Hi",
    "text": lambda engine, folder: "Hi",
    "prompts": lambda engine, folder: ["Hi", "Ho"],
    "source": lambda engine, folder: [Request("Hi", GenerationConfig(max_tokens=2))],
    "config": lambda engine, folder: GenerationConfig(max_tokens=2),
    "engine": lambda engine, folder: engine,
    "budget": lambda engine, folder: None,
    "file": lambda engine, folder: SessionFile(str(folder / "session.json")),
    "model": lambda engine, folder: folder / "missing.gguf",  # all other arguments are checked before it
}
WRONG: dict[str, Any] = {
    "None": None,
    "object": object(),
    "class": object,
    "function": lambda *_: None,
    "string": "nonsense",
    "empty string": "",
    "half a character": "a\ud800",
    "zero byte": "a\0b",
    "bytes": b"nonsense",
    "boolean": True,
    "fraction": 1.5,
    "nan": float("nan"),
    "infinity": float("inf"),
    "zero": 0,
    "negative": -1,
    "huge": 2**70,
    "endless": 10**5000,
    "very negative": -(2**70),
    "complex": 1j,
    "list": [],
    "list of objects": [object()],
    "list of None": [None],
    "list of huge": [2**70],
    "list of negative": [-1],
    "list of bytes": [b"x"],
    "list of empty": [{}],
    "message without role": [{"content": "Hi"}],
    "message of numbers": [{"role": 1, "content": 2}],
    "message of half a character": [{"role": "user", "content": "a\ud800"}],
    "mixed list": [1, {"role": "user", "content": "Hi"}],
    "tuple": (1, "x"),
    "set": {1, 2},
    "mapping": {"a": 1},
}
ENGINE = (
    "stream",
    "generate",
    "stream_many",
    "generate_many",
    "stream_many_async",
    "generate_many_async",
    "score",
)
SESSION = ("ask", "continue_answer", "drop_oldest", "save_to", "resume", "attach")


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


CALLS = [
    *(("load", name) for name in _parameters(edgespec.load)),
    *(("GenerationConfig", name) for name in _parameters(GenerationConfig)),
    *((f"Engine.{method}", name) for method in ENGINE for name in _parameters(getattr(Engine, method))),
    *(("Engine.set_tree_budget", name) for name in _parameters(Engine.set_tree_budget)),
    *(("Session", name) for name in _parameters(Session)),
    *((f"Session.{method}", name) for method in SESSION for name in _parameters(getattr(Session, method))),
    ("Session.system", "text"),
]


@pytest.fixture(scope="module")
def engine(short_path: Path) -> Iterator[Engine]:
    with edgespec.load(short_path, draft="lookup", context=64, threads=1) as engine:
        yield engine


def _called(name: str, engine: Engine, folder: Path, tried: dict[str, Any]) -> Any:
    """Call a function with good arguments, but for one; returns all that it yields."""
    owner, _, method = name.partition(".")
    if name == "GenerationConfig":  # what it lets through must not fail in an answer
        return engine.generate("Hi", GenerationConfig(**{"max_tokens": 2} | tried))
    session = Session(engine)
    if name == "Session.system":
        session.system = tried["text"]
        return None
    subjects: dict[str, Any] = {"Engine": engine, "Session": session}
    function = getattr(subjects[owner], method) if method else getattr(edgespec, owner)
    if name == "Session.continue_answer":
        list(session.ask("Hi", GenerationConfig(max_tokens=2)))
    needed = [key for key in _parameters(function) if key in GOOD and key not in tried]
    arguments = {key: GOOD[key](engine, folder) for key in needed} | tried
    try:
        return _exhausted(function(**arguments))
    finally:
        session.close()
        if isinstance(arguments.get("file"), SessionFile):
            arguments["file"].close()


def _exhausted(result: Any) -> Any:
    if isinstance(result, Generator):
        return list(result)
    if isinstance(result, AsyncGenerator):

        async def read() -> list[Any]:
            return [item async for item in result]

        return asyncio.run(read())
    return asyncio.run(result) if isinstance(result, Coroutine) else result


@pytest.mark.parametrize(("name", "parameter"), CALLS)
def test_a_wrong_argument_is_refused_by_name(
    engine: Engine, tmp_path: Path, name: str, parameter: str
) -> None:
    for kind, value in WRONG.items():
        if (name, parameter, kind) == ("load", "model", "None"):  # the default model
            continue
        try:
            _called(name, engine, tmp_path, {parameter: value})
        except EdgeSpecError:
            pass
        except Exception as error:
            if not (callable(value) and parameter.startswith("on_")):  # its own failure
                pytest.fail(f"{kind}: {type(error).__name__}: {error}")
    for kind in ("object", "complex"):  # nothing takes these
        with pytest.raises(UsageError, match=rf"^{parameter} must be .*, not .*\.$"):
            _called(name, engine, tmp_path, {parameter: WRONG[kind]})
    engine.set_tree_budget(None)
    assert engine.generate("Hi", GenerationConfig(max_tokens=2)).finish_reason == "length"


def test_no_public_function_is_left_out() -> None:
    def methods(kind: type) -> set[str]:
        return {
            name
            for name, _ in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and _parameters(getattr(kind, name))
        }

    # These take turns, stored states and settings that the package itself makes.
    internal = {"stream_turn", "save_conversation", "restore_conversation", "not_enforced"}
    assert methods(Engine) == {*ENGINE, "set_tree_budget", *internal}
    assert methods(Session) == {*SESSION}


def test_engines_and_sessions_say_what_they_are(engine: Engine, short_path: Path) -> None:
    mode = "exact" if engine.target.rule else "not bit-exact"
    assert repr(engine) == (
        f"<Engine {short_path.name}, drafted by {engine.drafter.name}, {mode}; context 64>"
    )
    session = Session(engine)
    list(session.ask("Hi", GenerationConfig(max_tokens=2)))
    assert repr(session) == f"<Session with {short_path.name}, 1 turn>"
