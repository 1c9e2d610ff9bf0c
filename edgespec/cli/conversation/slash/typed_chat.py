"""The objects that the slash commands of a chat act on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from edgespec.cli.conversation.changeable_model import ChangeableModel
    from edgespec.cli.conversation.chat import Chat


class TypedChat(Protocol):
    """A chat at a terminal, as far as its commands need it; see `interactive.InteractiveChat`."""

    chat: Chat
    last_question: str | None
    attached: list[tuple[Path, str]]
    models: ChangeableModel | None

    def answer(self, text: str) -> None:
        """Answer a question."""

    def continue_answer(self) -> None:
        """Continue the last answer."""

    def confirm(self, question: str) -> bool:
        """True if the person says yes."""

    def say(self, text: str) -> None:
        """Print a note."""
