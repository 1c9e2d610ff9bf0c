"""`edgespec chat`: a conversation, typed at a terminal; or one question, piped in."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.completion import complete_session
from edgespec.cli.conversation.commands import TypedChat
from edgespec.cli.conversation.echo import without_echo
from edgespec.cli.conversation.prompting import keyboard
from edgespec.cli.declare import is_on_command_line, option, with_options
from edgespec.cli.interrupt import Interruption, cancelling
from edgespec.cli.options import LoadOptions, OutputOptions, SamplingOptions, exact_contradicts
from edgespec.cli.piped import whole_prompt
from edgespec.cli.screen.markdown import MarkdownWriter
from edgespec.cli.screen.terminal import ResultStream, Terminal, is_terminal, shows_colour
from edgespec.cli.utf8 import checked
from edgespec.cli.words import FirstWord, MoreWords, NamedModel, model_and_prompt, words_of
from edgespec.errors import TemplateError, UsageError
from edgespec.generation import Generation, GenerationConfig

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.engine.session import Resumed, Session

_PANEL = "Conversation"


@partial(with_options, leave_out=("model",))
def chat(
    called: typer.Context,
    word: FirstWord = None,
    words: MoreWords = None,
    prompt: Annotated[
        str | None,
        option(_PANEL, "-p --prompt", "The first question.", variable=False, metavar="TEXT"),
    ] = None,
    system: Annotated[str | None, option(_PANEL, "--system", "The system prompt.", metavar="TEXT")] = None,
    session: Annotated[
        str | None,
        option(
            _PANEL,
            "--session",
            "Save the conversation as it goes, and go on with it next time.",
            metavar="NAME|FILE",
            autocompletion=complete_session,
        ),
    ] = None,
    model: NamedModel = None,
    *,
    loading: LoadOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Hold a conversation."""
    model, prompt = model_and_prompt(
        words_of(word, words),
        model=model,
        prompt=prompt,
        model_is_given=is_on_command_line(called, "model"),
    )
    loading = replace(loading, model=model)
    config = sampling.config_for(loading)
    terminal = Terminal(quiet=output.quiet, verbose=output.verbose)
    results = ResultStream(sys.stdout, "Standard output")
    for text, name in ((system, "The system prompt"), (prompt, "The question")):
        if text is not None:
            checked(text, name)
    typed = is_terminal(sys.stdin)
    if typed and output.as_json:
        raise UsageError("--json is not for a chat at a terminal.", "Pipe the question in.")
    if not typed:
        prompt = whole_prompt(prompt, terminal, "Pipe the question in, or give it with -p TEXT.")
    terminal.rule(config.rule)
    with ExitStack() as stack:
        if typed:  # what is typed ahead, while the model is loaded too, shows when its turn comes
            stack.enter_context(without_echo())
        file = None
        if session is not None:
            from edgespec.engine.session_file import SessionFile

            file = SessionFile(session)
            stack.callback(file.close)
        engine = stack.enter_context(terminal.load(loading))
        if not engine.has_chat_template:
            raise TemplateError(
                "The model has no chat template, so it cannot chat.",
                "Let it go on with a text instead: edgespec generate --raw -p TEXT.",
            )
        from edgespec.engine.session import Session

        conversation = Session(engine, system)
        talk = Talk(
            conversation, engine, config, terminal, results, budget=loading.budget, exact=bool(loading.exact)
        )
        pending = None
        if file is not None:
            resumed = conversation.resume(file)
            talk.tell_resumed(resumed)
            pending = resumed.pending if resumed else None
            if system is not None and conversation.system != system:
                conversation.system = system
        if typed:
            typed_chat = TypedChat(talk, pending)
            typed_chat.run(keyboard(typed_chat.completer), first=prompt)
        else:
            assert prompt is not None
            _answer_once(talk, prompt, as_json=output.as_json)


