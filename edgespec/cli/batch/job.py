"""The lines of a batch: what each asks, and a queue of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgespec.generation.config import GenerationConfig

if TYPE_CHECKING:
    from edgespec.text.encoding import Prompt


_AHEAD = 64  # lines that are read from a pipe before they are needed
_LOOK_S = 0.1  # how often it is checked whether waiting is to end


@dataclass(frozen=True)
class Job:
    """One input line."""

    line: int  # its number, from 1
    identifier: str | int  # its "id" or "custom_id", or else the line number
    prompt: Prompt | None = None  # None if the line could not be read
    # The command's settings with those that the line overrides
    config: GenerationConfig = field(default_factory=GenerationConfig)
    answers: int | None = None  # its "n"; None if it has none
    # The path of the OpenAI API that it asks; None if it is in EdgeSpec's own format
    endpoint: str | None = None
    error: str = ""  # why the line is invalid; empty if it is valid
    duplicate_of: int = 0  # the earlier line with the same id; 0 if there is none
    warnings: tuple[str, ...] = ()  # what of the line has no effect, in sentences
    # The texts after the prompt that are to be scored, or none to score the prompt itself; None if the line
    # asks for an answer
    scored: tuple[str, ...] | None = None
    choices_given: bool = False  # the line has them as a list of choices
    shown: Prompt | None = None  # the prompt as results show it, where images are part of it
    # The images before the prompt as results show them: paths, and hashes of data
    images: tuple[str, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)  # fields that have no effect, which results keep

    @property
    def kept(self) -> dict[str, Any]:
        """The fields of a result that repeat those of the line."""
        return {"columns": dict(self.columns)} if self.columns else {}


class JobQueue:
    """The jobs of an input, one after the other, without waiting unless told to.

    Args:
        jobs: read in a thread of its own if `waits`.
        waits: reading a line may take any time, because something else writes it.
    """

    def __init__(self, jobs: Iterator[Job], *, waits: bool) -> None:
        self._jobs = jobs
        self._ended = False
        self._read: queue.Queue[Job | Exception | None] | None = None
        self._next: Job | Exception | None = None
        if waits:
            self._read = queue.Queue(_AHEAD)
            threading.Thread(target=self._read_all, args=(self._read,), daemon=True).start()

    def take(self) -> Job | None:
        """The next job; None if there is none now."""
        if self._read is None:
            return next(self._jobs, None)
        item, self._next = self._next, None
        if item is None and not self._ended:
            try:
                item = self._read.get_nowait()
            except queue.Empty:
                return None
            self._ended = item is None
        if isinstance(item, Exception):
            raise item
        return item

    def wait(self, stopped: Callable[[], bool]) -> bool:
        """Wait for a job, or until `stopped`; False if there will be none."""
        if self._read is None:
            return False
        while self._next is None and not self._ended and not stopped():
            try:
                self._next = self._read.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            self._ended = self._next is None
        return self._next is not None

    def _read_all(self, read: queue.Queue[Job | Exception | None]) -> None:
        try:
            for job in self._jobs:
                read.put(job)
        except Exception as error:  # whatever it is, the thread that answers raises it
            read.put(error)
        read.put(None)
