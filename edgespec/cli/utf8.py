"""Text that people name or give: UTF-8, from files of a limited size; everything else is refused."""

from __future__ import annotations

import codecs
import errno
import os
import stat
from pathlib import Path

from edgespec.base.installation import POWERSHELL
from edgespec.errors import UsageError
from edgespec.files.user_folders import expanded

MAX_BYTES = 4 << 20  # of a file with text
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(name: str) -> str:
    """The content of a text file, without a byte order mark. A shell's `<(command)` is a file, too."""
    path = expanded(name)
    try:
        refuse_folder(path)
        mode = path.stat().st_mode
        # Others may never end, or wait for somebody to write.
        if not (stat.S_ISREG(mode) or (stat.S_ISFIFO(mode) and _is_open_here(path))):
            raise UsageError(f"{name} is not a regular file.", "Name a text file.")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.", "Check the path.") from error
    except ValueError as error:  # a null byte
        raise UsageError(f"{name!r} is not a file name.", "Check the path.") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{name} has more than {MAX_BYTES >> 20} MiB.", "Use a part of it.")
    if b"\0" in data and not data.startswith(UTF16):
        raise UsageError(f"{name} is not a text file.", "Name a UTF-8 text file.")
    return decoded(data, name).replace("\r\n", "\n")  # the ends of lines on Windows


def refuse_folder(path: Path) -> None:
    """Raise IsADirectoryError for a folder; Windows would say that permission is denied."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


def _is_open_here(path: Path) -> bool:
    """True for a pipe that a shell has opened for this process, as /dev/fd/63."""
    return path.parts[:2] == ("/", "dev") or path.parts[:2] == ("/", "proc")


def decoded(data: bytes, name: str) -> str:
    """The text of `data`, without a byte order mark.

    Args:
        name: what the data is called in the message, such as "The prompt".

    Raises:
        UsageError: it is not valid UTF-8; the message names the first wrong byte, its offset and its line.
    """
    if data.startswith(UTF16):
        raise UsageError(f"{name} is UTF-16, not UTF-8.", _conversion("UTF-16"))
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        place = f"offset {error.start}" + (f", on line {line}" if b"\n" in data.rstrip() else "")
        raise UsageError(
            f"{name} is not valid UTF-8: byte 0x{data[error.start]:02x} at {place}.",
            _conversion("WINDOWS-1252"),
        ) from error


def _conversion(encoding: str) -> str:
    command = f"iconv -f {encoding} -t UTF-8"
    if POWERSHELL:  # which recognizes UTF-16 by itself
        command = "Get-Content OLD -Encoding Default | Set-Content NEW -Encoding utf8"
    return f"Convert it first, for example with: {command}"


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
