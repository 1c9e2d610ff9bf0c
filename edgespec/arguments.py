"""Checks the types of what callers of the library pass, from the annotations of functions and dataclasses.

A wrong type is a UsageError that names the argument, before anything else happens. Ranges are checked where
they are known.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, cast

from edgespec.errors import UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MAX_SHOWN = 80  # characters of a value in a message

_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    os.PathLike: "a path",
    Mapping: "a mapping",
    Iterable: "a list",
    Callable: "a function",
}
_SEQUENCES = (list, tuple, Sequence, Iterable)


def checks_arguments(function: _Function) -> _Function:
    """Have a function refuse arguments that its annotations do not allow, when it is called.

    Raises (when called):
        UsageError: an argument is of another type.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python's own message about missing and unknown arguments
        hints = _hints(function)
        for name, value in given.items():
            if name in hints:
                check_type(name, value, hints[name])
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def check_fields(instance: Any) -> None:
    """Refuse a dataclass whose fields are not what their annotations say.

    Raises:
        UsageError: a field is of another type.
    """
    hints = _hints(cast(Hashable, type(instance)))
    for field in fields(instance):
        check_type(field.name, getattr(instance, field.name), hints[field.name])


def check_type(name: str, value: object, hint: Any) -> None:
    """Refuse a value that an annotation does not allow.

    Raises:
        UsageError: it does not.
    """
    if not _allows(hint, value):
        raise UsageError(f"{name} must be {_described(hint)}, not {shown(value)}.")


def shown(value: object) -> str:
    """A value for a message: cut off if it is long, or its type if it cannot be shown."""
    try:
        text = repr(value)
    except Exception:  # a number with too many digits, or whatever an object's own repr raises
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


@functools.cache
def _hints(annotated: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(annotated)


def _allows(hint: Any, value: object) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_allows(part, value) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is tuple and parts and parts[-1] is not Ellipsis:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_allows, parts, value))
    if origin in _SEQUENCES:
        return _allows_items(origin, parts, value)
    if origin is collections.abc.Mapping:
        return isinstance(value, Mapping) and all(
            _allows(parts[0], key) and _allows(parts[1], item) for key, item in value.items()
        )
    kind = origin or hint
    if not isinstance(kind, type):
        return True
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(value, name) for name in _members(kind))
    return isinstance(value, kind)


def _allows_items(origin: Any, parts: tuple[Any, ...], value: object) -> bool:
    """True if a list, or something else in an order, has items of the right type; a text is none."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return False
    if origin is Iterable and not isinstance(value, Sequence):
        return isinstance(value, Iterable)  # its items are checked as they come
    if not isinstance(value, Sequence):
        # Arrays are sequences in all but name.
        if not all(hasattr(value, name) for name in ("__len__", "__getitem__", "__iter__")):
            return False
        if isinstance(value, collections.abc.Set):
            return False
    try:
        return all(_allows(parts[0], item) for item in value)  # type: ignore[attr-defined]
    except TypeError:
        return False  # such as an array without dimensions


def _members(protocol: type) -> set[str]:
    return {
        name
        for kind in protocol.__mro__
        if getattr(kind, "_is_protocol", False) and kind.__module__ != "typing"
        for name, member in vars(kind).items()
        if callable(member) and not name.startswith("_")
    }


def _described(hint: Any) -> str:
    """The values that an annotation allows, in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        words = list(dict.fromkeys(_described(part) for part in parts if part is not type(None)))
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in _SEQUENCES:
        return f"a list of {_PLURALS.get(parts[0]) or _PLURALS.get(typing.get_origin(parts[0]), 'values')}"
    kind = origin or hint
    return _NAMES.get(kind) or f"of type {kind.__name__}"


_PLURALS: dict[Any, str] = {int: "integers", str: "strings", Mapping: "mappings"}
