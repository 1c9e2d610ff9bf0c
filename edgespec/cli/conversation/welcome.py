"""What a chat with no model named says first: which model this is, and which one to take instead."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from edgespec.cli.screen.terminal import Terminal
from edgespec.units import readable

if TYPE_CHECKING:
    from edgespec.plans.suggestion import Suggestion

_TOY = "This is SmolLM2 135M, a toy to try things with: quick, and often wrong."


def welcome(terminal: Terminal) -> None:
    """Print it, if a person is watching."""
    terminal.hint(_TOY)
    if not terminal.is_watched:
        return
    from edgespec.plans.suggestion import Resources, suggest

    with contextlib.suppress(OSError):  # folders that cannot be read must not keep anybody from chatting
        for line in suggestion_lines(suggest(Resources.of_this_machine())):
            terminal.hint(line)


def suggestion_lines(suggestions: list[Suggestion]) -> list[str]:
    """A line for each model, with the command that runs it."""
    return [
        f"{'This machine runs' if not at else 'It also runs'} {found.entry.name} at about "
        f"{_speed(found.tokens_per_second)} tokens/s{_larger(found)}: {_command(found)} ({_download(found)})"
        for at, found in enumerate(suggestions)
    ]


def _command(found: Suggestion) -> str:
    drafter = f" --draft {found.drafter}" if found.drafter else ""
    return f"edgespec chat {found.entry.name}{drafter}"


def _larger(found: Suggestion) -> str:
    return ", streamed from disk" if found.streams else ""


def _download(found: Suggestion) -> str:
    return f"downloads {readable(found.download_bytes)}" if found.download_bytes else "already here"


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.{0 if tokens_per_second >= 3 else 1}f}"
