"""Counts the steps that a backtracking engine, such as Python's, takes for a regular expression."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

Then = Callable[[int], bool]
Matcher = Callable[[int, Then], bool]
_MANY = 16  # repeats with a higher limit count as endless
_SAMPLES = {op.CATEGORY_DIGIT: "0", op.CATEGORY_SPACE: " ", op.CATEGORY_WORD: "a"}
_END = "\n\0"  # which hardly any expression matches


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Raise Python's limit of recursion for a while: code in C, such as json's, trusts it with its stack."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 100_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


class TooManyStepsError(Exception):
    """A text takes more steps than it may."""


class Expression:
    """A regular expression whose steps are counted: tests of a character, or of a position.

    Args:
        pattern: in Python's syntax.
        method: of `re.Pattern`, such as "match" or "sub".
    """

    def __init__(self, pattern: str | bytes, flags: int = 0, method: str = "search") -> None:
        if isinstance(pattern, bytes):
            pattern, flags = pattern.decode("latin-1"), flags | re.ASCII
        self._tree = _parser.parse(pattern, flags & ~re.UNICODE)
        self._flags = self._tree.state.flags
        self._method = method
        self._text = ""
        self._groups: dict[int, tuple[int, int]] = {}
        self._steps = self._most = 0
        self._matcher = self._sequence(list(self._tree))

    @_deep_recursion()
    def count(self, text: str, most: int = 1_000_000) -> int:
        """The steps for a text; all matches are looked for where the method does so.

        Raises:
            TooManyStepsError: there are more than `most`.
        """
        self._text, self._steps, self._most, start = text, 0, most, 0
        if self._method in ("match", "fullmatch"):
            is_end = self._method == "fullmatch"
            self._matcher(0, lambda at: not is_end or at == len(text))
            return self._steps
        ends: list[int] = []
        while start <= len(text):
            ends.clear()
            self._groups.clear()
            found = self._matcher(start, lambda at: not ends.append(at))  # type: ignore[func-returns-value]
            if found and self._method == "search":
                break
            start = max(start + 1, ends[0]) if found else start + 1
        return self._steps

    def _step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > self._most:
            raise TooManyStepsError

    def hostile(self, n: int) -> Iterator[str]:
        """Texts of about n repetitions that almost match: what leads to each repeat, and much of one kind."""
        leads = {"", *self._leads(list(self._tree), "")}
        letters = sorted({*self._letters(list(self._tree)), " ", "a"})
        for lead in sorted(leads):
            for letter in letters:
                yield lead + letter * n + _END
        for unit in sorted(leads | {self._sample(list(self._tree))}):
            for letter in ("", *letters):
                part = unit + letter
                yield part * (n // min(max(1, len(part)), 8)) + _END

    def _sample(self, nodes: list[Any]) -> str:
        """A short text that matches, but for assertions."""
        text = ""
        for kind, value in nodes:
            if kind is op.BRANCH:
                text += self._sample(list(value[1][0]))
            elif kind is op.SUBPATTERN:
                text += self._sample(list(value[-1]))
            elif kind is op.ATOMIC_GROUP:
                text += self._sample(list(value))
            elif kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
                text += self._sample(list(value[2])) * max(1, min(value[0], _MANY))
            elif kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
                text += next(iter(self._letters([(kind, value)])))
        return text

    def _leads(self, nodes: list[Any], before: str) -> Iterator[str]:
        """What leads to each repeat."""
        for place, (kind, value) in enumerate(nodes):
            lead = before + self._sample(nodes[:place])
            if kind is op.BRANCH:
                for branch in value[1]:
                    yield from self._leads(list(branch), lead)
            elif kind is op.SUBPATTERN:
                yield from self._leads(list(value[-1]), lead)
            elif kind in (op.ATOMIC_GROUP,):
                yield from self._leads(list(value), lead)
            elif kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
                yield lead
                yield from self._leads(list(value[2]), lead)

    def _letters(self, nodes: Any) -> Iterator[str]:
        """Characters that a part of the expression matches, one of each kind."""
        for kind, value in nodes:
            if kind is op.LITERAL:
                yield chr(value)
            elif kind in (op.NOT_LITERAL, op.ANY):
                yield from [c for c in "~!" if kind is op.ANY or ord(c) != value][:1]
            elif kind is op.IN and value[0][0] is op.NEGATE:
                yield from [c for c in 'a"~ !' if self._is_in(c, value)][:2]
            elif kind is op.IN:
                for item, detail in value:
                    if item is op.CATEGORY:
                        yield _SAMPLES.get(detail, "~")
                    else:
                        yield chr(detail if item is op.LITERAL else detail[0])
            elif kind is op.BRANCH:
                for branch in value[1]:
                    yield from self._letters(branch)
            elif kind in (op.SUBPATTERN, op.ASSERT, op.ASSERT_NOT):
                yield from self._letters(value[-1])
            elif kind is op.ATOMIC_GROUP:
                yield from self._letters(value)
            elif kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
                yield from self._letters(value[2])

    def _is_in(self, letter: str, items: Any) -> bool:
        negated = items[0][0] is op.NEGATE
        forms = {letter, letter.lower(), letter.upper()} if self._flags & re.IGNORECASE else {letter}
        for kind, value in items[negated:]:
            if kind is op.LITERAL and any(ord(c) == value for c in forms):
                return not negated
            if kind is op.RANGE and any(len(c) == 1 and value[0] <= ord(c) <= value[1] for c in forms):
                return not negated
            if kind is op.CATEGORY and self._is_of(letter, str(value)):
                return not negated
        return negated

    def _is_of(self, letter: str, category: str) -> bool:
        name = category.removeprefix("CATEGORY_").removeprefix("UNI_")
        escape = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}[name.removeprefix("NOT_")]
        return bool(re.match(escape, letter)) is not name.startswith("NOT_")

    def _sequence(self, nodes: list[Any]) -> Matcher:
        matchers = [self._node(*node) for node in nodes]

        def run(place: int, at: int, then: Then) -> bool:
            if place == len(matchers):
                return then(at)
            return matchers[place](at, lambda after: run(place + 1, after, then))

        return lambda at, then: run(0, at, then)

    def _node(self, kind: Any, value: Any) -> Matcher:
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self._one(self._test(kind, value))
        if kind is op.BRANCH:
            branches = [self._sequence(list(branch)) for branch in value[1]]
            return lambda at, then: any(branch(at, then) for branch in branches)
        if kind is op.SUBPATTERN:
            return self._group(value[0], self._sequence(list(value[-1])))
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            return self._repeat(kind, *value)
        if kind is op.ATOMIC_GROUP:
            return self._atomic(self._sequence(list(value)))
        if kind in (op.ASSERT, op.ASSERT_NOT):
            return self._assertion(kind is op.ASSERT, *value)
        if kind is op.GROUPREF:
            return self._reference(value)
        assert kind is op.AT, kind
        return self._position(str(value))

    def _test(self, kind: Any, value: Any) -> Callable[[str], bool]:
        if kind is op.ANY:
            return lambda letter: bool(self._flags & re.DOTALL) or letter != "\n"
        items = value if kind is op.IN else [(op.LITERAL, value)]
        wanted = kind is not op.NOT_LITERAL
        return cache(lambda letter: self._is_in(letter, items) is wanted)

    def _one(self, test: Callable[[str], bool]) -> Matcher:
        def match(at: int, then: Then) -> bool:
            self._step()
            return at < len(self._text) and test(self._text[at]) and then(at + 1)

        return match

    def _group(self, number: int | None, inner: Matcher) -> Matcher:
        def match(at: int, then: Then) -> bool:
            def ended(after: int) -> bool:
                if number is not None:
                    self._groups[number] = (at, after)
                return then(after)

            return inner(at, ended)

        return match

    def _repeat(self, kind: Any, least: int, most: Any, part: Any) -> Matcher:
        most = 1 << 60 if most is op.MAXREPEAT else int(most)
        inner = self._sequence(list(part))
        greedy = kind is not op.MIN_REPEAT

        def match(at: int, then: Then, done: int = 0) -> bool:
            self._step()

            def again(after: int) -> bool:
                return (after > at or done < least) and match(after, then, done + 1)

            if done < least:
                return inner(at, again)
            if greedy:
                return (done < most and inner(at, again)) or then(at)
            return then(at) or (done < most and inner(at, again))

        return self._atomic(match) if kind is op.POSSESSIVE_REPEAT else match

    def _atomic(self, inner: Matcher) -> Matcher:
        def match(at: int, then: Then) -> bool:
            ends: list[int] = []
            found = inner(at, lambda after: not ends.append(after))  # type: ignore[func-returns-value]
            return found and then(ends[0])

        return match

    def _assertion(self, wanted: bool, direction: int, part: Any) -> Matcher:
        inner, width = self._sequence(list(part)), part.getwidth()[0]

        def match(at: int, then: Then) -> bool:
            self._step()
            start = at if direction > 0 else at - width
            found = start >= 0 and inner(start, lambda after: direction > 0 or after == at)
            return found is wanted and then(at)

        return match

    def _reference(self, number: int) -> Matcher:
        def match(at: int, then: Then) -> bool:
            start, end = self._groups.get(number, (0, 0))
            self._step(1 + end - start)
            return self._text.startswith(self._text[start:end], at) and then(at + end - start)

        return match

    def _position(self, where: str) -> Matcher:
        escape = {
            "AT_BEGINNING": "^",
            "AT_BEGINNING_STRING": r"\A",
            "AT_END": "$",
            "AT_END_STRING": r"\Z",
            "AT_BOUNDARY": r"\b",
            "AT_NON_BOUNDARY": r"\B",
        }[where]
        test = re.compile(escape, self._flags & re.MULTILINE)

        def match(at: int, then: Then) -> bool:
            self._step()
            # Only the neighbours decide, and the real engine sees no more of the text than these.
            start = max(0, at - 1)
            near = self._text[start : at + 2] if at + 2 < len(self._text) else self._text[start:]
            if at > 0 and start > 0:
                near, here = "x" + near, at - start + 1
            else:
                here = at - start
            return test.match(near, here) is not None and then(at)

        return match