class Talk:
    """Asks, shows the answers as they come, and tells how they went.

    Attributes:
        config: how answers are generated.
        budget: the tree budget; None is auto.
        exact: somebody asked for exact decoding.
        last_answer: the latest answer of this program.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        config: GenerationConfig,
        terminal: Terminal,
        results: ResultStream,
        *,
        budget: int | None = None,
        exact: bool = False,
    ) -> None:
        self.session = session
        self.config = config
        self.terminal = terminal
        self.results = results
        self.budget = budget
        self.exact = exact
        self.last_answer: Generation | None = None
        self._engine = engine
        self._told_unsaved = False
        self._markdown = MarkdownWriter(results, _window) if shows_colour(sys.stdout) else None

    @property
    def context(self) -> int:
        """Tokens that the context holds."""
        return self._engine.context

    @property
    def description(self) -> str:
        """Target, drafter and mode in one line."""
        return self._engine.description

    def ask(self, text: str, *, as_json: bool = False) -> Interruption:
        """One turn; returns whether a signal cut it short.

        Raises:
            EdgeSpecError: there is no answer; the conversation is as it was.
        """
        answer = None
        try:
            with without_echo(), cancelling(self._engine) as interruption, self.terminal.status() as status:
                status.waiting("Reading the prompt")
                for chunk in self.session.ask(text, self.config, on_prefill=status.prefill):
                    status.clear()
                    if not as_json:
                        (self._markdown or self.results).text(chunk.text)
                    answer = chunk.generation
        finally:
            if self._markdown is not None:
                self._markdown.end()
            self.results.end_line()
        assert answer is not None, "the last chunk carries the answer"
        self.last_answer = answer
        if as_json:
            self.results.record(answer.to_json(text))
        if answer.passes:
            self.terminal.statistics(answer)
        if self.session.unsaved and not self._told_unsaved:
            self._told_unsaved = True
            self.terminal.warn(f"{self.session.unsaved}. The conversation will be read again next time.")
        return interruption

    def set_config(self, config: GenerationConfig) -> None:
        """Generate so from now on.

        Raises:
            UsageError: the rule of `verify` contradicts --exact.
        """
        if self.exact and not config.rule.kind.invariant:
            raise exact_contradicts(config.verify)
        self.config = config
        self.terminal.rule(config.rule)

    def set_budget(self, budget: int | None) -> None:
        """Size the trees from now on; raises UsageError if the engine cannot."""
        self._engine.set_tree_budget(budget)
        self.budget = budget

    def tell_resumed(self, resumed: Resumed | None) -> None:
        """Say how a saved conversation was taken up."""
        if resumed is None or not (resumed.turns or resumed.pending):
            return
        turns = f"{resumed.turns} turn{'' if resumed.turns == 1 else 's'}"
        if resumed.reason:
            how = f"{resumed.reason}, so the next question reads it again"
        else:
            how = f"{resumed.restored} of {resumed.tokens} tokens put back"
        self.terminal.note(f"Going on with a conversation of {turns}. {how[0].upper()}{how[1:]}.")
        if resumed.pending:
            question = " ".join(resumed.pending.split())
            short = question if len(question) <= 60 else question[:59] + "…"
            self.terminal.note(f"The last question got no answer: {short} /retry asks it again.")

    def draw_last_tree(self, columns: int) -> bool:
        """Draw the latest tree; False if there is none."""
        if self._engine.last_round is None:
            return False
        from edgespec.cli.screen.tree_drawing import draw_tree

        tree, accepted = self._engine.last_round
        vocabulary = self._engine.target.model.vocabulary
        lines = draw_tree(tree, accepted, lambda token: vocabulary.piece(token, control=True), columns)
        for line in lines:
            self.terminal.show(line)
        return True


def _answer_once(talk: Talk, question: str, *, as_json: bool) -> None:
    """Without a terminal: all of standard input is one question, whatever its lines begin with."""
    interruption = talk.ask(question, as_json=as_json)
    if talk.last_answer is not None and talk.last_answer.context_full:
        talk.terminal.warn(
            f"The context of {talk.context} tokens is full, so the answer ends early; "
            "--context makes it larger."
        )
    if interruption:
        raise typer.Exit(interruption.exit_code)


def _window() -> os.terminal_size:
    try:  # what is so now; the variables COLUMNS and LINES do not follow a window that changes its size
        return os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return shutil.get_terminal_size()
