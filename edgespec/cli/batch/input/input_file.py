"""The input of a batch: a file, or standard input."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path
from typing import IO

from edgespec.errors import UsageError

_SAMPLE_BYTES = 1 << 20
_TOKEN_BYTES = 3.5  # of a usual text in a line
_TEMPLATE_TOKENS = 32
_IMAGE = re.compile(rb'"data:[^"]*"')  # whose bytes say nothing of its tokens

_NAMES_IMAGE = re.compile(rb'"images"\s*:\s*\[\s*"|"type"\s*:\s*"(?:input_)?image(?:_url)?"')


def open_input(name: str) -> IO[bytes]:
    """The input with that name; "-" is standard input.

    Raises:
        UsageError: it cannot be read.
    """
    if name == "-":
        if sys.stdin is None:
            raise UsageError("Standard input is closed.", "Give a file to --input.")
        return open(sys.stdin.fileno(), "rb", closefd=False)
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.", "Give a file to --input.") from error


def is_file(lines: IO[bytes]) -> bool:
    """True if reading never waits for somebody to write."""
    return stat.S_ISREG(os.fstat(lines.fileno()).st_mode)


def usual_tokens(name: str, max_tokens: int) -> int | None:
    """Estimate the tokens of a line's prompt and answer together; None if the input is not a file.

    Taken from the beginning of the file. How many tokens prompts really have is only known with the model.
    """
    if not Path(name).is_file():
        return None
    with Path(name).open("rb") as lines:
        sizes = [len(_IMAGE.sub(b"", line)) for line in lines.readlines(_SAMPLE_BYTES) if line.strip()]
    prompt = sum(sizes) / max(len(sizes), 1) / _TOKEN_BYTES
    return round(prompt) + _TEMPLATE_TOKENS + max_tokens


def names_images(name: str) -> bool:
    """True if lines of the input have images; False if it is not a file."""
    if not Path(name).is_file():
        return False
    with Path(name).open("rb") as lines:
        return any(_NAMES_IMAGE.search(line) for line in lines)


def count_lines(name: str) -> int:
    """Lines that are not blank; 0 if the input is not a file."""
    if not Path(name).is_file():
        return 0
    with Path(name).open("rb") as lines:
        return sum(1 for line in lines if line.strip())
