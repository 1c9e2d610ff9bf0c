"""`--collect`: what the target said in ordinary runs, kept to tune drafters on.

Every run that collects has a file of its own, so that several can do so at once. Only the person who ran it
can read it, and `edgespec config --forget` deletes it.
"""

from __future__ import annotations

import os
import secrets
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from edgespec.drafting.agreement import SampleAnswer
from edgespec.drafting.tuning.data.answers import Answer, DistributionRows
from edgespec.drafting.tuning.data.prompts import Prompt
from edgespec.files.blocks import BlockFile
from edgespec.files.cache_kind import CacheKind
from edgespec.generation.result import Generation

COLLECTED = "collected"
_LABEL = b"answers that were collected 1"
_CONTEXT = 256  # tokens before an answer, or a part of it, that are kept to predict it from
_PART = 256  # tokens of an answer that are learned from at a time
_LEAST = 4  # tokens of an answer that is worth keeping
_MAX_BYTES = 256 << 20  # for one target; the oldest files go first
_HELD_OUT_SHARE = 8  # one in so many
_MAX_READ = 4096  # answers that a tuning uses: the latest, as more would not be learned in hours


class Collector:
    """Keeps the answers of a target, and what it might have said instead.

    Args:
        fingerprint: of the target's header.
        on_failure: told, once, why nothing can be kept any more. That never ends an answer.

    Attributes:
        path: the file; it is there from the first answer on.
    """

    def __init__(self, fingerprint: str, on_failure: Callable[[str], None]) -> None:
        self._fingerprint = fingerprint
        self._on_failure = on_failure
        self._failed = False
        self.path = CacheKind.COLLECTED.folder / f"{fingerprint[:16]}-{secrets.token_hex(4)}.answers"
        self._file: BlockFile | None = None

    def observe(self, prompt: Sequence[int]) -> CollectedAnswer:
        """Return the observer of an answer to a prompt."""
        return CollectedAnswer(self, tuple(prompt))

    def add(self, answers: Sequence[Answer]) -> None:
        """Add answers to the file."""
        if self._failed:
            return
        try:
            if self._file is None:
                self._file = self._new_file()
            for answer in answers:
                self._file.append(answer.to_bytes())
        except OSError as error:
            self._failed = True
            self._on_failure(f"{self.path} cannot be written: {error.strerror or error}. Collecting stopped.")

    def _new_file(self) -> BlockFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files = _oldest_first(self._fingerprint)
        while files and sum(path.stat().st_size for path in files) > _MAX_BYTES:
            files.pop(0).unlink(missing_ok=True)
        os.close(os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o600))
        return BlockFile(self.path, _LABEL)


class CollectedAnswer:
    """One answer that is being collected."""

    def __init__(self, collector: Collector, prompt: tuple[int, ...]) -> None:
        self._collector = collector
        self._prompt = prompt
        self._rows = DistributionRows()
        self.add = self._rows.add

    def finish(self, answer: Generation) -> None:
        """Keep it, in parts that each know what stood before them."""
        said = tuple(answer.tokens)
        if len(said) < _LEAST:
            return
        top, logprobs = self._rows.first(len(said) + 1)
        text = self._prompt + said
        parts = []
        for begin in range(0, len(said), _PART):
            before = len(self._prompt) + begin
            part = SampleAnswer(text[max(before - _CONTEXT, 0) : before], text[before : before + _PART])
            rows = slice(begin, begin + _PART + (begin + _PART >= len(said)))
            parts.append(Answer(Prompt("", COLLECTED), part, top[rows], logprobs[rows]))
        self._collector.add(parts)


def collected(fingerprint: str) -> tuple[list[Answer], list[Answer]]:
    """Return what was collected of a target, the latest last: answers to learn from, and held-out ones.

    Which are held out depends on what stands before them alone, so it stays when more are collected.
    """
    latest: deque[Answer] = deque(maxlen=_MAX_READ)
    for path in _oldest_first(fingerprint):
        latest.extend(_read(path))
    learned: list[Answer] = []
    held_out: list[Answer] = []
    for answer in latest:
        mark = zlib.crc32(repr(answer.text.prompt).encode())
        (held_out if mark % _HELD_OUT_SHARE == 0 else learned).append(answer)
    return learned, held_out


def _oldest_first(fingerprint: str) -> list[Path]:
    """The files of a target, the one that was written last at the end."""
    files = []
    for path in CacheKind.COLLECTED.folder.glob(f"{fingerprint[:16]}-*.answers"):
        with suppress(FileNotFoundError):  # deleted in the meantime
            files.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(files)]


def _read(path: Path) -> Iterator[Answer]:
    """The answers in a file, as far as it is whole."""
    try:
        for block in BlockFile(path, _LABEL).blocks():
            yield Answer.from_bytes(block)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return  # not written by this version, or deleted in the meantime
