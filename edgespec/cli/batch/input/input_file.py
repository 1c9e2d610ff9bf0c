"""The input of a batch: a file, or standard input."""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import dataclass
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
    if not name:
        raise UsageError("--input is empty.", "Give a file to --input.")
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.", "Give a file to --input.") from error


def is_file(lines: IO[bytes]) -> bool:
    """True if reading never waits for somebody to write."""
    return stat.S_ISREG(os.fstat(lines.fileno()).st_mode)


@dataclass(frozen=True)
class InputSummary:
    """Facts about an input that are known before its lines are parsed.

    Attributes:
        lines: that are not blank; 0 if the input is not a file.
        prompt_tokens: of a usual line, estimated from the beginning of the file; None if it is not a file.
            How many tokens prompts really have is only known with the model.
        has_images: lines name images; False if the input is not a file.
    """

    lines: int = 0
    prompt_tokens: int | None = None
    has_images: bool = False

    def usual_tokens(self, max_tokens: int) -> int | None:
        """Estimate the tokens of a line's prompt and answer together; None if the input is not a file."""
        return None if self.prompt_tokens is None else self.prompt_tokens + max_tokens


def summarize_input(name: str) -> InputSummary:
    """Read an input once, if it is a file."""
    if not Path(name).is_file():
        return InputSummary()
    count = sampled = sampled_bytes = passed = 0
    has_images = False
    with Path(name).open("rb") as lines:
        for line in lines:
            in_sample = passed < _SAMPLE_BYTES
            passed += len(line)
            if line.isspace():
                continue
            count += 1
            if in_sample:
                sampled += 1
                sampled_bytes += len(_IMAGE.sub(b"", line))
            # Most lines do not have the word, and looking for it is much faster than the expression.
            has_images = has_images or (b"image" in line and _NAMES_IMAGE.search(line) is not None)
    prompt = sampled_bytes / max(sampled, 1) / _TOKEN_BYTES
    return InputSummary(count, round(prompt) + _TEMPLATE_TOKENS, has_images)
