"""The files that one answer enters, followed call by call: the walk in docs/architecture.md names them.

Only a model's answer can show this: which code runs is decided by what it drafts, streams and says.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import edgespec
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from tests.least_memory import load_in_least_memory

ROOT = Path(edgespec.__file__).parent.parent
WALK = re.compile(r"^\| `(edgespec/[\w/]+\.py)` \| .* \|$", re.MULTILINE)
FURTHER = re.compile(r"^The loop enters further files.*?\n\n", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`(edgespec/[\w/]+\.py)`")
CONFIG = GenerationConfig(max_tokens=24)


class Trace:
    """Notes the files of edgespec whose functions are called, in all threads that begin inside of it.

    Attributes:
        on: whether calls are noted now.
        files: the files, in the order of their first call.
    """

    def __init__(self) -> None:
        self.on = False
        self.files: dict[str, int] = {}

    def note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self.on and event == "call":
            name = frame.f_code.co_filename
            if name.startswith(str(ROOT / "edgespec")):
                path = Path(name).relative_to(ROOT).as_posix()
                self.files[path] = self.files.get(path, 0) + 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


def test_the_walk_is_what_an_answer_enters(smol_path: Path, q4_drafter_path: Path) -> None:
    """Files that the walk names are entered, and an answer enters no more of the loop than it names."""
    trace = Trace()
    with (
        trace.installed(),
        load_in_least_memory(smol_path, draft=q4_drafter_path, context=512, tree_budget=8) as engine,
    ):
        answer = traced(engine, trace)
    assert any(record.nodes > 1 for record in answer.passes), "something was drafted"
    walk = WALK.findall((ROOT / "docs" / "architecture.md").read_text())
    assert len(walk) > 20
    of_an_engine = walk[walk.index("edgespec/engine/engine.py") :]
    assert set(of_an_engine) - set(trace.files) == set()
    assert "edgespec/text/template.py" in trace.files
    loop = {file for file in trace.files if file.startswith(("edgespec/engine/", "edgespec/drafters/"))}
    further = FURTHER.search((ROOT / "docs" / "architecture.md").read_text())
    assert further is not None
    assert loop - set(walk) == set(NAMED.findall(further[0]))


def traced(engine: Engine, trace: Trace) -> Generation:
    """A streamed answer; its calls are noted from the first on, without those that import a module."""
    import edgespec.engine.answer  # noqa: F401

    trace.on = True
    try:
        for chunk in engine.stream("Name three colours of the sea.", CONFIG):
            answer = chunk.generation
    finally:
        trace.on = False
    assert answer is not None
    print(len(trace.files), *(f"{count:7} {file}" for file, count in trace.files.items()), sep="\n")
    return answer
