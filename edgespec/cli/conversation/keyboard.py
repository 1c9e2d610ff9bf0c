"""The keyboard of a chat: with editing and completion, or plain lines where answers go elsewhere."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgespec.cli.conversation.echo import suspend
from edgespec.cli.screen.terminal import is_terminal
from edgespec.cli.utf8 import decoded
from edgespec.errors import UsageError
from edgespec.files.user_folders import data_folder

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from edgespec.cli.completion import Completion

_PROMPT = ">>> "
_HOW_TO_LEAVE = "Ctrl-D or /bye leaves."
_DISCARDED = "The unfinished message was discarded. "
_QUOTES = '"""'
_HINTS = ("Ask something; /help lists the commands", "Ask something, or /help")

Complete = Callable[[str], list["Completion"]]


class Keyboard(Protocol):
    """The source of messages."""

    def messages(self) -> Iterator[str]:
        """The messages, until the end; a message may have several lines."""

    def confirm(self, question: str) -> bool:
        """True if the answer is yes."""

    def prefill(self, text: str) -> bool:
        """Begin the next message with a text that can be edited; False if that is not possible."""


class TypedKeyboard:
    """A person at a terminal, with history, completion and editing.

    Args:
        complete: gives the completions for the text before the cursor.
    """

    def __init__(self, complete: Complete) -> None:
        self._session = _prompt_session(complete)
        self._begun = ""  # the next message begins with it

    def messages(self) -> Iterator[str]:
        while True:
            try:
                text = _unquoted(self._read_message())
            except KeyboardInterrupt:
                begun = "\n" in self._session.default_buffer.text
                print(f"{_DISCARDED if begun else ''}{_HOW_TO_LEAVE}", file=sys.stderr)
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
        begun, self._begun = self._begun, ""
        return self._session.prompt(_PROMPT, default=begun, placeholder=FormattedText([("class:hint", hint)]))

    def prefill(self, text: str) -> bool:
        self._begun = text
        return True


class PlainKeyboard:
    """Reads whole lines, and shows prompts on standard error, as in `edgespec chat | tee answers.txt`."""

    def messages(self) -> Iterator[str]:
        while True:
            try:
                text = join_lines(self._read_line)
            except KeyboardInterrupt as stop:
                self._show(f"\n{stop}{_HOW_TO_LEAVE}\n")
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

    def prefill(self, text: str) -> bool:
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
    text = read_line(_PROMPT)
    while (begun := _unfinished(text)) is not None:
        try:
            text = begun + read_line("... ")
        except EOFError:
            return _unquoted(begun).rstrip("\n")
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_DISCARDED) from None
    return _unquoted(text)


def _unfinished(text: str) -> str | None:
    r"""The text to which the next line is appended; None if the message is complete."""
    if text.lstrip().startswith(_QUOTES):
        return None if _QUOTES in text.lstrip()[len(_QUOTES) :] else text + "\n"
    return text[:-1] + "\n" if text.endswith("\\") else None


def _unquoted(text: str) -> str:
    r"""A message without the `\"\"\"` around it, or before it if Ctrl-D ended it."""
    if not text.lstrip().startswith(_QUOTES):
        return text
    return text.lstrip()[len(_QUOTES) :].replace(_QUOTES, "", 1).strip("\n")


def _is_yes(answer: str) -> bool:
    """True if an answer to a question with `[Y/n]` is yes."""
    return answer.strip().lower() in ("", "y", "yes")


def _prompt_session(complete: Complete) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app, run_in_terminal
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.shortcuts import CompleteStyle
    from prompt_toolkit.styles import Style

    class LenientHistory(FileHistory):
        """A history whose file may be impossible to read or write, as on a full disk."""

        def load_history_strings(self) -> Iterable[str]:
            with suppress(OSError):
                return super().load_history_strings()
            return ()

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    class Offers(Completer):
        def get_completions(self, document: Document, _event: Any) -> Iterable[Completion]:
            for offer in complete(document.text_before_cursor):
                yield Completion(offer.text, -offer.replaces, display=offer.shown)

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        buffer = event.current_buffer
        begun = _unfinished(buffer.text)
        if begun is None:
            buffer.validate_and_handle()
        else:  # in the same buffer, so that the message is one entry of the history
            buffer.document = Document(begun, len(begun))

    @Condition
    def is_open() -> bool:
        buffer = get_app().current_buffer
        return buffer.document.is_cursor_at_the_end and _unfinished(buffer.text) is not None

    @keys.add("c-d", filter=is_open)
    def _send_open(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-z")
    def _suspend(event: Any) -> None:
        run_in_terminal(suspend)

    return PromptSession(
        history=LenientHistory(_history_file()),
        completer=Offers(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        key_bindings=keys,
        enable_open_in_editor=True,
        multiline=True,  # for pasted text and Alt-Enter; Enter sends
        # Not before a line that is only wrapped.
        prompt_continuation=lambda _width, _line, folded: "" if folded else "... ",
        style=Style.from_dict({"hint": "ansibrightblack"}),
    )


def _history_file() -> Path:
    path = data_folder() / "chat_history"
    with suppress(OSError):  # a home folder that cannot be written must not prevent a chat
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    return path
