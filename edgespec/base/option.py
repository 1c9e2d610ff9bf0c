"""Declarations of options: a dataclass field with the flag, the help and the range of its value.

Everything that takes options is made from these declarations: the command line, its environment variables and
configuration file, and the arguments of `edgespec.load`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any

from edgespec.base.units import parse_size
from edgespec.errors import InvalidValueError, listed
from edgespec.printable import shown

_flags_are_named = False


@contextmanager
def naming_flags() -> Iterator[None]:
    """Have messages name options as flags while the block runs, as the program does; else as arguments."""
    global _flags_are_named
    before, _flags_are_named = _flags_are_named, True
    try:
        yield
    finally:
        _flags_are_named = before


def named(name: str, value: object = None) -> str:
    """An option in a message, for whoever reads it: `--draft none` of the program, or `draft="none"`.

    Args:
        name: as an argument.
        value: one to give; None names the option alone.
    """
    if not _flags_are_named:
        return name if value is None else f"{name}={shown(value)}"
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}" if value is None else f"--{flag} {value}"


class Values(ABC):
    """The values that an option takes.

    Attributes:
        wanted: the values in words, to follow "must be".
        metavar: the value in a usage line.
        words: values to complete.
        typed: the type that the command line reads.
    """

    def __init__(
        self, wanted: str, metavar: str = "", words: Sequence[str] = (), typed: type[Any] = str
    ) -> None:
        self.wanted = wanted
        self.metavar = metavar
        self.words = words
        self.typed = typed

    @abstractmethod
    def read(self, given: Any) -> Any:
        """The value, from however it was written.

        Raises:
            ValueError, TypeError: it is no such value.
        """


class Number(Values):
    """A whole number, or one of a few words.

    Args:
        named: words, and the values that they stand for.
        hidden: further ones, known from other programs.
    """

    def __init__(
        self,
        least: int,
        most: int,
        named: Mapping[str, Any] | None = None,
        hidden: Mapping[str, Any] | None = None,
    ) -> None:
        words = [*(named or {})]
        wanted = listed([f"from {least} to {most}", *words])
        super().__init__(wanted, "|".join(["N", *words]), words)
        self._range = range(least, most + 1)
        self._named = {**(named or {}), **(hidden or {})}

    def read(self, given: Any) -> Any:
        word = str(given).strip().lower()
        if word in self._named:
            return self._named[word]
        if isinstance(given, bool) or not isinstance(given, str | Integral):
            raise TypeError
        # int() alone would read digits of all scripts, and underscores.
        if isinstance(given, str) and not re.fullmatch(r"\d{1,19}", word, re.ASCII):
            raise ValueError
        number = int(given)
        if number not in self._range:
            raise ValueError
        return number


class Size(Values):
    """Bytes, or a text such as "12GiB"."""

    def __init__(self) -> None:
        super().__init__("a size above 0 and below 8 EiB", "SIZE")

    def read(self, given: Any) -> int:
        if isinstance(given, bool):
            raise TypeError
        size = parse_size(given) if isinstance(given, str) else int(given)
        if not 0 < size < 2**63:
            raise ValueError
        return size


class OneOf(Values):
    """One of several words."""

    def __init__(self, *words: str) -> None:
        super().__init__(listed(words), "|".join(words), words)

    def read(self, given: Any) -> str:
        if given not in self.words:
            raise ValueError
        return str(given)


class Text(Values):
    """A string, or a path."""

    def __init__(self, *words: str) -> None:
        super().__init__("a non-empty string", words=words)

    def read(self, given: Any) -> str:
        text = str(os.fspath(given))
        if not text:
            raise ValueError
        return text


class Texts(Values):
    """Several strings: separated by commas, or each with a flag of its own."""

    def __init__(self, *, repeated: bool = False) -> None:
        super().__init__("a list of strings", typed=list[str] if repeated else str)

    def read(self, given: Any) -> tuple[str, ...]:
        if isinstance(given, str):
            given = (part.strip() for part in given.split(",") if part.strip())
        return tuple(str(os.fspath(each)) for each in given)


class Switch(Values):
    """Yes or no."""

    def __init__(self) -> None:
        super().__init__("true or false", typed=bool)

    def read(self, given: Any) -> bool:
        if not isinstance(given, bool):
            raise TypeError
        return given


@dataclass(frozen=True)
class Option:
    """The declaration of an option."""

    default: Any
    flags: str  # on the command line, separated by spaces, the main one last; empty if it has none there
    summary: str  # a sentence for `--help`
    values: Values  # the values that it takes
    says: str | None = None  # the default in words; None for the value itself
    more: str = ""  # sentences for those who call the library
    metavar: str = ""  # the value in a usage line, where that of `values` is not clear enough
    of_load: bool = True  # whether it is an argument of `edgespec.load`
    everywhere: bool = True  # whether all commands that load a model have its flag
    name: str = ""  # as an argument and a setting; that of its field if it is not given
    field: str = ""  # its field in its group

    @property
    def help(self) -> str:
        """The summary and the default."""
        says = str(self.default) if self.says is None else self.says
        return f"{self.summary} Default: {says}." if says else self.summary

    @property
    def documentation(self) -> str:
        """The summary for those who call the library, who see the default itself, unless it is None."""
        return f"{self.help if self.default is None else self.summary} {self.more}".strip()

    def read(self, given: Any) -> Any:
        """The value, checked.

        Raises:
            InvalidValueError: the option does not take it.
        """
        if given is None and self.default is None:
            return None
        try:
            return self.values.read(given)
        except InvalidValueError as error:
            raise error.renamed(named(self.name)) from None
        except (ValueError, TypeError):
            raise InvalidValueError(
                named(self.name), f"must be {self.values.wanted}, not {shown(given)}."
            ) from None


def option(default: Any, flags: str, summary: str, values: Values, **more: Any) -> Any:
    """A field of a group; see `Option`."""
    return field(default=default, metadata={Option: Option(default, flags, summary, values, **more)})


class Group:
    """Options that belong together: a dataclass whose fields are made by `option`."""

    def __post_init__(self) -> None:
        """Read and check every value.

        Raises:
            UsageError: a value is out of its range.
        """
        for each in options_of(type(self)):
            object.__setattr__(self, each.field, each.read(getattr(self, each.field)))


def options_of(group: Any) -> list[Option]:
    """The options of a group, in order."""
    found = [(each.name, each.metadata[Option]) for each in fields(group)]
    return [replace(option, name=option.name or name, field=name) for name, option in found]
