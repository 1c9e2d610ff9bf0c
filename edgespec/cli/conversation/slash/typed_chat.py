"""The objects that the slash commands of a chat act on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from edgespec.cli.conversation.changeable_model import ChangeableModel
    from edgespec.cli.conversation.chat import Chat
    from edgespec.engine.sessions.session import ResumedSession
    from edgespec.images.parts import Image


class TypedQuestion(NamedTuple):
    """A question, and the images that it is about."""

    text: str
    images: Sequence[Image] = ()


def pending_question(resumed: ResumedSession | None) -> TypedQuestion | None:
    """The question that a resumed conversation was left with, without an answer."""
    if resumed is None or resumed.pending is None:
        return None
    return TypedQuestion(resumed.pending, resumed.pending_images)


class TypedChat(Protocol):
    """A chat at a terminal, as far as its commands need it; see `interactive.InteractiveChat`."""

    chat: Chat
    last_question: TypedQuestion | None
    attached: list[tuple[Path, str]]
    images: list[Image]
    models: ChangeableModel | None

    def answer(self, question: TypedQuestion) -> None:
        """Answer a question."""

    def continue_answer(self) -> None:
        """Continue the last answer."""

    def confirm(self, question: str) -> bool:
        """True if the person says yes."""

    def say(self, text: str) -> None:
        """Print a note."""
