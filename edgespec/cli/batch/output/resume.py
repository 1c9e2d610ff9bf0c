"""Resumes a batch: which answers of an earlier run can be kept."""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.cli.batch.formats.records import Key
from edgespec.cli.batch.output.result_file import ResultFile
from edgespec.cli.origin import Origin, compact, same
from edgespec.cli.screen.terminal import Terminal
from edgespec.errors import UsageError


class EarlierAnswers:
    """Knows which lines already have an answer that was made with the same model, prompt and settings.

    Args:
        file: the output file; None if answers do not go to a file.
        overwrite: make answers again that were made differently, instead of refusing to continue.
    """

    def __init__(self, file: ResultFile | None, terminal: Terminal, *, overwrite: bool) -> None:
        self._file = file
        self._terminal = terminal
        self._overwrite = overwrite
        self._noted = False

    @property
    def exist(self) -> bool:
        """True if there are any."""
        return self._file is not None and bool(self._file.done)

    def check(self, lines: Iterable[tuple[int, Key, Origin]]) -> None:
        """Check all lines before the model is loaded.

        Args:
            lines: line number, key and origin of each requested answer.

        Raises:
            UsageError: the file holds answers to them that were made differently, and --overwrite was not
                given; says how many, and what differs for the first.
        """
        if self._overwrite:
            return
        first, changed = "", 0
        for line, key, origin in lines:
            if self._differs(key, origin):
                first = first or self._difference(line, key, origin)
                changed += 1
        if changed:
            raise self._made_otherwise(first, changed)

    def has(self, line: int, key: Key, origin: Origin) -> bool:
        """True if the file has the answer.

        Raises:
            UsageError: as `check`, for one line.
        """
        if self._file is None or key not in self._file.done:
            return False
        if not self._differs(key, origin):
            return True
        if not self._overwrite:
            raise self._made_otherwise(self._difference(line, key, origin), 1)
        return False

    def _differs(self, key: Key, origin: Origin) -> bool:
        if self._file is None or key not in self._file.done:
            return False
        was = self._file.done[key]
        if was is None and not self._noted:
            self._noted = True
            self._terminal.note(
                f"Some answers in {self._file.results.name} lack the model, prompt and settings they "
                "were made with; they are kept as they are."
            )
        now = compact(origin.fingerprint)
        return was is not None and now is not None and not same(was, now)

    def _difference(self, line: int, key: Key, origin: Origin) -> str:
        assert self._file is not None
        return f"line {line}: {'; '.join(origin.differences(self._file.made_with(key)))}"

    def _made_otherwise(self, first: str, changed: int) -> UsageError:
        assert self._file is not None
        many = f"{changed} answers" if changed > 1 else "an answer"
        where = f"starting at {first}" if changed > 1 else f"at {first}"
        return UsageError(
            f"{self._file.results.name} has {many} made with different settings, {where}.",
            "Give another name to --output, or --overwrite to answer such lines again.",
        )
