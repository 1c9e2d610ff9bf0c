"""Fields of requests: declared as types, validated once, and named in a warning where they have no effect."""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from edgespec.api.warnings import Warnings, shown, wrong
from edgespec.errors import UsageError

_CLOSE = 0.85
_MAX_NAMED = 8
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
# Values by which clients ask for nothing, or for what is done anyway.
_PLAIN: tuple[Any, ...] = (False, 0, "", [], {}, ["text"], "medium")
# msgspec describes a type when it is first used, and crashes if another thread uses it meanwhile.
_describing = threading.Lock()

_Type = TypeVar("_Type")
_FieldsT = TypeVar("_FieldsT", bound="Fields")


class Fields(msgspec.Struct, kw_only=True):
    """The fields of a request, or of an object in it whose unknown fields are named in a warning."""

    # Fields that would change the answer, and the reason why they do not here
    unsupported: ClassVar[Mapping[str, str]] = {}
    # Fields that clients send, and that change nothing about an answer here
    without_effect: ClassVar[tuple[str, ...]] = ()


def read_fields(
    given: object, kind: type[_FieldsT], warnings: Warnings, at: str = "", *, strict: bool = False
) -> _FieldsT:
    """The fields of an object. `null` leaves one out, and 8.0 is an integer.

    Args:
        at: the name of the object; empty for the body of a request.
        warnings: gets the fields that have no effect.
        strict: refuse an unknown field whose name is nearly that of another one.
    """
    if not isinstance(given, dict):
        raise wrong(at, given, "an object") if at else UsageError("The body is not a JSON object.")
    values = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in given.items()
        if value is not None
    }
    for name, why in kind.unsupported.items():
        if values.pop(name, None) not in (None, *_PLAIN):
            warnings.ignored(_joined(at, name), why)
    known = {*kind.__struct_fields__, *kind.without_effect}
    unknown = [name for name in values if name not in known]
    for name in unknown if strict else unknown[:_MAX_NAMED]:
        close = difflib.get_close_matches(name[:64], kind.__struct_fields__, n=1, cutoff=_CLOSE)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        if strict and close:
            raise UsageError(f"There is no field {shown(name)}.{hint}")
        warnings.add(f"Ignored unknown field {shown(_joined(at, name))}.{hint}")
    return converted(values, kind, at)


def converted(value: object, kind: type[_Type], at: str = "") -> _Type:
    """A value from JSON as a type.

    Args:
        at: the name of the value in messages; empty for the body of a request.
    """
    try:
        with _describing:
            return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), value, kind, at) from None


def _joined(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _refusal(said: str, value: Any, kind: Any, at: str) -> UsageError:
    """The error for a value that msgspec has refused.

    Args:
        said: its message, such as "Expected `int`, got `str` - at `$.options.seed`".
    """
    from msgspec import inspect as types

    reason, _, place = said.partition(" - at `")
    info: Any = types.type_info(kind)
    ranged = ", got `" not in reason
    for name, index in _STEP.findall(place):
        inner = info.types if isinstance(info, types.UnionType) else (info,)
        described = next((one for one in inner if isinstance(one, types.Metadata)), None)
        if described is not None:  # with what is in it
            return UsageError(f"{at} must be {_words(described, ranged)}.")
        if name:
            at, value = _joined(at, name), value[name]
            info = next(f.type for i in inner for f in getattr(i, "fields", ()) if f.name == name)
        elif index == "...":  # some value of an object
            held = next(i.value_type for i in inner if hasattr(i, "value_type"))
            return UsageError(f"Each value of {at} must be {_words(held, ranged)}.")
        else:
            at, value = f"{at}[{index}]", value[int(index)]
            info = next(i.item_type for i in inner if hasattr(i, "item_type"))
    if "required field" in reason:
        return UsageError(f'Missing "{_joined(at, reason.split("`")[1])}".')
    wanted = _words(info, ranged)
    return (
        UsageError(f"{at} must be {wanted}.")
        if " of length " in reason or place.startswith("key")
        else wrong(at, value, wanted)
    )


def _words(info: Any, ranged: bool) -> str:
    """A type of `msgspec.inspect` in words.

    Args:
        ranged: name the range of a number.
    """
    from msgspec import inspect as types

    match info:
        case types.Metadata():
            return str((info.extra_json_schema or {})["description"])
        case types.UnionType():
            words = [_words(one, ranged) for one in info.types if not isinstance(one, types.NoneType)]
            return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
        case types.LiteralType():
            values = ", ".join(map(str, info.values))
            return f"one of {values}" if len(info.values) > 1 else values
        case types.IntType() | types.FloatType():
            noun = "an integer" if isinstance(info, types.IntType) else "a number"
            if info.ge is None or not ranged:
                return noun
            return f"{noun} from {info.ge}" + (f" to {info.le}" if info.le is not None else "")
        case types.ListType():
            if info.max_length is not None:
                return f"a list of at most {info.max_length} items"
            return "a non-empty list" if info.min_length else "a list"
        case types.StrType():
            return "a string"
        case types.BoolType():
            return "true or false"
    return "an object"
