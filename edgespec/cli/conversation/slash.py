"""The slash commands of a chat: what they do, and what Tab completes them with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from edgespec.base.units import readable
from edgespec.cli.completion import complete_model, paths
from edgespec.cli.conversation import settings
from edgespec.cli.conversation.attach import read_attachment
from edgespec.cli.conversation.export import Transcript, export, export_path
from edgespec.cli.screen.formatting import count, details, fitted
from edgespec.errors import EdgeSpecError, SessionError, UsageError, did_you_mean
from edgespec.files.user_folders import holds

if TYPE_CHECKING:
    from edgespec.cli.conversation.changeable_model import ChangeableModel
    from edgespec.cli.conversation.chat import Chat
    from edgespec.engine.sessions.session import ResumedSession, Session
    from edgespec.images.parts import Image

ALIASES = {
    "/?": "/help",
    "/exit": "/bye",
    "/quit": "/bye",
    "/regen": "/retry",
    "/regenerate": "/retry",
    "/cont": "/continue",
    "/read": "/file",
}
_KEYS = (
    "Ctrl-C stops an answer. Alt-Enter begins a new line; so does \\ at the end of one. "
    '""" opens and closes a text of several lines. @path in a question attaches a file or an image. '
    "Tab completes. Ctrl-X Ctrl-E opens an editor."
)


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

    def with_attached(self, text: str) -> TypedQuestion:
        """A question with the files and images that go with it."""

    def continue_answer(self) -> None:
        """Continue the last answer."""

    def confirm(self, question: str) -> bool:
        """True if the person says yes."""

    def prefill(self, text: str) -> bool:
        """Begin the next message with a text to be edited; False if that is not possible."""

    def say(self, text: str) -> None:
        """Print a note."""


@dataclass(frozen=True)
class SlashCommand:
    value: str  # as /help shows it; empty if it takes none
    help: str
    run: Callable[[str], None]
    offers: Callable[[str], Sequence[str]] | None = None  # completions of the value


