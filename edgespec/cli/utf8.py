"""Decodes UTF-8; other bytes are refused, with the position of the first wrong one."""

from __future__ import annotations

import codecs
import contextlib

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


def checked(text: str, name: str) -> str:
    """The same text, if it is valid Unicode; Python hides other bytes of arguments and keys in surrogates.

    Raises:
        UsageError: it is not; see `decoded`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        with contextlib.suppress(UnicodeEncodeError):  # a lone surrogate that does not stand for a byte
            decoded(text.encode(errors="surrogateescape"), name)
        raise UsageError(f"{name} holds half a surrogate pair.", "Remove it.") from error
    return text
