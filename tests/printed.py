"""The strings of the sources, as far as they may be printed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def strings(path: Path) -> Iterator[str]:
    """The string literals of a module but its docstrings, with {} in place of what f-strings insert."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [value for value in node.values if isinstance(value, ast.Constant)]
            skipped.update(map(id, parts))
            yield "".join(
                str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value
