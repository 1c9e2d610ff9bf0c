"""The keyboard of a person whose answers go elsewhere, as in `edgespec chat | tee answers.txt`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from edgespec.cli.conversation.interactive import (
    DISCARDED,
    HOW_TO_LEAVE,
    PROMPT,
    is_yes,
    unfinished,
    unquoted,
)
from edgespec.cli.screen.terminal import is_terminal
from edgespec.cli.utf8 import decoded
from edgespec.errors import UsageError


class PlainKeyboard:
    """Reads whole lines, and shows prompts on standard error: standard output has nothing but answers."""

    def messages(self) -> Iterator[str]:
        while True:
            try:
                text = join_lines(self._read_line)
            except KeyboardInterrupt as stop:
                self._show(f"\n{stop}{HOW_TO_LEAVE}\n")
                continue
            except EOFError:
                self._show("\n")
                return
            except UsageError as error:
                self._show(f"{error}\n")
                continue
            if text.strip():
                yield text

    def confirm(self, question: str) -> bool:
        try:
            return is_yes(self._read_line(f"{question} [Y/n] "))
        except (KeyboardInterrupt, EOFError, UsageError):
            return False

    def _read_line(self, prompt: str) -> str:
        self._show(prompt)
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return decoded(line, "The message").rstrip("\r\n")

    def _show(self, text: str) -> None:
        if is_terminal(sys.stderr):
            print(text, end="", file=sys.stderr, flush=True)


def join_lines(read_line: Callable[[str], str]) -> str:
    r"""Join the lines of a message: one, or more after a trailing `\` or between `\"\"\"`.

    The end of input ends a message that has begun, and Ctrl-C discards it and says so.

    Args:
        read_line: reads a line after showing a prompt.
    """
    text = read_line(PROMPT)
    while (begun := unfinished(text)) is not None:
        try:
            text = begun + read_line("... ")
        except EOFError:
            return unquoted(begun).rstrip("\n")
        except KeyboardInterrupt:
            raise KeyboardInterrupt(DISCARDED) from None
    return unquoted(text)
