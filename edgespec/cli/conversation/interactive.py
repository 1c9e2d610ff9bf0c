"""A chat at a terminal: each message that is typed is a question or a slash command."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgespec.cli.completion import Completer
from edgespec.cli.conversation.attach import with_attachments
from edgespec.cli.conversation.echo import suspend
from edgespec.cli.conversation.editor import edit_message
from edgespec.cli.conversation.images import without_images
from edgespec.cli.conversation.slash.commands import ALIASES, SlashCommands
from edgespec.cli.conversation.slash.typed_chat import TypedQuestion
from edgespec.cli.interrupt import Interruption
from edgespec.cli.reloading import LOST
from edgespec.cli.screen.formatting import count
from edgespec.cli.utf8 import as_text
from edgespec.errors import ContextLengthError, EdgeSpecError
from edgespec.files.user_folders import data_folder

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from edgespec.cli.completion import Completion
    from edgespec.cli.conversation.changeable_model import ChangeableModel
    from edgespec.cli.conversation.chat import Chat
    from edgespec.images.parts import Image

PROMPT = ">>> "
HOW_TO_LEAVE = "Ctrl-D or /bye leaves."
DISCARDED = "The unfinished message was discarded. "
_QUOTES = '"""'
_HINTS = ("Ask something; /help lists the commands", "Ask something, or /help")
_FREE_CONTEXT = "/undo removes the last turn, /clear starts over, and --context sets a larger context."
_IF_CUT_OFF = "/continue resumes it; /set max_tokens none lifts the limit."

Complete = Callable[[str], list["Completion"]]


class Keyboard(Protocol):
    """The source of messages."""

    def messages(self) -> Iterator[str]:
        """The messages, until the end; a message may have several lines."""

    def confirm(self, question: str) -> bool:
        """True if the answer is yes."""


class TypedKeyboard:
    """A person at a terminal, with history, completion and editing.

    Args:
        complete: gives the completions for the text before the cursor.
    """

    def __init__(self, complete: Complete) -> None:
        self._session = _prompt_session(complete)

    def messages(self) -> Iterator[str]:
        while True:
            try:
                text = unquoted(self._read_message())
            except KeyboardInterrupt:
                begun = "\n" in self._session.default_buffer.text
                print(f"{DISCARDED if begun else ''}{HOW_TO_LEAVE}", file=sys.stderr)
                continue
            except EOFError:
                return
            if text.strip():
                yield text

    def confirm(self, question: str) -> bool:
        from prompt_toolkit import prompt

        try:
            return is_yes(prompt(f"{question} [Y/n] "))
        except (KeyboardInterrupt, EOFError):
            return False

    def _read_message(self) -> str:
        from prompt_toolkit.formatted_text import FormattedText

        room = shutil.get_terminal_size().columns - len(PROMPT)
        hint = next((hint for hint in _HINTS if len(hint) < room), "")
        return self._session.prompt(PROMPT, placeholder=FormattedText([("class:hint", hint)]))


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
            self._load_again()
        except EdgeSpecError as error:
            self.chat.terminal.warn(str(error))
        except KeyboardInterrupt:
            self.chat.terminal.note("Stopped.")

    def _load_again(self) -> None:
        """Load again before the next question: without what was lost, or with less on a card."""
        if self.models is None:
            return
        self.chat.session.detach()
        self.models.load_again()
        self.chat.use(self.models.engine, self.models.sampling)
        self.chat.terminal.note("Reloaded the model. /retry asks the last question again.")

    def _ask(self, text: str) -> None:
        if self.chat.session.engine.sees_images:
            text, dropped = without_images(text)
            self.images += dropped
            if dropped and not text:
                self.chat.terminal.note(f"Attached {_names(dropped)} to the next question.")
                return
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
        self.answer(TypedQuestion(question.text, tuple(images)))

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

    def say(self, text: str) -> None:
        """Print a note."""
        self.chat.terminal.say(text)


def _names(images: Sequence[Image]) -> str:
    return ", ".join(image.name for image in images)


def unfinished(text: str) -> str | None:
    r"""The text to which the next line is appended; None if the message is complete."""
    if text.lstrip().startswith(_QUOTES):
        return None if _QUOTES in text.lstrip()[len(_QUOTES) :] else text + "\n"
    return text[:-1] + "\n" if text.endswith("\\") else None


def unquoted(text: str) -> str:
    r"""A message without the `\"\"\"` around it, or before it if Ctrl-D ended it."""
    if not text.lstrip().startswith(_QUOTES):
        return text
    return text.lstrip()[len(_QUOTES) :].replace(_QUOTES, "", 1).strip("\n")


def is_yes(answer: str) -> bool:
    """True if an answer to a question with `[Y/n]` is yes."""
    return answer.strip().lower() in ("", "y", "yes")


def _prompt_session(complete: Complete) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app, run_in_terminal
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.shortcuts import CompleteStyle
    from prompt_toolkit.styles import Style

    class Offers(Completer):
        def get_completions(self, document: Document, _event: Any) -> Iterable[Completion]:
            for offer in complete(document.text_before_cursor):
                yield Completion(offer.text, -offer.replaces, display=offer.shown)

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        buffer = event.current_buffer
        begun = unfinished(buffer.text)
        if begun is None:
            buffer.validate_and_handle()
        else:  # in the same buffer, so that the message is one entry of the history
            buffer.document = Document(begun, len(begun))

    @Condition
    def is_open() -> bool:
        buffer = get_app().current_buffer
        return buffer.document.is_cursor_at_the_end and unfinished(buffer.text) is not None

    @keys.add("c-d", filter=is_open)
    def _send_open(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-x", "c-e")
    @keys.add("c-g")
    def _edit(event: Any) -> None:
        event.app.create_background_task(edit_message(event.current_buffer))

    @keys.add("c-z")
    def _suspend(event: Any) -> None:
        run_in_terminal(suspend)

    history: History
    try:
        history = FileHistory(str(_history_file()))
    except OSError:
        history = InMemoryHistory()  # a home folder that cannot be written must not prevent a chat
    return PromptSession(
        history=history,
        completer=Offers(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        key_bindings=keys,
        multiline=True,  # for pasted text and Alt-Enter; Enter sends
        # Not before a line that is only wrapped.
        prompt_continuation=lambda _width, _line, folded: "" if folded else "... ",
        style=Style.from_dict({"hint": "ansibrightblack"}),
    )


def _history_file() -> Path:

    path = data_folder() / "chat_history"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    return path
