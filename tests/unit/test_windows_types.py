"""Nothing but what Windows has is used there: mypy's view of the modules that ask the system for something.

EdgeSpec was tried under Wine alone. These checks keep modules importable on Windows, and calls of what only
POSIX has behind `sys.platform`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "edgespec"
POSIX_ONLY = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
OF_THE_SYSTEM = re.compile(
    rf"^\s*(import|from) (os|signal|mmap|select|stat|{'|'.join(sorted(POSIX_ONLY))})\b", re.MULTILINE
)

# Each module on its own: types of other packages are not looked at, which takes most of mypy's time.
SETTINGS = """
[mypy]
platform = win32
python_version = 3.11
follow_imports = skip
ignore_missing_imports = True
[mypy-numpy.*,matplotlib.*,psutil.*,llguidance.*,xxhash.*]
follow_imports = skip
follow_imports_for_stubs = True
"""


def faults(files: Sequence[Path], folder: Path) -> list[str]:
    """What mypy says that modules of the standard library lack on Windows."""
    pytest.importorskip("mypy")
    settings = folder / "mypy.ini"
    settings.write_text(SETTINGS, "utf-8")
    checked = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", str(settings)),
            *("--cache-dir", str(folder / "cache"), *map(str, files)),
        ],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode in (0, 1), checked.stdout + checked.stderr
    # Arrays of NumPy, whose types are left out, have no attributes either, and a question mark.
    return [line for line in checked.stdout.splitlines() if "[attr-defined]" in line and "? has" not in line]


def test_calls_that_only_posix_has_are_guarded(tmp_path: Path) -> None:
    files = [path for path in PACKAGE.rglob("*.py") if OF_THE_SYSTEM.search(path.read_text("utf-8"))]
    assert len(files) > 50
    assert faults(files, tmp_path) == []


def test_a_call_without_a_guard_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import os\n\nos.killpg(1, 9)\n", "utf-8")
    [found] = faults([wrong], tmp_path)
    assert '"killpg"' in found


def imported(path: Path) -> set[str]:
    """The modules that a module imports when it is imported, whatever the system is."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return found


@pytest.mark.parametrize("package", sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()))
def test_no_module_needs_what_only_posix_has(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        assert imported(path).isdisjoint(POSIX_ONLY), path
