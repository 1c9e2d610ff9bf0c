"""Child processes; nothing else starts any.

The working folder may be a stranger's. Nothing in it is run because of its name: children of Python do not
import from it, and programs are not looked for in it, even if PATH has an empty or relative entry.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from edgespec.processes.limits import end_with_this_process

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


def end_with_standard_input() -> None:
    """Have a thread end this process when its standard input ends, whose other end the parent holds.

    Windows loads no library while a thread reads from that pipe; `start(with_parent=True)` does it there.
    """
    if sys.platform != "win32":
        threading.Thread(target=_await_end, daemon=True).start()


def _await_end() -> None:
    # Not through sys.stdin, whose lock this thread would hold when the process ends.
    while os.read(0, 1):
        pass
    os._exit(1)


@contextmanager
def environment_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the time of the block, for what is loaded or started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def child_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: this process's and `variables`, with the absolute entries of PATH alone.

    By an empty or relative one, programs such as compilers would run others that lie in the working folder.
    """
    entries = os.environ.get("PATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(os.path.isabs, entries))
    return {**os.environ, "PATH": path or os.defpath, **(variables or {})}  # an empty PATH is the folder, too


ChildProcess: TypeAlias = "subprocess.Popen[Any]"  # noqa: TID251

_ROOT = str(Path(__file__).parents[2])  # of the package
_BOOT = (
    "import json, sys\n"
    "sys.path[:] = json.loads(sys.argv[1])\n"
    "del sys.argv[:2]\n"
    "from importlib import import_module\n"
    "sys.exit(import_module(sys.argv[0]).main())\n"
)


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that calls `main()` of a module in an isolated Python, with the import path of this one.

    `python -m` would import from the working folder first.
    """
    path = json.dumps(_import_path())
    return [sys.executable, "-I", f"-Xutf8={sys.flags.utf8_mode}", "-c", _BOOT, path, module, *arguments]


def find_program(name: str) -> str | None:
    """The path of a program; None if there is none in the absolute entries of PATH."""
    found = shutil.which(name, path=child_environment()["PATH"])  # noqa: TID251
    # Windows looks in the working folder, too.
    return found if found and (_is_path(name) or Path(found).is_absolute()) else None


def start(
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    with_parent: bool = False,
    **options: Any,
) -> ChildProcess:
    """Start a program.

    Args:
        variables: of the environment, beside those of this process.
        with_parent: end it when the thread that starts it ends, see `ended_with_parent`; on Windows, when
            this process does.
        options: of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started; FileNotFoundError if there is no such program.
    """
    command = _found(command, with_parent=with_parent)
    child = subprocess.Popen(command, env=child_environment(variables), **options)  # noqa: TID251
    if with_parent:
        end_with_this_process(child)
    return child


def run(
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    with_parent: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a program until it ends; without `input` or `stdin` its standard input is empty.

    Args:
        variables, with_parent: as of `start`; Windows does not end it with this process.
        options: of `subprocess.run`.

    Raises:
        OSError: as of `start`.
        subprocess.SubprocessError: it did not end in time, or failed and `check` is set.
    """
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    command = _found(command, with_parent=with_parent)
    return subprocess.run(command, env=child_environment(variables), **options)  # noqa: TID251


def _found(command: Sequence[str], *, with_parent: bool) -> list[str]:
    program = command[0] if _is_path(command[0]) else find_program(command[0])
    if program is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    found = [program, *command[1:]]
    return ended_with_parent(found) if with_parent else found


def _is_path(name: str) -> bool:
    return os.sep in name or "/" in name


def _import_path() -> list[str]:
    """The import path of this process but for the working folder, unless it is Python's or the package's."""
    trusted = {_ROOT, *sysconfig.get_paths().values()}
    return [path for path in dict.fromkeys([*sys.path, _ROOT]) if path in trusted or not _is_here(path)]


def _is_here(path: str) -> bool:
    return not Path(path).is_absolute() or (Path(path).exists() and Path(path).samefile(os.curdir))
