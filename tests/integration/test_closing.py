"""Closing an engine, whoever uses it: nobody computes with freed memory, and nobody waits for ever.

What may crash or hang happens in a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.engine.engine import Engine
from edgespec.engine.sessions.file import SessionFile
from edgespec.errors import BackendError
from edgespec.generation.config import GenerationConfig
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from tests.least_memory import load_in_least_memory
from tests.tiers import slow_except
from tests.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[2]
LONG = GenerationConfig(max_tokens=100)
PROMPT = [40 + i % 7 for i in range(70)]


@pytest.fixture(scope="module")
def path(short_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny-llama.gguf", "llama", short_path)


def open_given(arguments: Sequence[str]) -> Engine:
    """The engine of a program's arguments: a path, and what it is drafted with and whether it is streamed."""
    path, kind = Path(arguments[1]), arguments[2]
    options: dict[str, Any] = {"context": 192, "threads": 2, "draft": path if "model" in kind else "lookup"}
    if "streamed" not in kind:
        return edgespec.load(path, **options)
    return load_in_least_memory(path, **options)


def run(program: str, *arguments: object) -> str:
    """Output of a program that must end well by itself."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_CLOSE_WHILE_ANOTHER_GENERATES = """
import sys, threading, time
from edgespec.errors import BackendError
from tests.integration.test_closing import LONG, PROMPT, open_given

for turn in range(6):
    engine = open_given(sys.argv)
    ended = []
    running = threading.Event()

    def work():
        while True:
            try:
                for chunk in engine.stream(PROMPT, LONG, on_prefill=lambda done, total: running.set()):
                    running.set()
                engine.target.rewind(0)
            except BackendError as error:
                ended.append(str(error))
                return

    threads = [threading.Thread(target=work)]
    threads[0].start()
    running.wait()
    time.sleep(turn * 0.01)  # in the prompt, in a pass, while drafting
    closers = [threading.Thread(target=engine.close) for _ in range(2)]
    for thread in closers:
        thread.start()
    for thread in threads + closers:
        thread.join()
    assert ended == ["The engine is closed. Load it again."], ended
