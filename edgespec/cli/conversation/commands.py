"""A chat at a terminal: questions, and the slash commands that steer it."""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.completion import Completer, paths
from edgespec.cli.conversation import clipboard, settings
from edgespec.cli.conversation.attach import read_attachment, with_attachments
from edgespec.cli.screen.formatting import details
from edgespec.cli.utf8 import checked
from edgespec.errors import ContextLengthError, EdgeSpecError, SessionError, UsageError

if TYPE_CHECKING:
    from edgespec.cli.conversation.prompting import Keyboard
    from edgespec.cli.conversation.talk import Talk

_ALIASES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye", "/regen": "/retry", "/read": "/file"}
_KEYS = (
    "Ctrl-C stops an answer. Alt-Enter begins a new line; so does \\ at the end of one. "
    '""" opens and closes a text of several lines. @path in a question attaches a file. '
    "Tab completes. Ctrl-X Ctrl-E opens an editor."
)
_GO_ON = "/undo takes back the last turn, /clear starts over, and --context makes it larger."


@dataclass(frozen=True)
class Command:
    """What follows a slash.

    Attributes:
        value: what it takes, for people; empty if nothing.
        offers: what Tab completes the value with.
    """

    value: str
    help: str
    run: Callable[[str], None]
    offers: Callable[[str], Sequence[str]] | None = None


