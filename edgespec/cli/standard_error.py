"""Standard error that never fails: a full disk or a reader that is gone must not cost an answer."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_DESCRIPTOR = 2


def never_fail() -> None:
    """Replace this process's standard error by one that drops what cannot be written."""
    before = sys.stderr
    if before is not None and sys.platform == "win32":
        return  # the descriptor of a console there is not what text goes through
    with contextlib.suppress(OSError):
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_Lossy(_nowhere() if before is None else _DESCRIPTOR, "wb", closefd=False)),
            encoding=before.encoding if before else "utf-8",
            errors=before.errors if before else "backslashreplace",
            line_buffering=True,
            write_through=True,
        )


class _Lossy(io.FileIO):
    """A file that counts as written what it could not write."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        # None: a slow terminal that another program set to non-blocking.
        return memoryview(data).nbytes if written is None else written


def _nowhere() -> int:
    """A descriptor whose output is dropped: that of standard error, if no file has got it meanwhile."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(_DESCRIPTOR)
    except OSError:  # it is closed; llama.cpp and child processes write there too
        os.dup2(nowhere, _DESCRIPTOR)
    return nowhere
