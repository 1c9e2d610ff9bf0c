"""The documentation builds, names files that exist, and its reference is that of the program."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("CONTRIBUTING.md"), *(ROOT / "docs").rglob("*.md")])
PATH = re.compile(r"\b(?:edgespec|tests|scripts|benchmarks)/[\w./-]*\w")
ROW = re.compile(r"^\| `(edgespec/[\w/]+\.py)` \| (.*) \|$", re.MULTILINE)


def test_the_command_line_reference_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "reference" / "library" / "index.html").read_text("utf-8")
    assert "One target and one drafter, generating one answer at a time, or many in shared passes." in page


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("nav:")[2]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f": {page}\n" not in navigation + "\n"} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_path_that_is_named_exists(page: Path) -> None:
    named = {path for path in PATH.findall(page.read_text("utf-8")) if not (ROOT / path).exists()}
    assert named == set()


def test_the_walk_names_what_its_files_define() -> None:
    """A name in a row of the walk is defined in some file of the walk."""
    rows = ROW.findall((ROOT / "docs" / "architecture.md").read_text("utf-8"))
    assert len(rows) > 10
    defined = set().union(*(_definitions(ROOT / path) for path, _ in rows))
    named = {name for _, text in rows for name in re.findall(r"`([A-Za-z_][\w.]*)`", text)}
    assert named - defined - {"llama_decode"} == set()


def _definitions(path: Path) -> set[str]:
    """Functions, classes and their methods."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names
