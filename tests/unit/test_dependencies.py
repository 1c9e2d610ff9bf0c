"""Every library that the package imports is declared, so that no other library's choice can take it away."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _declared() -> set[str]:
    """The distributions that pyproject.toml names for users, not for developers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(extras[name] for name in extras if name not in ("dev", "docs"))]
    names = (re.match(r"[\w.-]+", line) for entries in lists for line in entries)
    return {_normal(name.group()) for name in names if name}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _imported() -> dict[str, str]:
    """Each module outside the standard library that the package imports, with a file that does."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "edgespec").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                found.setdefault(name.partition(".")[0], str(path.relative_to(ROOT)))
    own = {"edgespec", *(folder.name for folder in (ROOT / "wheels").iterdir())}
    others = sys.stdlib_module_names | own | {"_typeshed"}  # the last is of type checkers alone
    return {name: at for name, at in found.items() if name not in others}


def test_imports_are_declared() -> None:
    imported, declared, providers = _imported(), _declared(), packages_distributions()
    assert {"numpy", "typer"} <= set(imported)
    missing = {
        name: at
        for name, at in imported.items()
        if not declared & {_normal(one) for one in providers.get(name, [name])}  # some need not be installed
    }
    assert not missing, "declare what provides these modules in pyproject.toml"
