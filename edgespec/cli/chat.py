"""`edgespec chat`: a conversation, typed at a terminal or piped in a line a turn."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.interrupt import Interruption, cancelling
from edgespec.cli.options import LoadOptions, OutputOptions, SamplingOptions, with_options
from edgespec.cli.terminal import ResultStream, Terminal, format_details, is_terminal
from edgespec.errors import ContextLengthError, EdgeSpecError, TemplateError, UsageError
from edgespec.generation import Generation, GenerationConfig

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from edgespec.engine import Engine
    from edgespec.session import Session

_HELP = """\
/clear        start over
/undo         take back the last question and its answer
/retry        answer the last question again
/system TEXT  set the system prompt; without TEXT, show it
/stats        figures of the last answer
/bye          leave, as Ctrl-D does
Ctrl-C stops an answer. \"\"\" opens and closes a text of several lines; so does \\ at the end of a line."""
_ALIASES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye", "/regen": "/retry"}
_GO_ON = "/undo takes back the last turn, /clear starts over, and --context makes it larger."


@with_options
def chat(
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system prompt.")] = None,
    *,
    loading: LoadOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Hold a conversation."""
    config = sampling.config_for(loading)
    terminal = Terminal(quiet=output.quiet, verbose=output.verbose)
    results = ResultStream(sys.stdout, "Standard output")
    typed = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    if typed and output.as_json:
        raise UsageError("--json is not for a chat at a terminal.", "Pipe the questions in, a line each.")
    terminal.rule(config.rule)
    with terminal.load(loading) as engine:
        if not engine.has_chat_template:
            raise TemplateError(
                "The model has no chat template, so it cannot chat.",
                "Let it go on with a text instead: edgespec generate --raw -p TEXT.",
            )
        from edgespec.session import Session

        talk = Conversation(Session(engine, system), engine, config, terminal, results)
        if typed:
            TypedChat(talk).run()
        else:
            _answer_lines(talk, as_json=output.as_json)


class Conversation:
    """Asks, prints the answers as they come, and tells how they went."""

    def __init__(
        self,
        session: Session,
        engine: Engine,
        config: GenerationConfig,
        terminal: Terminal,
        results: ResultStream,
    ) -> None:
        self.session = session
        self.config = config
        self.terminal = terminal
        self.results = results
        self._engine = engine
        self.last_answer: Generation | None = None

    def ask(self, text: str, *, as_json: bool = False) -> Interruption:
        """One turn; returns whether a signal cut it short.

        Raises:
            EdgeSpecError: there is no answer; the conversation is as it was.
        """
        answer = None
        try:
            with cancelling(self._engine) as interruption, self.terminal.status() as status:
                for chunk in self.session.ask(text, self.config, on_prefill=status.prefill):
                    status.clear()
                    if not as_json:
                        self.results.text(chunk.text)
                    answer = chunk.generation
        finally:
            self.results.end_line()
        assert answer is not None, "the last chunk carries the answer"
        self.last_answer = answer
        if as_json:
            self.results.record(answer.to_json(text))
        self.terminal.statistics(answer)
        if answer.context_full:
            self.terminal.warn(f"The context of {self._engine.context} tokens is full. {_GO_ON}")
        return interruption


def _answer_lines(talk: Conversation, *, as_json: bool) -> None:
    """Without a terminal: every line of standard input is a turn."""
    for line in sys.stdin or ():
        text = line.strip()
        if text and (interruption := talk.ask(text, as_json=as_json)):
            raise typer.Exit(interruption.exit_code)


class TypedChat:
    """A person types, and slash commands steer."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk
        self._session = talk.session
        self._last_text: str | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._say(_HELP),
            "/clear": self._clear,
            "/undo": self._undo,
            "/retry": self._retry,
            "/system": self._system,
            "/stats": self._stats,
        }

    def run(self) -> None:
        """Until Ctrl-D or /bye."""
        for text in typed_messages():
            name, _, rest = text.strip().partition(" ")
            try:
                if not re.fullmatch(r"/[a-z?-]+", name):
                    self._ask(text)
                elif _ALIASES.get(name, name) == "/bye":
                    return
                else:
                    self._command(_ALIASES.get(name, name))(rest.strip())
            except EdgeSpecError as error:
                self._talk.terminal.warn(str(error))
                if isinstance(error, ContextLengthError):
                    self._say(_GO_ON)
            except KeyboardInterrupt:
                self._say("Stopped.")

    def _ask(self, text: str) -> None:
        self._last_text = text
        if self._talk.ask(text):
            self._say("Stopped; what was said so far is kept.")

    def _command(self, name: str) -> Callable[[str], None]:
        if name in self._commands:
            return self._commands[name]
        close = difflib.get_close_matches(name, [*self._commands, "/bye"], n=1)
        hint = f"Did you mean {close[0]}?" if close else "/help lists the commands."
        raise UsageError(f"There is no command {name}.", hint)

    def _clear(self, _rest: str) -> None:
        self._session.clear()
        self._last_text = None
        self._say("The conversation starts over.")

    def _undo(self, _rest: str) -> None:
        self._last_text = None
        self._say("The last turn is taken back." if self._session.undo() else "There is nothing to undo.")

    def _retry(self, _rest: str) -> None:
        if self._last_text is None:
            self._say("There is nothing to retry.")
            return
        # A question that got no answer at all was not kept.
        if self._session.messages and self._session.messages[-2]["content"] == self._last_text:
            self._session.undo()
        if self._talk.config.greedy or self._talk.config.seed is not None:
            self._say("The answer will be the same; --temperature 0.7 without a seed varies it.")
        self._ask(self._last_text)

    def _system(self, rest: str) -> None:
        if rest:
            self._session.system = rest
            self._say("The system prompt is set.")
        else:
            self._say(self._session.system or "There is no system prompt.")

    def _stats(self, _rest: str) -> None:
        answer = self._talk.last_answer
        self._say(format_details(answer) if answer else "There is no answer yet.")

    def _say(self, text: str) -> None:
        self._talk.terminal.note(text)


def typed_messages() -> Iterator[str]:
    """What a person types, until Ctrl-D; lines that belong together are one message."""
    prompt = _prompt_session()
    while True:
        try:
            text = join_lines(prompt.prompt)
        except KeyboardInterrupt:
            print("Ctrl-D or /bye leaves.", file=sys.stderr)
            continue
        except EOFError:
            return
        if text.strip():
            yield text


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


def _prompt_session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    history: History
    try:
        history = FileHistory(str(_history_file()))
    except OSError:
        history = InMemoryHistory()  # a home that cannot be written must not stop a chat
    return PromptSession(history=history)


def _history_file() -> Path:
    from platformdirs import user_data_path

    path = user_data_path("edgespec") / "chat_history"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    return path
