"""Decodes UTF-8; other bytes are refused, with the position of the first wrong one."""

from __future__ import annotations

import codecs

from edgespec.errors import UsageError

_CONVERT = "Convert it first, for example with: iconv -f WINDOWS-1252 -t UTF-8"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decoded(data: bytes, name: str) -> str:
    """The text of `data`, without a byte order mark.

    Args:
        name: what the data is called in the message, such as "The prompt".

    Raises:
        UsageError: it is not valid UTF-8; the message names the first wrong byte, its offset and its line.
    """
    if data.startswith(_UTF16):
        raise UsageError(
            f"{name} is UTF-16, not UTF-8.", "Convert it first, for example with: iconv -f UTF-16 -t UTF-8"
        )
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        place = f"offset {error.start}" + (f", on line {line}" if b"\n" in data.rstrip() else "")
        raise UsageError(
            f"{name} is not valid UTF-8: byte 0x{data[error.start]:02x} at {place}.", _CONVERT
        ) from error


def as_text(argument: str, name: str) -> str:
    """The text of an argument, a variable or keys: UTF-8, whatever the locale says.

    Python hides bytes that the locale cannot decode in surrogates; in the C locale, that is all but ASCII.

    Raises:
        UsageError: it is not valid UTF-8; see `decoded`.
    """
    try:
        argument.encode()
    except UnicodeEncodeError:
        pass
    else:
        return argument
    try:
        data = argument.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:  # a lone surrogate that does not stand for a byte
        raise UsageError(f"{name} contains half of a surrogate pair.", "Remove it.") from error
    return decoded(data, name)
