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
from tests.least_memory import load_in_least_memory

ROOT = Path(edgespec.__file__).parent.parent
WALK = re.compile(r"^\| `(edgespec/[\w/]+\.py)` \| .* \|$", re.MULTILINE)
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


def entered(engine: Engine, trace: Trace) -> list[str]:
    """The files that an answer enters once it was asked for, in order."""
    trace.on = True
    try:
        answer = engine.generate("Name three colours of the sea.", CONFIG)
    finally:
        trace.on = False
    assert any(record.nodes > 1 for record in answer.passes), "something was drafted"
    return list(trace.files)


def test_the_walk_is_what_an_answer_enters(smol_path: Path, q4_drafter_path: Path) -> None:
    trace = Trace()
    with (
        trace.installed(),
        load_in_least_memory(smol_path, draft=q4_drafter_path, context=512, tree_budget=8) as engine,
    ):
        files = entered(engine, trace)
    print(len(files), *[f"{trace.files[f]:7} {f}" for f in files], sep="\n")