print("closed")
"""


@pytest.mark.parametrize("kind", slow_except(["streamed-model"], ["resident", "model", "streamed-model"]))
def test_closing_while_another_thread_generates_ends_its_answer(path: Path, kind: str) -> None:
    assert run(_CLOSE_WHILE_ANOTHER_GENERATES, path, kind) == "closed\n"


def _asynchronous_example() -> str:
    """The asynchronous program in the page about Python."""
    page = (ROOT / "docs" / "how-to" / "python.md").read_text()
    programs = re.findall(r"```python\n(import asyncio\n.*?)```", page, re.DOTALL)
    assert len(programs) == 1
    return str(programs[0])


def test_the_asynchronous_example_under_a_timeout_ends_well(short_path: Path) -> None:
    program = _asynchronous_example()
    # The same, but that the answer is long and the patience short.
    for old, new in (
        ('edgespec.load(draft="lookup")', f'edgespec.load({str(short_path)!r}, draft="lookup")'),
        ("max_tokens=32", "max_tokens=3000"),
        ("await asyncio.to_thread(", "await asyncio.wait_for(asyncio.to_thread("),
        ('"Name three colours.", config)', '"Tell a very long story.", config), timeout=0.2)'),
        ("asyncio.run(main())", "try:\n    asyncio.run(main())\nexcept TimeoutError:\n    print('too late')"),
    ):
        assert old in program, old
        program = program.replace(old, new)
    program = program.replace("except TimeoutError", "except (TimeoutError, asyncio.TimeoutError)")
    assert run(program) == "too late\n"


def in_a_child(function: Callable[..., None], *arguments: object) -> None:
    """Call a function of this module, with texts, in a process of its own."""
    run(f"import sys; from {__name__} import {function.__name__} as f; f(*sys.argv[1:])", *arguments)


def close_from_a_callback(path: str) -> None:
    engine = open_given(["", path, "resident"])
    with pytest.raises(BackendError, match=r"The engine is closed\."):
        engine.generate(PROMPT * 2, LONG, on_prefill=lambda _done, _total: engine.close())
    engine.close()


def test_an_answer_may_close_its_own_engine(path: Path) -> None:
    in_a_child(close_from_a_callback, path)


def close_between_chunks(path: str, kind: str) -> None:
    engine = open_given(["", path, kind])
    stream = engine.stream(PROMPT, LONG)
    next(stream)
    engine.close()
    engine.close()
    assert engine.closed
    with pytest.raises(BackendError, match=r"The engine is closed\."):
        next(stream)
    for prompt in (PROMPT, "Text that must be cut into tokens"):
        with pytest.raises(BackendError, match=r"The engine is closed\."):
            engine.generate(prompt, LONG)


@pytest.mark.parametrize("kind", slow_except(["streamed"], ["resident", "streamed"]))
def test_closing_beside_an_answer_that_waits_to_continue(path: Path, kind: str) -> None:
    in_a_child(close_between_chunks, path, kind)


def close_in_a_conversation(model: str, file: str) -> None:
    engine = edgespec.load(model, draft="lookup", context=256, threads=1)
    session = edgespec.Session(engine)
    session.save_to(SessionFile(file))
    answer = session.ask("Say hello.", GenerationConfig(max_tokens=20))
    next(answer)
    engine.close()
    with pytest.raises(BackendError, match=r"The engine is closed\."):
        list(answer)
    with pytest.raises(BackendError, match=r"The engine is closed\."):
        list(session.ask("And again."))
    session.close()


def test_a_conversation_outlives_its_engine_without_harm(short_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    in_a_child(close_in_a_conversation, short_path, file)
    assert '"Say hello."' in file.read_text()


_AFTER_CLOSE: dict[str, Callable[[Model, Context], Any]] = {
    "tokenize": lambda model, _: model.vocabulary.tokenize("text", control=False),
    "controls_in": lambda model, _: model.vocabulary.controls_in("text"),
    "control_texts": lambda model, _: model.vocabulary.control_texts,
    "piece": lambda model, _: model.vocabulary.piece(5),
    "text": lambda model, _: model.vocabulary.text(5),
    "is_end": lambda model, _: model.vocabulary.is_end(5),
    "ends": lambda model, _: model.vocabulary.ends(np.array([5], dtype=np.int32)),
    "is_control": lambda model, _: model.vocabulary.is_control(5),
    "kind": lambda model, _: model.vocabulary.kind,
    "adds_bos": lambda model, _: model.vocabulary.adds_bos,
    "bos": lambda model, _: model.vocabulary.bos,
    "eos": lambda model, _: model.vocabulary.eos,
    "n_bytes": lambda model, _: model.n_bytes,
    "n_parameters": lambda model, _: model.n_parameters,
    "keeps_recurrent_state": lambda model, _: model.keeps_recurrent_state,
    "keeps_cells": lambda model, _: model.keeps_cells,
    "chat_template": lambda model, _: model.chat_template,
    "decode": lambda _, context: context.decode(TokenBatch.run([1], 0, 1)),
    "logits": lambda _, context: context.logits(),
    "copy": lambda _, context: context.copy(0, 1, 0, 1),
    "remove": lambda _, context: context.remove(0),
    "last_position": lambda _, context: context.last_position(0),
    "clear": lambda _, context: context.clear(),
    "save": lambda _, context: context.save(0),
    "restore": lambda _, context: context.restore(0, (ctypes.c_uint8 * 4)()),
}


_USE_AFTER_CLOSE = """
import sys
from pathlib import Path
from edgespec.errors import BackendError
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.engine.sessions.file import SessionFile
from tests.integration.test_closing import _AFTER_CLOSE

model = Model(Path(sys.argv[1]))
context = Context(model, n_cells=64, n_rows=8, n_outputs=8, n_sequences=4, n_threads=1)
model.close()  # its context with it
model.close()
context.close()
for name, use in _AFTER_CLOSE.items():
    try:
        use(model, context)
    except BackendError as error:
        assert "closed" in str(error), error
    else:
        print(name, "answers")
"""


def test_nothing_of_a_closed_model_is_used(path: Path) -> None:
    assert run(_USE_AFTER_CLOSE, path) == ""


_FORK = """
import os, signal, sys
from edgespec.errors import BackendError
from tests.integration.test_closing import LONG, PROMPT, open_given

engine = open_given(sys.argv)
text = engine.generate(PROMPT, LONG).tokens
stream = engine.stream(PROMPT, LONG)
next(stream)

def said(what):
    try:
        what()
    except BackendError as error:
        return str(error)
    return ""

child = os.fork()
if not child:
    signal.alarm(600)  # a child that hangs is ended
    ok = "before this process was forked" in said(lambda: next(stream))
    ok &= "before this process was forked" in said(lambda: engine.generate(PROMPT, LONG))
    ok &= "before this process was forked" in said(lambda: engine.generate("Some text", LONG))
    ok &= "before this process was forked" in said(lambda: engine.target.context.clear())
    engine.close()
    engine.target.close()
    ok &= "llama.cpp cannot compute here" in said(lambda: open_given(sys.argv))
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stream.close()
assert engine.generate(PROMPT, LONG).tokens == text
engine.close()
print("both went on")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are never forked here")
@pytest.mark.parametrize("kind", slow_except(["streamed"], ["model", "streamed"]))
def test_a_forked_process_is_told_instead_of_hanging(path: Path, kind: str) -> None:
    assert run(_FORK, path, kind) == "both went on\n"


def test_an_engine_that_waits_for_nobody_closes_at_once_from_many_threads(path: Path) -> None:
    engine = open_given(["", str(path), "streamed"])
    threads = [threading.Thread(target=engine.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.closed
