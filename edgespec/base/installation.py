"""Commands for hints: only those that exist where EdgeSpec is installed, in PowerShell's words on Windows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from edgespec.base.prebuilt import PACKAGE, installed_wheel

POWERSHELL = sys.platform == "win32"
_SCRIPT = Path(__file__).parents[2] / "scripts" / "setup.py"
_PYTHON = "py" if POWERSHELL else "python3"
_THEN = "; " if POWERSHELL else " && "  # Windows' own PowerShell has no other


def module_command(module: str) -> str:
    """Return a shell command that runs a module of this environment, whether or not that is activated.

    Environments that pipx and uvx make are not: python is another one there.
    """
    here, found = Path(sys.executable), shutil.which("python")  # noqa: TID251 (for a hint)
    if found is not None and Path(found).absolute().parent == here.parent:
        return f"python -m {module}"
    program = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    if POWERSHELL:
        return f'& "{program}" -m {module}'
    return f"{shlex.quote(str(program))} -m {module}"


def install_command(*, rebuild: bool = False, environment: str = "") -> str:
    """Return a shell command that installs llama.cpp: by scripts/setup.py in a checkout, by pip elsewhere.

    Args:
        rebuild: compile it even if it is installed.
        environment: variables for the compiler, which scripts/setup.py finds by itself.
    """
    first = _uninstall_wheel() if rebuild else ""
    if _SCRIPT.exists():
        return f"{first}{_PYTHON} {_from_here(_SCRIPT)}{' --rebuild' if rebuild else ''}"
    if not rebuild:
        return f"pip install '{_llama_cpp()}'"
    return compile_command("-DGGML_NATIVE=ON -DGGML_RPC=ON", environment=environment)


def compile_command(arguments: str, *, environment: str = "") -> str:
    """Return a shell command by which pip compiles llama.cpp with these arguments of CMake, and has it used.

    Args:
        environment: variables for the compiler.
    """
    setting = f'$env:CMAKE_ARGS = "{arguments}"; ' if POWERSHELL else f'CMAKE_ARGS="{arguments}" '
    return (
        f"{_uninstall_wheel()}{environment}{' ' if environment else ''}{setting}pip install "
        f"--force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python '{_llama_cpp()}'"
    )


def _from_here(path: Path) -> str:
    try:
        return os.path.relpath(path)
    except ValueError:  # Windows: on another drive
        return str(path)


def _uninstall_wheel() -> str:
    """The beginning of a command that compiles llama.cpp: the wheel would be used in its place."""
    return f"pip uninstall -y {PACKAGE}{_THEN}" if installed_wheel() is not None else ""


def _llama_cpp() -> str:
    """Return the requirement of this version of EdgeSpec."""
    from importlib import metadata  # takes long to import

    try:
        required = metadata.requires("edgespec") or []
    except metadata.PackageNotFoundError:
        required = []
    return next((name for name in required if re.match("llama.cpp.python", name)), "llama-cpp-python")
