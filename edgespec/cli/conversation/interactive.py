"""A chat at a terminal: each message that is typed is a question or a slash command."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.completion import Completer
from edgespec.cli.conversation.attach import with_attachments, without_images
from edgespec.cli.conversation.slash import ALIASES, SlashCommands, TypedQuestion
from edgespec.cli.interrupt import Interruption
from edgespec.cli.reloading import LOST
from edgespec.cli.screen.formatting import count
from edgespec.cli.utf8 import as_text
from edgespec.errors import ContextLengthError, EdgeSpecError

if TYPE_CHECKING:
    from edgespec.cli.conversation.changeable_model import ChangeableModel
    from edgespec.cli.conversation.chat import Chat
    from edgespec.cli.conversation.keyboard import Keyboard
    from edgespec.images.parts import Image

_FREE_CONTEXT = "/undo removes the last turn, /clear starts over, and --context sets a larger context."
_IF_CUT_OFF = "/continue resumes it; /set max_tokens none lifts the limit."


class InteractiveChat:
    """Reads what a person types until they leave.

    Args:
        pending: a question that was left unanswered last time, for /retry.
        models: for /model; None if the model cannot be changed.

    Attributes:
        last_question: what /retry asks again; None if there is nothing.
        attached: files that go with the next question.
        images: those that the next question is about.
    """

    def __init__(
        self, chat: Chat, pending: TypedQuestion | None = None, models: ChangeableModel | None = None
    ) -> None:
        self.chat = chat
        self.models = models
        self.last_question = pending
        self.attached: list[tuple[Path, str]] = []
        self.images: list[Image] = []
        self._keyboard: Keyboard
        self._commands = SlashCommands(self)

    @property
    def completer(self) -> Completer:
        """The completer behind the Tab key."""
        return Completer(self._commands.completions)

    def run(self, keyboard: Keyboard, first: str | None = None) -> None:
        """Run until Ctrl-D or /bye.

        Args:
            first: a question from the command line, asked first.
        """
        self._keyboard = keyboard
        if first is not None:
            self.chat.terminal.note(f">>> {first}")
            self._guarded(lambda: self._ask(first))
        for text in keyboard.messages():
            name = text.strip().partition(" ")[0]
            if ALIASES.get(name, name) == "/bye":
                return
            self._guarded(partial(self._take, text))

    def _take(self, text: str) -> None:
        """A question, or a command."""
        text = as_text(text, "The message")
        name, _, rest = text.strip().partition(" ")
        if re.fullmatch(r"/[a-z?-]+", name):
            self._commands.run(name, rest.strip())
        else:
            self._ask(text)

    def _guarded(self, do: Callable[[], None]) -> None:
        """Do it; a failure is reported, and the chat continues."""
        try:
            do()
        except LOST as error:
            self.chat.terminal.warn(str(error))
            if self.models is not None:
                self.chat.session.detach()
                self.models.engine.close()
                self.chat.terminal.note("/retry reloads the model and asks the last question again.")
        except BrokenPipeError:
            raise
        except (EdgeSpecError, OSError) as error:
            self.chat.terminal.warn(str(error))
        except KeyboardInterrupt:
            self.chat.terminal.note("Stopped.")

    def _load_again(self, models: ChangeableModel) -> None:
        """Load the model again: without what was lost, or with less on a card."""
        self.chat.session.detach()
        models.load_again()
        self.chat.use(models.engine, models.sampling)
        self.chat.terminal.note("Reloaded the model.")

    def _ask(self, text: str) -> None:
        if self.chat.session.engine.sees_images:
            text, dropped = without_images(text)
            self.images += dropped
            if dropped and not text:
                self.chat.terminal.note(f"Attached {_names(dropped)} to the next question.")
                return
        self.answer(self.with_attached(text))

    def with_attached(self, text: str) -> TypedQuestion:
        """The question with the files and images that go with it: attached before, or mentioned in it."""
        question = with_attachments(text, self.attached)
        images = [*self.images, *question.images]
        if images:
            self.chat.session.require_sight()
        self.attached.clear()
        self.images.clear()
        if question.files or images:
            self.chat.terminal.note(
                f"Attached: {', '.join([*map(str, question.files), *(image.name for image in images)])}"
            )
        return TypedQuestion(question.text, tuple(images))

    def answer(self, question: TypedQuestion) -> None:
        """Answer a question; if there is no room, offer to drop turns."""
        self.last_question = question
        self._with_room(lambda: self.chat.ask(*question, continue_hint=_IF_CUT_OFF), question.text)

    def continue_answer(self) -> None:
        """Continue the last answer; if there is no room, offer to drop turns."""
        self._with_room(lambda: self.chat.continue_answer(continue_hint=_IF_CUT_OFF), "")

    def _with_room(self, do: Callable[[], Interruption], text: str) -> None:
        """Have something answered.

        Args:
            text: the question.
        """
        if self.models is not None and self.models.engine.closed:  # it was lost, or could not be loaded again
            self._load_again(self.models)
        try:
            interruption = do()
        except ContextLengthError as error:
            if not self.chat.session.messages:
                raise
            self.chat.terminal.warn(error.what)
            if self._drop_turns(text):
                self._with_room(do, text)
            return
        answer = self.chat.last_answer
        if interruption and answer is not None and answer.passes:
            self.chat.terminal.note("Stopped; the partial answer is kept. /continue resumes it.")
        elif interruption:
            self.chat.terminal.note("Stopped before the first token. /retry asks again.")
        if answer is not None and answer.context_full:
            self.chat.terminal.warn(
                f"The answer ends early: the context of {self.chat.context} tokens is full."
            )
            self._drop_turns("")

    def _drop_turns(self, text: str) -> bool:
        """Offer to drop the oldest turns; returns whether any were dropped."""
        possible = self.chat.session.turns > 1 or text
        if possible and self.confirm("Drop the oldest turns to make room?"):
            dropped = self.chat.session.drop_oldest(text)
            if dropped:
                self.chat.terminal.note(f"Dropped {count(dropped, 'turn')}, kept {self.chat.session.turns}.")
                return True
            self.chat.terminal.note("That would not free enough of the context.")
        self.chat.terminal.note(_FREE_CONTEXT)
        return False

    def confirm(self, question: str) -> bool:
        """True if the person says yes."""
        return self._keyboard.confirm(question)

    def prefill(self, text: str) -> bool:
        """Begin the next message with a text to be edited; False if that is not possible."""
        return self._keyboard.prefill(text)

    def say(self, text: str) -> None:
        """Print a note."""
        self.chat.terminal.say(text)


def _names(images: Sequence[Image]) -> str:
    return ", ".join(image.name for image in images)
