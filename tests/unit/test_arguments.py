"""Values that the annotations of the library allow, and messages about others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest

from edgespec.arguments import check_fields, check_type, checks_arguments
from edgespec.errors import UsageError
from edgespec.text.encoding import Prompt


class Closable(Protocol):
    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("hint", "allowed", "refused"),
    [
        (int, [0, -1, 10**5000, np.int64(3)], [True, 1.0, "1", None, float("nan")]),
        (float, [0, 0.5, np.float32(0.5), Fraction(1, 2), float("inf")], [True, "0.5", None, 1j]),
        (bool, [True, False], [0, 1, None, "yes"]),
        (str, ["", "a"], [b"a", None, Path("a")]),
        (int | None, [None, 1], ["", 1.5]),
        (str | os.PathLike[str], ["a", Path("a")], [b"a", 1]),
        (Sequence[str], [[], ["a"], ("a",)], ["a", b"a", ["a", 1], {"a"}, {"a": 1}, None]),
        (tuple[str, ...], [(), ["a"]], ["a", [1]]),
        (Sequence[int], [[1], np.array([1, 2])], [np.array(1), [True], "12"]),
        (Iterable[int], [[1], iter([1]), {1}], ["a", b"a", {"a": 1}, ["a"], 1]),
        (Mapping[str, Any], [{}, {"a": object()}], [{1: 2}, [], None]),
        (Callable[[int], None], [print, int], ["print", None]),
        (Literal["a", 1], ["a", 1], ["b", True, [], None]),
        (Closable, [open(os.devnull, "rb")], [object(), None]),  # noqa: PTH123, SIM115
        (Any, [None, object()], []),
        (Prompt, ["a", [1, 2], [{"role": "user", "content": "a"}]], [1, [1, {}], [["a"]], [b"a"], None]),
    ],
)
def test_values_that_annotations_allow(hint: Any, allowed: list[Any], refused: list[Any]) -> None:
    for value in allowed:
        check_type("it", value, hint)
    for value in refused:
        with pytest.raises(UsageError, match=r"^it must be .*, not .*\.$"):
            check_type("it", value, hint)
    if hint is Closable:
        allowed[0].close()


@checks_arguments
def _add(number: int, *, more: Sequence[int] | None = None) -> int:
    return number + sum(more or ())


def test_arguments_are_checked_by_position_and_by_name() -> None:
    assert _add(1, more=[2]) == 3
    assert _add(number=1, more=None) == 1
    with pytest.raises(UsageError) as raised:
        _add(1, more="23")  # type: ignore[arg-type]
    assert str(raised.value) == "more must be a list of integers, not '23'."
    with pytest.raises(UsageError, match=r"^number must be an integer, not '1'\.$"):
        _add("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="_add"):
        _add()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"_add.*'other'"):
        _add(1, other=2)  # type: ignore[call-arg]


def test_fields_are_checked() -> None:
    @dataclass
    class Pair:
        left: int
        right: str | None = None

    check_fields(Pair(1, "a"))
    with pytest.raises(UsageError, match=r"^right must be a string, not 2\.$"):
        check_fields(Pair(1, 2))  # type: ignore[arg-type]


def test_a_value_that_cannot_be_shown_is_named_by_its_type() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    for value, name in ((Mute(), "Mute"), ([10**5000], "list")):
        with pytest.raises(UsageError, match=rf"^it must be a string, not an object of type {name}\."):
            check_type("it", value, str)
    with pytest.raises(UsageError) as raised:
        check_type("it", ["a" * 1000], str)
    assert len(str(raised.value)) < 120
