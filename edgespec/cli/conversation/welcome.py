"""The first lines of a chat without a named model: the demo model, and better ones for this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.cli.screen.terminal import Terminal
from edgespec.units import readable

if TYPE_CHECKING:
    from edgespec.plans.suggestion import Suggestion

_DEMO = "This is SmolLM2 135M, the bundled demo model."
_USABLE = 2  # tokens a second, as in plans.suggestion, which takes too long to import here


def welcome(terminal: Terminal) -> None:
    """Print it, if a person is watching."""
    if terminal.is_watched:
        for line in welcome_lines(_suggestions()):
            terminal.hint(line)


def welcome_lines(suggestions: list[Suggestion]) -> list[str]:
    """At most three lines, which fit a usual window: the demo model, and a command for each better one."""
    if not suggestions:
        return [_DEMO, f"No better one in the catalog would reach {_USABLE} tokens/s here."]
    return [f"{_DEMO} Better ones for this machine:", *map(_line, suggestions)]


def _line(found: Suggestion) -> str:
    speed = f"{found.tokens_per_second:.{0 if found.tokens_per_second >= 3 else 1}f}"
    drafter = f" --draft {found.drafter}" if found.drafter else ""
    size = readable(found.download_bytes) if found.download_bytes else "already here"
    return f"  about {speed} tokens/s: edgespec chat {found.entry.name}{drafter} ({size})"


def _suggestions() -> list[Suggestion]:
    from edgespec.plans.suggestion import Resources, suggest

    try:
        return suggest(Resources.of_this_machine())
    except OSError:  # folders that cannot be read must not keep anybody from chatting
        return []
