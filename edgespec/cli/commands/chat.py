"""`edgespec chat`: a conversation at a terminal, or one question from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.completion import complete_session
from edgespec.cli.conversation.attach import (
    Attachments,
    ImageFiles,
    after_files,
    read_attachments,
    read_images,
)
from edgespec.cli.conversation.changeable_model import ChangeableModel
from edgespec.cli.conversation.chat import Chat
from edgespec.cli.conversation.echo import without_echo
from edgespec.cli.conversation.interactive import InteractiveChat
from edgespec.cli.conversation.keyboard import Keyboard, PlainKeyboard, TypedKeyboard
from edgespec.cli.conversation.slash import pending_question
from edgespec.cli.conversation.welcome import announce_download, greeting, welcome
from edgespec.cli.options.common import OutputOptions, Preset, System, SystemFile, system_prompt
from edgespec.cli.options.declaration import config_option, is_on_command_line, option, with_options
from edgespec.cli.options.sampling import SamplingOptions
from edgespec.cli.prompt import FirstWord, MoreWords, NamedModel, model_and_prompt, whole_prompt, words_of
from edgespec.cli.screen.results import ResultStream
from edgespec.cli.screen.terminal import Terminal, is_terminal
from edgespec.cli.utf8 import as_text
from edgespec.config import Config
from edgespec.errors import TemplateError, UsageError

if TYPE_CHECKING:
    from edgespec.images.parts import Image

_PANEL = "Prompt"


@partial(with_options, leave_out=("model",))
def chat(
    called: typer.Context,
    word: FirstWord = None,
    words: MoreWords = None,
    prompt: Annotated[
        str | None,
        option(_PANEL, "-p --prompt", "The first question.", variable=False, metavar="TEXT"),
    ] = None,
    system: System = None,
    system_file: SystemFile = None,
    files: Attachments = None,
    images: ImageFiles = None,
    mmproj: Annotated[str | None, config_option("mmproj", panel=_PANEL)] = None,
    preset: Preset = None,
    session: Annotated[
        str | None,
        option(
            _PANEL,
            "--session",
            "Save the conversation under this name after every turn; next time, resume it with its model.",
            metavar="NAME|FILE",
            autocompletion=complete_session,
        ),
    ] = None,
    model: NamedModel = None,
    *,
    loading: Config,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Start a conversation."""
    ends_after_prompt = called.info_name == "run"
    model_is_given = is_on_command_line(called, "model")
    named, prompt = model_and_prompt(
        words_of(word, words),
        model=model if model_is_given else None,
        prompt=prompt,
        model_is_given=model_is_given,
    )
    loading = loading.with_(model=named or model, mmproj=mmproj, images=bool(images))
    sampling.config_for(loading)  # refuses what is wrong before the model is loaded
    terminal = Terminal(quiet=output.quiet, verbose=output.verbose)
    results = ResultStream(sys.stdout, "Standard output")
    system = system_prompt(called, system, system_file)
    if prompt is not None:
        prompt = as_text(prompt, "The question")
    attached, shown = read_attachments(files), read_images(images)
    typed = is_terminal(sys.stdin) and not (ends_after_prompt and prompt is not None)
    if typed and output.as_json:
        raise UsageError("--json does not work in an interactive chat.", "Pipe the question in.")
    if not typed:
        prompt = whole_prompt(prompt, terminal, "Pipe the question in, or use -p TEXT.")
        prompt = after_files(prompt, attached)
    default = "recommended" if is_terminal(sys.stdin) else "greedy"  # what is piped in comes from a script
    with ExitStack() as stack:
        if typed:  # what is typed ahead, even while the model is loaded, shows when its turn comes
            stack.enter_context(without_echo())
        file = None
        if session is not None:
            from edgespec.engine.sessions.file import SessionFile
            from edgespec.engine.sessions.model import model_of

            file = SessionFile(session)
            stack.callback(file.close)
            if named is None:
                loading = loading.with_(model=model_of(file) or model)
        if not output.quiet:
            announce_download(terminal, loading)
        models = stack.enter_context(
            ChangeableModel(
                loading,
                terminal,
                lambda loading, engine: sampling.chosen_for(
                    loading, engine.target.model.path, default=default
                ),
            )
        )
        engine = models.engine
        if not engine.has_chat_template:
            raise TemplateError(
                "The model has no chat template, so it cannot chat.",
                "To continue plain text instead: edgespec generate --raw -p TEXT",
            )
        chosen = models.sampling
        terminal.rule(chosen.config.rule)
        terminal.thinking(engine, chosen.config)
        from edgespec.engine.sessions.session import Session

        conversation = Session(engine, system)
        turns = Chat(
            conversation,
            engine,
            chosen.config,
            terminal,
            results,
            sources=chosen.sources,
            budget=loading.speculation.tree_budget,
            exact=bool(loading.speculation.exact),
        )
        pending = None
        if file is not None:
            resumed = conversation.resume(file)
            if typed:
                turns.show_last_turn()
                turns.report_resumed(resumed)
            else:
                turns.report_resumed(resumed, hint="Send it again to have it answered.")
            pending = pending_question(resumed)
            # What is set for all chats does not replace the conversation's own.
            on_line = any(is_on_command_line(called, name) for name in ("system", "system_file", "preset"))
            if system not in (None, conversation.system) and (on_line or conversation.system is None):
                conversation.system = system
        if typed:
            if loading.model.name is None:
                welcome(terminal)
            else:
                terminal.note(greeting(engine))
            interactive = InteractiveChat(turns, pending, models)
            interactive.attached += attached
            interactive.images += shown
            keyboard: Keyboard
            keyboard = TypedKeyboard(interactive.completer) if is_terminal(sys.stdout) else PlainKeyboard()
            interactive.run(keyboard, first=prompt)
        else:
            assert prompt is not None
            _answer_once(turns, prompt, shown, as_json=output.as_json)


def _answer_once(turns: Chat, question: str, images: Sequence[Image], *, as_json: bool) -> None:
    """Answer all of standard input as one question, whatever its lines begin with."""
    interruption = turns.ask(
        question, images, as_json=as_json, continue_hint="A larger value allows a longer answer."
    )
    if turns.last_answer is not None and turns.last_answer.context_full:
        turns.terminal.warn(
            f"The answer ends early: the context of {turns.context} tokens is full. "
            "--context sets a larger one."
        )
    if interruption:
        raise typer.Exit(interruption.exit_code)
    if not as_json and turns.last_answer is not None and turns.last_answer.is_only_thought:
        raise typer.Exit(1)