class TypedChat:
    """A person types, and slash commands steer.

    Args:
        pending: a question that is waiting for an answer since last time, for /retry.
    """

    def __init__(self, talk: Talk, pending: str | None = None) -> None:
        self._talk = talk
        self._session = talk.session
        self._keyboard: Keyboard
        self._last_text = pending
        self._attached: list[tuple[Path, str]] = []
        self._commands = {
            "/help": Command("", "this list", self._help),
            "/system": Command("[TEXT]", "set the system prompt, or show it", self._system),
            "/set": Command(
                "NAME VALUE", "change a setting: temperature, seed, budget ...", self._set, _names
            ),
            "/show": Command("", "settings, model and session", self._show),
            "/file": Command("PATH", "attach a text file to the next question", self._file, paths),
            "/clear": Command("", "start over; what is saved stays as it is", self._clear),
            "/undo": Command("", "take back the last question and its answer", self._undo),
            "/retry": Command("", "answer the last question again", self._retry),
            "/save": Command("NAME", "save the conversation, from now on as it goes", self._save, _sessions),
            "/load": Command("NAME", "go on with a saved conversation", self._load, _sessions),
            "/sessions": Command("", "list saved conversations", self._list_sessions),
            "/stats": Command("", "figures of the last answer", self._stats),
            "/tree": Command("", "draw the last token tree: accepted path and rejected branches", self._tree),
            "/copy": Command("[code]", "copy the last answer, or its last block of code", self._copy, _code),
            "/bye": Command("", "leave, as Ctrl-D does", lambda _: None),
        }

    @property
    def completer(self) -> Completer:
        """What Tab offers."""
        return Completer({name: command.offers for name, command in self._commands.items()})

    def run(self, keyboard: Keyboard, first: str | None = None) -> None:
        """Until Ctrl-D or /bye.

        Args:
            first: a question from the command line, asked before anything is read.
        """
        self._keyboard = keyboard
        if first is not None:
            self._say(f">>> {first}")
            self._guarded(lambda: self._answer(first))
        for text in keyboard.messages():
            name = text.strip().partition(" ")[0]
            if _ALIASES.get(name, name) == "/bye":
                return
            self._guarded(partial(self._take, text))

    def _take(self, text: str) -> None:
        """A question, or a command."""
        checked(text, "What was typed")
        name, _, rest = text.strip().partition(" ")
        if re.fullmatch(r"/[a-z?-]+", name):
            self._command(_ALIASES.get(name, name)).run(rest.strip())
        else:
            self._ask(text)

    def _guarded(self, do: Callable[[], None]) -> None:
        """Do it; a failure is told, and the chat goes on."""
        try:
            do()
        except EdgeSpecError as error:
            self._talk.terminal.warn(str(error))
        except KeyboardInterrupt:
            self._say("Stopped.")

    def _ask(self, text: str) -> None:
        text, files = with_attachments(text, self._attached)
        self._attached.clear()
        if files:
            self._say(f"Attached: {', '.join(map(str, files))}")
        self._answer(text)

    def _answer(self, text: str) -> None:
        """Ask, and ask what to drop if there is no room."""
        self._last_text = text
        try:
            interruption = self._talk.ask(text)
        except ContextLengthError as error:
            if not self._session.messages:
                raise
            self._talk.terminal.warn(error.what)
            if self._drop_turns(text):
                self._answer(text)
            return
        answer = self._talk.last_answer
        if interruption and answer is not None and answer.passes:
            self._say("Stopped; what was said so far is kept.")
        elif interruption:
            self._say("Stopped before the answer began, so the question is not kept. /retry asks it again.")
        if answer is not None and answer.context_full:
            self._talk.terminal.warn(
                f"The context of {self._talk.context} tokens is full, so the answer ends early."
            )
            self._drop_turns("")

    def _drop_turns(self, text: str) -> bool:
        """Offer to drop the oldest turns; whether that was done."""
        possible = self._session.turns > 1 or text
        if possible and self._keyboard.confirm("Drop the oldest turns to make room?"):
            dropped = self._session.drop_oldest(text)
            if dropped:
                self._say(f"{_count(dropped, 'turn')} dropped, {self._session.turns} kept.")
                return True
            self._say("That does not make enough room.")
        self._say(_GO_ON)
        return False

    def _command(self, name: str) -> Command:
        if name in self._commands:
            return self._commands[name]
        close = difflib.get_close_matches(name, [*self._commands, *_ALIASES], n=1)
        hint = f"Did you mean {close[0]}?" if close else "/help lists the commands."
        raise UsageError(f"There is no command {name}.", hint)

    def _help(self, _rest: str) -> None:
        self._talk.terminal.rows(
            {f"{name} {command.value}": command.help for name, command in self._commands.items()}
        )
        self._say(_KEYS)

    def _clear(self, _rest: str) -> None:
        file = self._session.file
        self._session.clear()
        self._last_text = None
        self._attached.clear()
        if file is None:
            self._say("The conversation starts over.")
        else:
            self._say(
                f"The conversation so far stays saved in {file.path}. A new one begins; it is not saved "
                "until /save NAME."
            )

    def _undo(self, _rest: str) -> None:
        self._last_text = None
        self._say("The last turn is taken back." if self._session.undo() else "There is nothing to undo.")

    def _retry(self, _rest: str) -> None:
        if self._last_text is None and self._session.messages:
            self._last_text = self._session.messages[-2]["content"]
        if self._last_text is None:
            self._say("There is nothing to retry.")
            return
        # A question that got no answer at all was not kept.
        if self._session.messages and self._session.messages[-2]["content"] == self._last_text:
            self._session.undo()
            if self._talk.config.greedy or self._talk.config.seed is not None:
                self._say("The answer will be the same; /set temperature 0.7 without a seed varies it.")
        self._answer(self._last_text)

    def _system(self, rest: str) -> None:
        if rest:
            self._session.system = rest.strip('"')
            self._say("The system prompt is set.")
        else:
            self._say(self._session.system or "There is no system prompt.")

    def _set(self, rest: str) -> None:
        name, _, value = rest.removeprefix("parameter ").partition(" ")
        if name == "system":
            self._system(value)
            return
        if not value.strip():
            raise UsageError("/set needs a name and a value.", "For example: /set temperature 0.7")
        if settings.is_budget(name):
            self._talk.set_budget(settings.parse_budget(value))
        else:
            self._talk.set_config(settings.changed(self._talk.config, name, value.strip()))
        self._say(f"{name} is {value.strip()} from now on.")

    def _show(self, _rest: str) -> None:
        rows = {
            **settings.shown(self._talk.config),
            "budget": "auto" if self._talk.budget is None else str(self._talk.budget),
            "context": f"{self._talk.context} tokens",
            "model": self._talk.description,
            "system": self._session.system or "none",
            "session": str(self._session.file.path) if self._session.file else "not saved",
        }
        self._talk.terminal.rows(rows)

    def _file(self, rest: str) -> None:
        if not rest.strip('"'):
            raise UsageError("/file needs the path of a text file.", "For example: /file notes.md")
        path, text = read_attachment(rest.strip('"'))
        self._attached.append((path, text))
        self._say(f"{path} ({len(text)} characters) goes with the next question.")

    def _save(self, rest: str) -> None:
        if not rest:
            if self._session.file is None:
                raise UsageError("/save needs a name.", "For example: /save trip, or /save notes/trip.json")
            self._say(f"The conversation is saved in {self._session.file.path} as it goes.")
            return
        from edgespec.engine.session_file import SessionFile, session_path

        path = session_path(rest)
        if self._session.file is not None and self._session.file.path == path:
            self._say(f"The conversation is saved in {path} as it goes.")
            return
        if path.exists() and not self._keyboard.confirm(f"{path.stem} exists. Write over it?"):
            return
        self._session.save_to(SessionFile(rest))
        self._say(f"The conversation is saved in {path}, from now on as it goes.")

    def _load(self, rest: str) -> None:
        from edgespec.engine.session_file import SessionFile, saved_sessions, session_path

        if not rest:
            raise UsageError("/load needs a name.", "/sessions lists them.")
        path = session_path(rest)
        if not path.exists():
            close = difflib.get_close_matches(rest, [s.name for s in saved_sessions()], n=1)
            raise SessionError(
                f"There is no session '{rest}'.",
                f"Did you mean {close[0]}?" if close else "/sessions lists them.",
            )
        if self._session.file is not None and self._session.file.path == path:
            self._say("That is this one.")
            return
        file = SessionFile(rest)
        try:
            resumed = self._session.resume(file)
        except EdgeSpecError:
            if self._session.file is not file:
                file.close()
            raise
        self._last_text = resumed.pending if resumed else None
        self._talk.tell_resumed(resumed)

    def _list_sessions(self, _rest: str) -> None:
        from edgespec.engine.session_file import saved_sessions

        found = list(saved_sessions())
        if not found:
            self._say("No conversation was saved yet; /save NAME does that.")
        columns = shutil.get_terminal_size().columns
        for s in found:
            first = " ".join(s.first.split())
            line = (
                f"{s.name}  {_count(s.turns, 'turn')}  {s.saved[:16].replace('T', ' ')}  {s.model}  {first}"
            )
            self._say(line if len(line) < columns else line[: columns - 2] + "…")

    def _stats(self, _rest: str) -> None:
        answer = self._talk.last_answer
        if answer is None:
            self._say("There is no answer yet.")
        else:
            self._talk.terminal.rows(details(answer))

    def _tree(self, _rest: str) -> None:
        if not self._talk.draw_last_tree(shutil.get_terminal_size().columns - 1):
            self._say("No tree was drafted yet. /set budget 16 asks for trees even where they do not pay.")

    def _copy(self, rest: str) -> None:
        answer = self._talk.last_answer
        text = (
            answer.text if answer else self._session.messages[-1]["content"] if self._session.messages else ""
        )
        if rest:
            blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
            text = blocks[-1] if blocks else ""
        if not text:
            self._say("There is nothing to copy.")
            return
        how = clipboard.copy(text, self._talk.results)
        self._say(f"{_count(len(text), 'character')} copied {how}.")

    def _say(self, text: str) -> None:
        self._talk.terminal.note(text)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _names(_typed: str) -> Sequence[str]:
    return [f"{name} " for name in settings.NAMES]


def _sessions(typed: str) -> Sequence[str]:
    from edgespec.engine.session_file import saved_sessions

    return [session.name for session in saved_sessions()] or paths(typed)


def _code(_typed: str) -> Sequence[str]:
    return ["code"]
