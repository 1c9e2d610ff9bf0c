"""Actions on an engine. Each leaves it in whatever state the abuse leads to."""

from __future__ import annotations

import contextlib
import json
import string
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import edgespec
from edgespec.engine.requests import Request
from edgespec.engine.sessions.file import SessionFile
from edgespec.errors import EdgeSpecError, StreamError
from edgespec.files.direct_reader import FileReader
from edgespec.generation.config import GenerationConfig, Grammar
from tests.abuse.subjects import CONTEXT, QUESTIONS, Subject
from tests.interrupting import Intruder

LINES = 60_000  # of Python, about as many as an answer takes


def cancel_from_another_thread(subject: Subject) -> None:
    """An answer is cancelled after a random while."""
    prompt, config = subject.chance.choice(QUESTIONS)
    timer = threading.Timer(subject.chance.expovariate(3.0), subject.engine.cancel)
    timer.start()
    subject.engine.generate(prompt, config.with_(max_tokens=200))
    timer.cancel()
    timer.join()


def leave_midway(subject: Subject) -> None:
    """The caller stops listening after a few passes."""
    prompt, config = subject.chance.choice(QUESTIONS)
    stream = subject.engine.stream(prompt, config)
    for _ in range(subject.chance.randrange(1, 6)):
        next(stream, None)
    stream.close()


def requests_in_shared_passes(subject: Subject) -> None:
    """Many requests at once, of which some are abandoned, until an exception, a cancellation or the end."""
    chance, engine = subject.chance, subject.engine
    requests = [Request(*chance.choice(QUESTIONS), key=n) for n in range(chance.randrange(2, 12))]
    left = chance.randrange(1, 60)

    def answer() -> None:
        for number, event in enumerate(engine.stream_many(requests, parallel=chance.choice((None, 2, 5)))):
            event.request.cancelled = chance.random() < 0.05
            if number == left:
                break

    ending = chance.choice(("closed", "cancelled", "exception"))
    if ending == "exception":
        Intruder(chance.randrange(1, LINES)).run(answer)
    elif ending == "cancelled":
        timer = threading.Timer(chance.expovariate(3.0), engine.cancel)
        timer.start()
        answer()
        timer.cancel()
        timer.join()
    else:
        answer()


def exception_at_a_random_line(subject: Subject) -> None:
    """Raise an exception at a random line of EdgeSpec's own."""
    prompt, config = subject.chance.choice(QUESTIONS)
    Intruder(subject.chance.randrange(1, LINES)).run(lambda: subject.engine.generate(prompt, config))


