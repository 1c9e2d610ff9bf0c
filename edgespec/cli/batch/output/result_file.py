"""The file to which batch results are appended: earlier results, and the final order."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edgespec.cli.batch.formats.records import EarlierResult, Key, read_record, read_results
from edgespec.cli.origin import compact
from edgespec.cli.screen.results import ResultStream
from edgespec.errors import OutputError
from edgespec.files.writing import atomic_write, only_writer, writing_to


class ResultFile:
    """An output file and the results in it.

    A last line that an earlier run left incomplete is removed. A failed line is tried again by the next
    run; if it then has an answer, or fails differently, `tidy` removes the old result.

    Attributes:
        results: where to write.
        done: finished results, with the compact fingerprint of each; None for results of versions that did
            not record it.
        failed: results that are errors, with their messages.

    Raises:
        OutputError: the file cannot be written, is being written by another program, or holds something
            other than results.
    """

    def __init__(self, name: str, input_name: str | None = None) -> None:
        self.done: dict[Key, str | None] = {}
        self.failed: dict[Key, str] = {}
        self._path = path = Path(name)
        self._superseded = False  # some results have been replaced by later ones
        self._maybe_unordered = False
        if input_name not in (None, "-") and path.exists() and path.samefile(str(input_name)):
            raise OutputError(f"{name} is the input file.", "Give another name to --output.")
        with ExitStack() as stack:
            with writing_to(path, "Give another name to --output."):
                if not path.exists() or path.is_file():  # no terminal, pipe or device
                    stack.enter_context(only_writer(path))
                self._file = stack.enter_context(path.open("a", encoding="utf-8", newline="\n"))
            self.results = ResultStream(self._file, name)
            self._regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
            if self._regular:
                self._read_earlier_results()
                # An earlier run may have been killed before it brought its results into order.
                self._maybe_unordered = bool(self.done or self.failed)
            self._open = stack.pop_all()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def record(self, record: dict[str, Any], key: Key, *, in_order: bool) -> None:
        """Append a result, unless it repeats an error, or is an error for a line that has an answer.

        Args:
            in_order: whether it follows all results of this run so far in the order of the input.
        """
        error = read_record(record).error
        if key in self.done:
            if error is not None:
                return
            self._superseded = True
        if key in self.failed:
            if self.failed[key] == error:
                return
            self._superseded = True
        if not in_order:
            self._maybe_unordered = True
        self.results.record(record)

    def tidy(self, keys: Iterable[Key], *, ordered: bool) -> None:
        """Keep only the latest result of each key.

        The file is replaced as a whole, and only if necessary.

        Args:
            keys: those of the whole input, in its order.
            ordered: also bring the results into that order; results of other lines come first.

        Raises:
            OutputError: it cannot be written; it is then unchanged.
        """
        known = dict.fromkeys(keys)
        # Errors about duplicate ids whose lines no longer exist.
        outdated = {key for key in self.failed if key[1] < 0 and key not in known}
        if not self._regular or not (self._superseded or outdated or (ordered and self._maybe_unordered)):
            return
        self._file.close()
        places = {result.key: at for at, result in self._earlier_results() if result.key is not None}
        present = sorted(places, key=lambda key: places[key])
        kept = [key for key in present if key not in outdated]
        if ordered:
            kept = [key for key in kept if key not in known] + [key for key in known if key in places]
        if kept == present and not self._superseded:
            return
        with (
            writing_to(self._path),
            self._path.open("rb") as old,
            atomic_write(self._path, durable=False) as new,
        ):
            for key in kept:
                old.seek(places[key])
                new.write(old.readline())
            Path(new.name).chmod(stat.S_IMODE(self._path.stat().st_mode))

    def made_with(self, wanted: Key) -> Mapping[str, Any]:
        """Return the origin of the latest result with a key of `done`."""
        return [result.made_with for _, result in self._earlier_results() if result.key == wanted][-1]

    def _read_earlier_results(self) -> None:
        for _, result in self._earlier_results():
            key = result.key
            if key is None:
                continue
            if key in self.done or key in self.failed:
                self._superseded = True
            self.failed.pop(key, None)
            self.done.pop(key, None)
            if result.cancelled:
                self._superseded = True
            elif result.error is not None:
                self.failed[key] = result.error
            else:
                self.done[key] = compact(result.made_with.get("fingerprint"))

    def _earlier_results(self) -> Iterator[tuple[int, EarlierResult]]:
        """The results in the file, each with its position; removes an incomplete last line."""
        for at, result in read_results(self._path, "Give another name to --output, or move that file away."):
            if result is None:
                os.truncate(self._path, at)
                return
            yield at, result
