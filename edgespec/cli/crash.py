"""A message for crashes in native code, which Python itself cannot report.

Python's faulthandler writes its stack dump into a pipe. A shell beside the program reads the pipe: if a line
arrives, it prints a message for people; if the pipe just ends, there was no crash.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys

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


def announce_crashes(*, verbose: bool) -> None:
    """End crashes of this process with a message on standard error.

    Args:
        verbose: print the Python frames too.
    """
    global _pipe
    try:
        reader, _pipe = os.pipe()
        try:
            os.posix_spawn(
                _SHELL,
                [_SHELL, "-c", _SCRIPT, _SHELL, _HINT, "1" if verbose else ""],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, reader, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                ],
                setpgroup=0,  # so that Ctrl-C does not reach it
            )
        finally:
            os.close(reader)
        faulthandler.enable(_pipe, all_threads=False)
    except (OSError, AttributeError):  # no such shell, or no such call, as on Windows
        with contextlib.suppress(OSError, ValueError, AttributeError):
            faulthandler.enable(sys.stderr, all_threads=False)