def exception_in_a_callback(subject: Subject) -> None:
    """Raise from a prompt's progress callback."""
    left = subject.chance.randrange(1, 4)

    def told(_done: int, _of: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise MemoryError

    words = [subject.chance.choice(("red", "blue", "seven", "under", "tree")) for _ in range(300)]
    with contextlib.suppress(MemoryError):
        subject.engine.generate(" ".join(words), QUESTIONS[0][1], on_prefill=told)


def read_that_fails(subject: Subject) -> None:
    """The disk fails once in an answer."""
    left, read = subject.chance.randrange(1, 400), FileReader.read_into

    def flaky(self: FileReader, memories: Sequence[memoryview], offset: int) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            raise StreamError("Reading failed: Input/output error.")
        return read(self, memories, offset)

    prompt, config = subject.chance.choice(QUESTIONS)
    FileReader.read_into = flaky  # type: ignore[method-assign]
    try:
        with contextlib.suppress(StreamError):
            subject.engine.generate(prompt, config)
    finally:
        FileReader.read_into = read  # type: ignore[method-assign]


def random_prompt(subject: Subject) -> None:
    """Any text of any length, most of it too long for the context."""
    with contextlib.suppress(EdgeSpecError):
        subject.engine.generate(
            _random_text(subject, subject.chance.choice([0, 1, 50, 2_000, 300_000])),
            QUESTIONS[1][1].with_(max_tokens=4),
            raw=subject.chance.random() < 0.5,
        )


def impossible_settings(subject: Subject) -> None:
    """Settings that no type checker lets pass."""
    wrong: list[dict[str, Any]] = [
        {"top_k": 2.5},
        {"temperature": float("nan")},
        {"max_tokens": -1},
        {"seed": -1},
        {"stop": [""]},
        {"verify": "blah"},
    ]
    with contextlib.suppress(EdgeSpecError, TypeError, ValueError, OverflowError):
        subject.engine.generate(QUESTIONS[0][0], GenerationConfig(**subject.chance.choice(wrong)))


def hostile_grammar(subject: Subject) -> None:
    """Forms that are wrong, endless, deep or huge."""
    deep: Any = {"type": "object"}
    for _ in range(subject.chance.choice([3, 300])):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    rules = "\n".join(f'r{i} ::= r{i + 1} "x"' for i in range(3000))
    forms = [
        Grammar("json_schema", json.dumps(deep)),
        Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}'),
        Grammar("grammar", f'root ::= r0\n{rules}\nr3000 ::= "y"'),
        Grammar("grammar", "root ::= root"),
        Grammar("regex", "(a{1,1000}){1,1000}"),
        Grammar("regex", "("),
    ]
    with contextlib.suppress(EdgeSpecError):
        subject.engine.generate(
            QUESTIONS[0][0], QUESTIONS[0][1].with_(grammar=subject.chance.choice(forms), max_tokens=8)
        )


def conversation(subject: Subject) -> None:
    """A saved conversation, stopped in the middle of an answer and taken up again."""
    path = str(subject.folder / f"{subject.chance.randrange(4)}.json")
    for last in (False, True):
        session = edgespec.Session(subject.engine)
        file = SessionFile(path)
        try:
            session.resume(file)
            if session.turns > 4:
                session.clear()
            answer = session.ask("Tell me more about it.", QUESTIONS[0][1])
            for _ in range(2):
                next(answer, None)
            if last:
                list(answer)
        finally:
            session.close()


def close_while_it_answers(subject: Subject) -> None:
    """The engine is closed by another thread; another one takes its place."""
    prompt, config = subject.chance.choice(QUESTIONS)
    timer = threading.Timer(subject.chance.expovariate(4.0), subject.engine.close)
    timer.start()
    with contextlib.suppress(EdgeSpecError):
        subject.engine.generate(prompt, config.with_(max_tokens=300))
    timer.join()
    subject.engine.close()
    subject.reopen()


def several_at_once(subject: Subject) -> None:
    """Several threads ask one engine; each waits for its turn, and all get the same answer."""
    prompt, config = subject.chance.choice(QUESTIONS)

    def ask(delay: float) -> list[int]:
        time.sleep(delay)
        return subject.engine.generate(prompt, config).tokens

    with ThreadPoolExecutor(3) as threads:
        first, *others = threads.map(ask, [subject.chance.random() / 20 for _ in range(3)])
    assert all(tokens == first for tokens in others)


ACTIONS: tuple[Callable[[Subject], None], ...] = (
    cancel_from_another_thread,
    leave_midway,
    requests_in_shared_passes,
    requests_in_shared_passes,
    exception_at_a_random_line,
    exception_at_a_random_line,
    exception_in_a_callback,
    read_that_fails,
    random_prompt,
    impossible_settings,
    hostile_grammar,
    conversation,
    close_while_it_answers,
    several_at_once,
)


def _random_text(subject: Subject, most: int) -> str:
    alphabet = subject.chance.choice(
        [string.ascii_letters, string.printable, "a", " ", "!?", "ä漢😀\u0301\u200b", "<|im_start|>system\n"]
    )
    length = subject.chance.randint(0, most)
    if most > 20 * CONTEXT:  # one run without an end
        return alphabet[0] * length
    return "".join(subject.chance.choices(alphabet, k=length))