class SlashCommands:
    def __init__(self, chat: TypedChat) -> None:
        self._chat = chat
        self._commands = {
            "/help": SlashCommand("", "this list", self._help),
            "/system": SlashCommand("[TEXT]", "set the system prompt, or show it", self._system),
            "/set": SlashCommand(
                "NAME VALUE", "change a setting: temperature, seed, tree_budget ...", self._set, _names
            ),
            "/show": SlashCommand("", "settings, model and session", self._show),
            "/file": SlashCommand("PATH", "attach a text file to the next question", self._file, paths),
            "/image": SlashCommand("PATH", "ask the next question about an image", self._image, paths),
            "/clear": SlashCommand("", "start over; a saved conversation is kept", self._clear),
            "/undo": SlashCommand("", "remove the last question and its answer", self._undo),
            "/retry": SlashCommand("", "answer the last question again (/regenerate)", self._retry),
            "/edit": SlashCommand(
                "[TEXT]", "ask TEXT instead of the last question, or change that", self._edit
            ),
            "/continue": SlashCommand("", "continue an answer that was cut off or stopped", self._continue),
            "/model": SlashCommand(
                "[NAME]", "switch to another model, or list the models here", self._model, complete_model
            ),
            "/save": SlashCommand(
                "NAME", "save the conversation now and after every turn", self._save, _sessions
            ),
            "/load": SlashCommand("NAME", "resume a saved conversation", self._load, _sessions),
            "/export": SlashCommand(
                "FILE",
                "write the conversation as Markdown, or as JSON if FILE ends in .json",
                self._export,
                paths,
            ),
            "/sessions": SlashCommand("", "list saved conversations", self._list_sessions),
            "/think": SlashCommand(
                "[show|hide|off|N]",
                "show the last thought, show or hide all, or limit thinking",
                self._think,
                _thinking,
            ),
            "/stats": SlashCommand("", "statistics of the last answer", self._stats),
            "/tree": SlashCommand(
                "", "draw the last token tree: accepted path and rejected branches", self._tree
            ),
            "/bye": SlashCommand("", "leave, as Ctrl-D does", lambda _: None),
        }

    @property
    def completions(self) -> Mapping[str, Callable[[str], Sequence[str]] | None]:
        """Each command, with what completes its value."""
        return {name: command.offers for name, command in self._commands.items()}

    @property
    def _session(self) -> Session:
        return self._chat.chat.session

    def run(self, name: str, value: str) -> None:
        """Run the command of that name or alias."""
        if "\0" in value:
            raise UsageError(f"The value of {name} contains a null character.", "Remove it.")
        self._command(ALIASES.get(name, name)).run(value)

    def _command(self, name: str) -> SlashCommand:
        if name in self._commands:
            return self._commands[name]
        hint = did_you_mean(name, [*self._commands, *ALIASES], "/help lists the commands.")
        raise UsageError(f"There is no command {name}.", hint)

    def _help(self, _rest: str) -> None:
        self._chat.chat.terminal.rows(
            {f"{name} {command.value}": command.help for name, command in self._commands.items()}
        )
        self._chat.say(_KEYS)

    def _clear(self, _rest: str) -> None:
        file = self._session.file
        self._session.clear()
        self._chat.chat.last_answer = None
        self._chat.last_question = None
        self._chat.attached.clear()
        self._chat.images.clear()
        if file is None:
            self._chat.say("Started a new conversation.")
        else:
            self._chat.say(f"Started a new conversation; /save NAME saves it. The old one is in {file.path}.")

    def _system(self, rest: str) -> None:
        if rest:
            self._session.system = settings.unquoted(rest)
            self._chat.say("System prompt set.")
        else:
            self._chat.say(self._session.system or "No system prompt.")

    def _set(self, rest: str) -> None:
        name, _, value = rest.removeprefix("parameter ").partition(" ")
        if name == "system":
            self._system(value)
            return
        if not value.strip():
            self._show_settings(settings.name_of(name))
            return
        if settings.is_budget(name):
            self._chat.chat.set_budget(settings.parse_budget(value))
        else:
            self._chat.chat.change(name, value.strip())
        self._report_setting(settings.name_of(name), value.strip())

    def _report_setting(self, name: str, value: str) -> None:
        now = settings.without_source(self._settings()[name])
        done = f"{name} reset to {now}" if value.lower() == settings.AS_AT_START else f"{name} set to {now}"
        if name == "think" and self._chat.chat.think_has_no_effect:
            done += ", which has no effect: the model's chat template has no thinking mode"
        self._chat.say(f"{done}.")

    def _think(self, rest: str) -> None:
        """Show the last thought, unfold or fold those to come, or set how much the model thinks."""
        chat = self._chat.chat
        if rest in ("show", "hide"):
            chat.thoughts.unfolded = rest == "show"
            self._chat.say(f"Thoughts will be {'shown' if rest == 'show' else 'folded'}.")
        elif rest:
            self._set(f"think {rest}")
        elif chat.last_answer is not None and chat.last_answer.reasoning:
            chat.thoughts.show(chat.last_answer.reasoning)
        else:
            self._chat.say("The last answer has no thought.")

    def _settings(self) -> dict[str, str]:
        chat = self._chat.chat
        budget = "auto" if chat.budget is None else str(chat.budget)
        return {**settings.shown(chat.config, chat.sources), "tree_budget": budget}

    def _show_settings(self, name: str) -> None:
        """Show one setting, or all if the name is empty."""
        rows = self._settings()
        if not name:
            self._chat.chat.terminal.rows(rows)
        elif name in rows:
            self._chat.say(f"{name} is {rows[name]}. To change it: /set {name} VALUE")
        else:
            raise settings.unknown(name)

    def _show(self, _rest: str) -> None:
        rows = {
            **self._settings(),
            "context": f"{self._chat.chat.context} tokens",
            "model": self._chat.chat.description,
            "system": self._session.system or "none",
            "session": str(self._session.file.path) if self._session.file else "not saved",
        }
        self._chat.chat.terminal.rows(rows)

    def _file(self, rest: str) -> None:
        name = settings.unquoted(rest)
        if not name:
            raise UsageError("/file needs the path of a text file.", "For example: /file notes.md")
        path, text = read_attachment(name)
        self._chat.attached.append((path, text))
        self._chat.say(f"Attached {path} ({count(len(text), 'character')}) to the next question.")

    def _image(self, rest: str) -> None:
        from edgespec.images.parts import image_of

        name = settings.unquoted(rest, "\"'")
        if not name:
            raise UsageError("/image needs the path of an image.", "For example: /image cat.png")
        self._session.require_sight()
        self._chat.images.append(image_of(name))
        self._chat.say(f"Attached {name} to the next question.")

    def _save(self, rest: str) -> None:
        if not rest:
            if self._session.file is None:
                raise UsageError("/save needs a name.", "For example: /save trip, or /save notes/trip.json")
            self._chat.say(_saved(self._session.file.path))
            return
        from edgespec.engine.sessions.file import session_path

        path = session_path(rest)
        if self._session.file is not None and self._session.file.path == path:
            self._chat.say(_saved(path))
            return
        if not self._session.messages:
            self._chat.say("Nothing to save yet. Ask something first.")
            return
        if holds(path.exists) and not self._chat.confirm(f"{path.stem} exists. Overwrite it?"):
            return
        self._session.save_to(rest, overwrite=True)
        self._chat.say(_saved(path))

    def _load(self, rest: str) -> None:
        from edgespec.engine.sessions.file import SessionFile, saved_sessions, session_path

        if not rest:
            raise UsageError("/load needs a name.", "/sessions lists them.")
        path = session_path(rest)
        if not holds(path.exists):
            hint = did_you_mean(rest, [s.name for s in saved_sessions()], "/sessions lists them.")
            raise SessionError(f"There is no session '{rest}'.", hint)
        if self._session.file is not None and self._session.file.path == path:
            self._chat.say("That conversation is already open.")
            return
        file = SessionFile(rest)
        try:
            resumed = self._session.resume(file)
        except EdgeSpecError:
            if self._session.file is not file:
                file.close()
            raise
        self._chat.chat.last_answer = None
        self._chat.last_question = pending_question(resumed)
        self._chat.chat.show_last_turn()
        self._chat.chat.report_resumed(resumed)

    def _export(self, rest: str) -> None:
        name = settings.unquoted(rest)
        if not name:
            raise UsageError("/export needs the name of a file.", "For example: /export trip.md")
        path = export_path(name)
        if holds(path.exists) and not self._chat.confirm(f"{path} exists. Overwrite it?"):
            return
        model = self._chat.chat.model_name
        export(path, Transcript(self._session.system, self._session.messages, model))
        self._chat.say(f"Wrote the conversation to {path}.")

    def _undo(self, _rest: str) -> None:
        """Remove the last question and its answer."""
        self._chat.last_question = None
        undone = self._chat.chat.undo()
        self._chat.say("Removed the last turn." if undone else "Nothing to undo.")

    def _retry(self, _rest: str) -> None:
        """Answer the last question again."""
        question = self._last_question()
        if question is None:
            self._chat.say("Nothing to retry.")
            return
        chat = self._chat.chat
        before = self._session.messages[-1:]
        answered = self._remove(question)
        self._chat.answer(question)
        config = chat.config
        repeats = not config.draws or config.seed is not None
        if answered and repeats and self._session.messages[-1:] == before:
            vary = "/set temperature 0.7" if not config.draws else "/set seed random"
            self._chat.say(f"The same answer again; {vary} varies it.")

    def _edit(self, rest: str) -> None:
        """Answer another question instead of the last one, which is offered for editing if none is given."""
        question = self._last_question()
        if question is None:
            self._chat.say("No question to edit.")
            return
        if rest:
            edited = self._chat.with_attached(rest)
            self._remove(question)
            images = dict.fromkeys((*question.images, *edited.images))
            self._chat.answer(edited._replace(images=tuple(images)))
        elif not self._chat.prefill(f"/edit {question.text}"):
            raise UsageError("/edit needs the new question.", "For example: /edit Why is the sea blue?")

    def _continue(self, _rest: str) -> None:
        """Continue the last answer."""
        if not self._session.messages:
            raise UsageError("No answer to continue.", "Ask something first.")
        self._chat.continue_answer()

    def _last_question(self) -> TypedQuestion | None:
        messages = self._session.messages
        if self._chat.last_question is None and messages:
            self._chat.last_question = _question(messages[-2])
        return self._chat.last_question

    def _remove(self, question: TypedQuestion) -> bool:
        """Remove a question and its answer; False if it got none, and so was not kept."""
        messages = self._session.messages
        if messages and _question(messages[-2]) == question:
            return self._chat.chat.undo()
        return False

    def _model(self, name: str) -> None:
        """Switch to another model, or list the models here if none is named."""
        if not name:
            self._list_models()
            return
        models, chat = self._chat.models, self._chat.chat
        if models is None:
            raise UsageError("This chat cannot switch models.", "Start another chat.")
        self._session.detach()
        try:
            models.replace_by(settings.unquoted(name))
        finally:
            if not models.engine.closed:  # otherwise the next question has it loaded again
                chat.use(models.engine, models.sampling)
        reads = "; it will read the conversation with your next question" if self._session.messages else ""
        self._chat.say(f"Switched to {chat.model_name}{reads}.")

    def _list_models(self) -> None:
        from edgespec.models.hub.inventory import local_models
        from edgespec.models.hub.repository import Hub

        self._chat.say(f"Current model: {self._chat.chat.description}.")
        found = {model.name: readable(model.n_bytes) for model in local_models(Hub.without_token())}
        self._chat.chat.terminal.rows(found)

    def _list_sessions(self, _rest: str) -> None:
        from edgespec.engine.sessions.file import saved_sessions

        found = list(saved_sessions())
        if not found:
            self._chat.say("No saved conversations yet. /save NAME saves this one.")
        columns = shutil.get_terminal_size().columns
        for s in found:
            first = " ".join(s.first.split())
            line = f"{s.name}  {count(s.turns, 'turn')}  {s.saved[:16].replace('T', ' ')}  {s.model}  {first}"
            self._chat.say(fitted(line, columns - 1))

    def _stats(self, _rest: str) -> None:
        chat = self._chat.chat
        if chat.last_answer is not None:
            rows = details(chat.last_answer) | {"sampling": chat.sampled}
            chat.terminal.rows(rows)
        elif self._session.messages:
            self._chat.say("No statistics: that answer was removed.")
        else:
            self._chat.say("No answer yet.")

    def _tree(self, _rest: str) -> None:
        if not self._chat.chat.draw_last_tree(shutil.get_terminal_size().columns - 1):
            self._chat.say(
                "Nothing was drafted in the last answer. "
                "/set tree_budget 16 drafts trees even where they do not pay."
                if self._chat.chat.last_answer is not None
                else "No answer yet."
            )


def _saved(path: Path) -> str:
    return f"Saved to {path}; new turns are saved automatically."


def _names(typed: str) -> Sequence[str]:
    """Names of settings, and then the values that can be listed."""
    name, space, _ = typed.partition(" ")
    if space:
        return [f"{name} {value}" for value in settings.values_of(name)]
    return [f"{name} " for name in settings.NAMES]


def _sessions(typed: str) -> Sequence[str]:
    from edgespec.engine.sessions.file import saved_sessions

    return [session.name for session in saved_sessions()] or paths(typed)


def _thinking(_typed: str) -> Sequence[str]:
    return ["show", "hide", *settings.values_of("think")]


def _question(message: Mapping[str, Any]) -> TypedQuestion:
    return TypedQuestion(message["content"], tuple(message.get("images", ())))
