"""What a person types: lines with history, completion and editing, until Ctrl-D."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from edgespec.cli.completion import Completion

_HINTS = ("Ask something; /help lists the commands", "Ask something, or /help")

Complete = Callable[[str], list["Completion"]]


class Keyboard(Protocol):
    """Where messages come from."""

    def messages(self) -> Iterator[str]:
        """What is typed, until the end; lines that belong together are one message."""

    def confirm(self, question: str) -> bool:
        """Whether the answer is yes."""


class TypedKeyboard:
    """A person at a terminal.

    Args:
        complete: what Tab offers for the text before the cursor.
    """

    def __init__(self, complete: Complete) -> None:
        self._session = _prompt_session(complete)

    def messages(self) -> Iterator[str]:
        while True:
            try:
                text = join_lines(self._read_line)
            except KeyboardInterrupt:
                print("Ctrl-D or /bye leaves.", file=sys.stderr)
                continue
            except EOFError:
                return
            if text.strip():
                yield text

    def confirm(self, question: str) -> bool:
        from prompt_toolkit import prompt

        try:
            return prompt(f"{question} [Y/n] ").strip().lower() in ("", "y", "yes")
        except (KeyboardInterrupt, EOFError):
            return False

    def _read_line(self, prompt: str) -> str:
        from prompt_toolkit.formatted_text import FormattedText

        room = shutil.get_terminal_size().columns - len(prompt)
        hint = next((hint for hint in _HINTS if len(hint) < room), "") if prompt == ">>> " else ""
        return self._session.prompt(prompt, placeholder=FormattedText([("class:hint", hint)]))


def join_lines(read_line: Callable[[str], str]) -> str:
    r"""One message: a line, or more after a trailing `\` or between `\"\"\"`.

    Args:
        read_line: reads a line after showing a prompt.
    """
    text = read_line(">>> ")
    if text.lstrip().startswith('"""'):
        text = text.lstrip()[3:]
        while '"""' not in text:
            text += "\n" + read_line("... ")
        return text.replace('"""', "", 1).strip("\n")
    while text.endswith("\\"):
        text = text[:-1] + "\n" + read_line("... ")
    return text


def _prompt_session(complete: Complete) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
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
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    history: History
    try:
        history = FileHistory(str(_history_file()))
    except OSError:
        history = InMemoryHistory()  # a home that cannot be written must not stop a chat
    return PromptSession(
        history=history,
        completer=Offers(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        enable_open_in_editor=True,
        key_bindings=keys,
        multiline=True,  # for pasted text and Alt-Enter; Enter sends
        # Not before a line that is only folded.
        prompt_continuation=lambda _width, _line, folded: "" if folded else "... ",
        style=Style.from_dict({"hint": "ansibrightblack"}),
    )


def _history_file() -> Path:
    from platformdirs import user_data_path

    path = user_data_path("edgespec") / "chat_history"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    return path
