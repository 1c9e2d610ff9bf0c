"""Reads messages from the keyboard, with history, completion and editing, until Ctrl-D."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgespec.cli.conversation.echo import suspend
from edgespec.cli.conversation.editor import edit_message
from edgespec.cli.screen.terminal import is_terminal
from edgespec.cli.utf8 import decoded
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from edgespec.cli.completion import Completion

_PROMPT = ">>> "
_QUOTES = '"""'
_HOW_TO_LEAVE = "Ctrl-D or /bye leaves."
_HINTS = ("Ask something; /help lists the commands", "Ask something, or /help")

Complete = Callable[[str], list["Completion"]]


class Keyboard(Protocol):
    """Where messages come from."""

    def messages(self) -> Iterator[str]:
        """The messages, until the end; a message may have several lines."""

    def confirm(self, question: str) -> bool:
        """Whether the answer is yes."""


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
                print(_HOW_TO_LEAVE, file=sys.stderr)
                continue
            except EOFError:
                return
            if text.strip():
                yield text

    def confirm(self, question: str) -> bool:
        from prompt_toolkit import prompt

        try:
            return _is_yes(prompt(f"{question} [Y/n] "))
        except (KeyboardInterrupt, EOFError):
            return False

    def _read_message(self) -> str:
        from prompt_toolkit.formatted_text import FormattedText

        room = shutil.get_terminal_size().columns - len(_PROMPT)
        hint = next((hint for hint in _HINTS if len(hint) < room), "")
        return self._session.prompt(_PROMPT, placeholder=FormattedText([("class:hint", hint)]))


class PlainKeyboard:
    """A person at a terminal whose answers go elsewhere, as in `edgespec chat | tee answers.txt`.

    Prompts go to standard error, so that standard output has nothing but answers.
    """

    def messages(self) -> Iterator[str]:
        while True:
            try:
                text = join_lines(self._read_line)
            except KeyboardInterrupt:
                self._show(f"\n{_HOW_TO_LEAVE}\n")
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
            return _is_yes(self._read_line(f"{question} [Y/n] "))
        except (KeyboardInterrupt, EOFError, UsageError):
            return False

    def _read_line(self, prompt: str) -> str:
        self._show(prompt)
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return decoded(line, "What was typed").rstrip("\r\n")

    def _show(self, text: str) -> None:
        if is_terminal(sys.stderr):
            print(text, end="", file=sys.stderr, flush=True)


def keyboard(complete: Complete) -> Keyboard:
    """A keyboard for standard input, which must be a terminal."""
    return TypedKeyboard(complete) if is_terminal(sys.stdout) else PlainKeyboard()


def join_lines(read_line: Callable[[str], str]) -> str:
    r"""One message: a line, or more after a trailing `\` or between `\"\"\"`.

    Args:
        read_line: reads a line after showing a prompt.
    """
    text = read_line(_PROMPT)
    while (begun := unfinished(text)) is not None:
        text = begun + read_line("... ")
    return unquoted(text)


def unfinished(text: str) -> str | None:
    r"""The text to which the next line is appended; None if the message is complete."""
    if text.lstrip().startswith(_QUOTES):
        return None if _QUOTES in text.lstrip()[len(_QUOTES) :] else text + "\n"
    return text[:-1] + "\n" if text.endswith("\\") else None


def unquoted(text: str) -> str:
    r"""A complete message without the `\"\"\"` around it."""
    if not text.lstrip().startswith(_QUOTES):
        return text
    return text.lstrip()[len(_QUOTES) :].replace(_QUOTES, "", 1).strip("\n")


def _is_yes(answer: str) -> bool:
    return answer.strip().lower() in ("", "y", "yes")


def _prompt_session(complete: Complete) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.document import Document
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
    from platformdirs import user_data_path

    path = user_data_path("edgespec") / "chat_history"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    return path
