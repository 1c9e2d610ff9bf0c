"""Regular expressions take time in proportion to the text, whoever wrote it."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.serving.page import _FILE
from tests.regex_steps import Expression, TooManyStepsError

_ROOT = Path(edgespec.__file__).parent
# What these read was written by the program itself, or is the user's own command line.
_OWN_TEXT = ("edgespec.cli.commands.config",)
_METHODS = ("match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer")
_SHORT, _LONG = 20, 80
_MANY = 30_000  # for a short text
_MOST = 8  # times the steps for a text of four times the length: 4 is in proportion, and 16 quadratic


def _module(path: Path) -> str:
    return ".".join(("edgespec", *path.relative_to(_ROOT).with_suffix("").parts))


def _called(tree: ast.AST, module: str) -> Iterator[tuple[str | bytes, int, str]]:
    """Expressions in calls such as `re.sub("...", ...)`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "re"
            and node.func.attr in _METHODS
            and isinstance(pattern := node.args[0], ast.Constant)
        ):
            named = {name.attr for name in ast.walk(node) if isinstance(name, ast.Attribute)}
            flags = sum(getattr(re, name) for name in named & {"DOTALL", "MULTILINE", "IGNORECASE", "ASCII"})
            yield pattern.value, flags, node.func.attr


def _compiled(tree: ast.AST, module: str) -> Iterator[tuple[str | bytes, int, str]]:
    """Expressions that a module or its classes keep, with the methods that are called on them."""
    loaded = importlib.import_module(module)
    kept: dict[str, Any] = dict(vars(loaded))
    for value in list(kept.values()):
        if isinstance(value, type) and value.__module__ == module:
            kept |= vars(value)
    for name, value in kept.items():
        if not isinstance(value, re.Pattern):
            continue
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and _name(node.value) == name and node.attr in _METHODS
        }
        for method in sorted(used):
            yield value.pattern, value.flags, method


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _all() -> Iterator[Any]:
    for path in sorted(_ROOT.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "import re\n" not in source or _module(path) in _OWN_TEXT:
            continue
        module, tree = _module(path), ast.parse(source)
        for find in (_called, _compiled):
            for pattern, flags, method in find(tree, module):
                yield pytest.param(pattern, flags, method, id=f"{module}:{method}:{pattern!r:.60}")


def _of_the_page() -> Iterator[Any]:
    """The expressions of the page's script, in Python's syntax."""
    literal = re.compile(
        r"(?<=[(=,\s\[])/(?![*/])((?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+)/([gimsuy]*)(?=[,;.)\]\s])"
    )
    for pattern, flags in literal.findall(_FILE.read_text(encoding="utf-8").partition("<script>")[2]):
        if r"\p{" in pattern:
            continue  # a single class of characters
        python = re.sub(r"\(\?<(?=\w)", "(?P<", pattern).replace("[^]", r"[\s\S]").replace(r"\/", "/")
        method = "finditer" if "g" in flags else "match" if "y" in flags else "search"
        yield pytest.param(python, 0, method, id=f"page:{python:.60}")


@pytest.mark.parametrize(("pattern", "flags", "method"), [*_all(), *_of_the_page()])
def test_steps_grow_with_the_text(pattern: str | bytes, flags: int, method: str) -> None:
    expression = Expression(pattern, flags, method)
    for short, long in zip(expression.hostile(_SHORT), expression.hostile(_LONG), strict=True):
        few = expression.count(short, _MANY)
        try:
            expression.count(long, _MOST * few)
        except TooManyStepsError:
            pytest.fail(f"{few} steps for {short!r}, and more than {_MOST * few} for four times its length")


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"\s+$", r"a*a*b", r"(?:a|aa)+$", r"a.*?b.*?c"])
def test_expressions_that_backtrack_are_seen(pattern: str) -> None:
    with pytest.raises((pytest.fail.Exception, TooManyStepsError)):
        test_steps_grow_with_the_text(pattern, 0, "search")


@pytest.mark.parametrize(
    "pattern", [r"(a|b)*?c\b", r"^x(?=a+)\d{2,}$", r"[a-cA-C]+(?<!b)", r"(['\"]).*\1", r"\W+(?!\s)"]
)
def test_steps_are_those_of_an_engine_that_finds_the_same(pattern: str) -> None:
    for text in ("abacc", "xaa11", "ABCabcb c", "'a' \"b'", "--  -a", ""):
        expression, ends = Expression(pattern), []
        expression.count(text)
        for start in range(len(text) + 1):
            ends.clear()
            expression._matcher(start, lambda at, ends=ends: not ends.append(at))  # type: ignore[misc]
            found = re.compile(pattern).match(text, start)
            assert (found.end() if found else None) == (ends[0] if ends else None)
