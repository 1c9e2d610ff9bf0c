"""Standard error that never fails, and a message on it for crashes in native code.

A full disk or a reader that is gone must not cost an answer. Python itself cannot report a crash: its
faulthandler writes a stack dump into a pipe. A shell beside the program reads the pipe: if a line arrives, it
prints a message for people; if the pipe just ends, there was no crash.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import sys
from typing import TYPE_CHECKING

from edgespec.processes.environment import child_environment

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_DESCRIPTOR = 2
_SHELL = "/bin/sh"
_SCRIPT = """
IFS= read -r first || exit 0
if [ -n "$2" ]; then { printf '%s\\n' "$first"; cat; } >&2; else cat >/dev/null; fi
printf '\\nError: EdgeSpec crashed in native code (%s), most likely in llama.cpp.\\n%s\\n' \\
    "${first#Fatal Python error: }" "$1" >&2
"""
_HINT = (
    "Likely causes are a llama.cpp that was compiled for another processor or by a faulty compiler, "
    "and a model file that is damaged or, with a bus error, was truncated while in use. "
    "'edgespec doctor' tries llama.cpp's kernels and says what to do; "
    "EDGESPEC_KERNELS=plain leaves the rearranged ones out; --verbose shows where it crashed."
)

_pipe = -1  # stays open until the program ends


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


def announce_crashes(*, verbose: bool) -> None:
    """End crashes of this process with a message on standard error.

    Args:
        verbose: print the Python frames too.
    """
    global _pipe
    try:
        reader, _pipe = os.pipe()
        try:
            _start_shell(reader, verbose=verbose)
        finally:
            os.close(reader)
        faulthandler.enable(_pipe, all_threads=False)
    except OSError:  # no such shell
        with contextlib.suppress(OSError, ValueError, AttributeError):
            faulthandler.enable(sys.stderr, all_threads=False)


def _start_shell(reader: int, *, verbose: bool) -> None:
    """Start the shell that reads the pipe.

    Raises:
        OSError: there is none.
    """
    if sys.platform == "win32":
        raise FileNotFoundError(_SHELL)
    os.posix_spawn(  # noqa: TID251 (importing subprocess would take longer)
        _SHELL,
        [_SHELL, "-c", _SCRIPT, _SHELL, _HINT, "1" if verbose else ""],
        child_environment(),
        file_actions=[
            (os.POSIX_SPAWN_DUP2, reader, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        ],
        setpgroup=0,  # so that Ctrl-C does not reach it
    )
