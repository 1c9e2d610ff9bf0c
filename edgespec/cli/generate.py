"""`edgespec generate`: one answer to a prompt, or one for every line of a JSONL file."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.batch import BatchRun, with_system
from edgespec.cli.interrupt import cancelling
from edgespec.cli.jobs import MOST_ANSWERS
from edgespec.cli.options import LoadOptions, OutputOptions, SamplingOptions, with_options
from edgespec.cli.results import ResultFile
from edgespec.cli.terminal import ResultStream, Terminal, is_terminal
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.generation import MAX_SEED, GenerationConfig

if TYPE_CHECKING:
    from edgespec.engine import Engine

_PANEL = "Prompt"


@with_options
def generate(
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt.", rich_help_panel=_PANEL),
    ] = None,
    input_name: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="FILE", help="JSONL, a prompt a line; - is stdin.", rich_help_panel=_PANEL
        ),
    ] = None,
    output_name: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Append JSON lines here; run again to go on.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="The system prompt.", rich_help_panel=_PANEL),
    ] = None,
    answers: Annotated[
        int,
        typer.Option(
            "--n", metavar="N", help="Answers to each prompt; a seed counts up.", rich_help_panel=_PANEL
        ),
    ] = 1,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on with the text; no chat template.", rich_help_panel=_PANEL)
    ] = False,
    *,
    loading: LoadOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Generate text from a prompt, or for every line of a JSONL file."""
    if prompt is not None and input_name is not None:
        raise UsageError("Both --prompt and --input were given.", "Give one of them.")
    if system is not None and raw:
        raise UsageError("With --raw there is no place for --system.", "Leave one of them out.")
    if not 1 <= answers <= MOST_ANSWERS:
        raise UsageError(f"--n is {answers}.", f"It must be from 1 to {MOST_ANSWERS}.")
    terminal = Terminal(quiet=output.quiet, verbose=output.verbose)
    with ExitStack() as stack:
        file = None
        if output_name is None or output_name == "-":
            results = ResultStream(sys.stdout, "Standard output")
        else:
            file = stack.enter_context(ResultFile(output_name, input_name))
            results = file.results
        if input_name is not None:
            batch = BatchRun(
                sampling.config_for(loading),
                terminal,
                results,
                file=file,
                answers=answers,
                system=system,
                raw=raw,
            )
            batch.run(input_name, loading)
        else:
            as_text = output_name is None and not output.as_json
            _SinglePrompt(terminal, results, system, raw, as_text, answers).run(prompt, loading, sampling)


@dataclass(frozen=True)
class _SinglePrompt:
    """One prompt, answered as text that streams or as one JSON object."""

    terminal: Terminal
    results: ResultStream
    system: str | None
    raw: bool
    as_text: bool
    answers: int

    def run(self, prompt: str | None, loading: LoadOptions, sampling: SamplingOptions) -> None:
        """Answer the prompt, or standard input if there is none; a JSON object is also made of a failure."""
        try:
            text = prompt = _checked(_read_stdin() if prompt is None else prompt)
            config = sampling.config_for(loading)
            self.terminal.rule(config.rule)
            with self.terminal.load(loading) as engine:
                for index in range(self.answers):
                    if index and self.as_text:
                        self.results.text("\n")
                    seed = None if config.seed is None else (config.seed + index) % (MAX_SEED + 1)
                    self._answer(text, config.with_(seed=seed), engine)
        except EdgeSpecError as error:
            if not self.as_text:
                self.results.failure(prompt, None, str(error))
            raise

    def _answer(self, prompt: str, config: GenerationConfig, engine: Engine) -> None:
        asked = with_system(prompt, self.system)
        answer = None
        with cancelling(engine, signal.SIGTERM) as interruption, self.terminal.status() as status:
            for chunk in engine.stream(asked, config, raw=self.raw, on_prefill=status.prefill):
                status.clear()
                if self.as_text:
                    self.results.text(chunk.text)
                answer = chunk.generation
        assert answer is not None, "the last chunk carries the answer"
        if self.as_text:
            self.results.end_line()
        else:
            self.results.record(answer.to_json(prompt))
        if answer.passes:
            self.terminal.statistics(answer)
        if answer.context_full:
            self.terminal.note(f"The context of {engine.context} tokens is full; --context makes it larger.")
        if interruption:
            early = "the answer ends early" if answer.passes else "there is no answer yet"
            self.terminal.note(f"Interrupted: {early}.")
            raise typer.Exit(interruption.exit_code)


def _read_stdin() -> str:
    if sys.stdin is None or is_terminal(sys.stdin):
        raise UsageError(
            "There is no prompt.",
            "Give one with --prompt TEXT, pipe it in, or give many with --input FILE.jsonl.",
        )
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UsageError("The prompt is not valid UTF-8.", "Check the encoding it is in.") from error


def _checked(prompt: str) -> str:
    if not prompt:
        raise UsageError("The prompt is empty.", "Give some text to answer or to go on with.")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError("The prompt is not valid UTF-8.", "Check the encoding it is in.") from error
    return prompt
