"""Nothing in the working folder runs because of its name, and nothing but one module starts children."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import edgespec
from edgespec.processes import children
from edgespec.processes.children import find_program, python_command, run
from tests.waiting import wait_until_ended

SOURCES = Path(edgespec.__file__).parent

# What would start a child, by the qualified name or the beginning of it.
_STARTERS = re.compile(
    r"subprocess\.(Popen|run|call|check_\w+|get\w+)|os\.(system|popen|startfile|fork\w*|spawn\w+|exec\w+|posix_spawn\w*)"
    r"|multiprocessing|concurrent\.futures\.ProcessPoolExecutor|asyncio\.create_subprocess\w+|pty|shutil\.which"
    r"|runpy"
)
_ALLOWED = {
    "processes/children.py": {"subprocess.Popen", "subprocess.run", "shutil.which"},
    "base/installation.py": {"shutil.which"},  # for a hint
    "processes/limits.py": {"subprocess.Popen"},  # for types
}


def starters(source: str) -> Iterator[str]:
    """The names in a source by which children are started."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if _STARTERS.fullmatch(name))


def test_one_module_starts_children() -> None:
    found = {
        path.relative_to(SOURCES).as_posix(): names
        for path in SOURCES.rglob("*.py")
        if (names := set(starters(path.read_text("utf-8"))))
    }
    assert found == _ALLOWED


def test_no_child_of_python_is_started_with_the_working_folder_on_its_path() -> None:
    """By `-m`, or by another command than `python_command` makes."""
    found = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.List)
        and node.elts
        and ast.unparse(node.elts[0]) == "sys.executable"
        and ast.unparse(node.elts[1]) != "'-I'"
    }
    assert not found


@pytest.fixture
def strange_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with modules and programs that leave a mark when they are run."""
    folder = tmp_path / "strange"
    folder.mkdir()
    mark = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + '\\n')\n"
    for name in ("numpy", "json", "ctypes", "llama_cpp", "dataclasses", "sitecustomize", "edgespec"):
        (folder / f"{name}.py").write_text(mark)
    for name in ("c++", "g++", "nvidia-smi", "sysctl", "uname", "xclip", "nano", "as", "ld"):
        (folder / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path / 'ran'}\n")
        (folder / name).chmod(0o755)
    monkeypatch.chdir(folder)
    return folder


def ran(folder: Path) -> str:
    """What has left a mark."""
    mark = folder.with_name("ran")
    return mark.read_text() if mark.exists() else ""


def test_a_child_imports_nothing_of_the_working_folder(
    strange_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for entry in ("", ".", str(strange_folder)):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "path", [entry, *sys.path])
            done = run(python_command("json.tool", "--help"), capture_output=True, text=True)
        assert "usage:" in done.stdout, done.stderr
    assert not ran(strange_folder)


def test_a_child_has_the_import_path_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.py").write_text(
        "import json, sys\ndef main():\n    print(json.dumps([sys.argv[1:], sys.path]))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    arguments, path = json.loads(run(python_command("elsewhere", "a b", "é"), stdout=subprocess.PIPE).stdout)
    assert arguments == ["a b", "é"]
    assert path[0] == str(tmp_path)
    monkeypatch.chdir(children._ROOT)  # a checkout, where the package itself lies
    assert children._ROOT in json.loads(python_command("elsewhere")[5])


@pytest.mark.skipif(sys.platform not in ("linux", "win32"), reason="other systems do not do it")
def test_a_child_ends_with_the_program_that_started_it() -> None:
    hangs = "import time; time.sleep(1e6)"
    program = (
        "import sys; from edgespec.processes.children import start\n"
        f"print(start([sys.executable, '-c', {hangs!r}], with_parent=True).pid, flush=True); {hangs}"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until_ended(child)


@pytest.mark.skipif(sys.platform == "win32", reason="shell scripts")
@pytest.mark.parametrize("entry", ["", ".", "sub/.."])
def test_programs_are_not_looked_for_in_the_working_folder(
    entry: str, strange_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (strange_folder / "sub").mkdir()
    monkeypatch.setenv("PATH", os.pathsep.join([entry, os.environ["PATH"]]))
    assert find_program("xclip") != "xclip"
    assert not str(find_program("nvidia-smi")).startswith(str(strange_folder))
    assert Path(str(find_program("uname"))).is_absolute()
    run(["/bin/sh", "-c", "uname"], stdout=subprocess.DEVNULL)  # a program that starts another
    monkeypatch.setenv("PATH", entry)
    with pytest.raises(FileNotFoundError):
        run(["xclip"])
    assert not ran(strange_folder)
    assert find_program("./xclip") == "./xclip", "a path is what a person means"


@pytest.mark.skipif(sys.platform == "win32", reason="PATH is searched differently")
def test_the_program_runs_nothing_of_the_working_folder(
    strange_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The console script: `generate` tries kernels, loads, and renders a template in children."""
    program = Path(sys.executable).with_name("edgespec")
    if not program.exists():
        pytest.skip("the package is not installed")
    monkeypatch.setenv("PATH", os.pathsep.join([".", "", os.environ["PATH"]]))
    monkeypatch.setenv("HOME", str(strange_folder.parent / "home"))
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    for words in ("generate -p hi --max-tokens 2", "doctor --json --no-disk-check"):
        done = subprocess.run([program, *words.split()], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert not ran(strange_folder)
