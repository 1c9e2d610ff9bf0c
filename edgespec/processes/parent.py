"""Child processes that end when their parent does, however it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9  # on Linux
# The setting outlives `execvp`, and nothing but the standard library is on an isolated path.
_LAUNCH = (
    "import ctypes, os, sys\n"
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {_SIGKILL}, 0, 0, 0)\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


def ended_with_parent(command: Sequence[str]) -> list[str]:
    """The command, started so that Linux kills it when the thread that started it ends.

    For a command that its thread waits for; what it starts itself is not killed. Elsewhere, and where the
    program cannot be run, the command stays as it is.
    """
    if sys.platform != "linux" or not os.access(command[0], os.X_OK):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command]
