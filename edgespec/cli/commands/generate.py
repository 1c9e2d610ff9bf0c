"""`edgespec generate`: answers a prompt, or every line of a JSONL file."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.batch.own_format import MAX_ANSWERS
from edgespec.cli.batch.result_file import ResultFile
from edgespec.cli.batch.run import BatchRun, with_system
from edgespec.cli.conversation.attach import (
    Attachments,
    ImageFiles,
    after_files,
    after_images,
    digest_part,
    read_attachments,
    read_images,
)
from edgespec.cli.conversation.thoughts import ThoughtDisplay
from edgespec.cli.interrupt import ENDING, cancelling
from edgespec.cli.options.common import OutputOptions, Preset, System, SystemFile, system_prompt
from edgespec.cli.options.declaration import config_option, is_on_command_line, option, with_options
from edgespec.cli.options.sampling import SamplingOptions, config_of_options
from edgespec.cli.origin import ModelIdentity, Origin, model_identity
from edgespec.cli.prompt import FirstWord, MoreWords, NamedModel, model_and_prompt, whole_prompt, words_of
from edgespec.cli.reloading import with_reloads
from edgespec.cli.screen.results import ResultStream, WrittenText
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import AUTO, Config
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.generation.config import MAX_SEED, GenerationConfig

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.generation.result import Generation
    from edgespec.images.parts import Image

_PANEL = "Prompt"
_HOW = "Give one with --prompt TEXT or -f FILE, pipe it in, or give many with --input FILE.jsonl."


@partial(with_options, leave_out=("model",))
def generate(
    called: typer.Context,
    word: FirstWord = None,
    words: MoreWords = None,
    prompt: Annotated[
        str | None,
        option(
            _PANEL,
            "-p --prompt",
            "The prompt; piped text is inserted before it.",
            variable=False,
            metavar="TEXT",
        ),
    ] = None,
    input_name: Annotated[
        str | None,
        option(
            _PANEL,
            "-i --input",
            "JSONL file with one prompt per line; - for stdin.",
            variable=False,
            metavar="FILE",
        ),
    ] = None,
    output_name: Annotated[
        str | None,
        option(
            _PANEL,
            "-o --output",
            "Append results as JSON lines; run again to resume.",
            variable=False,
            metavar="FILE",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        option(
            _PANEL,
            "--overwrite",
            "Regenerate answers in --output that came from a different model, prompt or settings.",
            variable=False,
        ),
    ] = False,
    system: System = None,
    system_file: SystemFile = None,
    files: Attachments = None,
    images: ImageFiles = None,
    mmproj: Annotated[str | None, config_option("mmproj", panel=_PANEL)] = None,
    preset: Preset = None,
    answers: Annotated[
        int,
        option(
            _PANEL,
            "--n --answers",
            "Answers per prompt; each uses the next seed.",
            envvar=["EDGESPEC_ANSWERS", "EDGESPEC_N"],
            metavar="N",
        ),
    ] = 1,
    parallel: Annotated[
        int | None,
        config_option(
            "parallel",
            panel=_PANEL,
            help_text="Lines of --input to answer at once. Default: as many as increase throughput.",
            metavar="N",
        ),
    ] = None,
    unordered: Annotated[
        bool,
        option(_PANEL, "--unordered", "Write results as soon as they finish, in any order."),
    ] = False,
    ray: Annotated[
        str | None,
        option(
            _PANEL,
            "--ray",
            "Answer --input on a Ray cluster.",
            metavar="HOST:PORT|auto",
        ),
    ] = None,
    score: Annotated[
        bool,
        option(
            _PANEL,
            "--score",
            "Score the lines of --input instead of answering: the log-probability of each prompt, or of the "
            'line\'s "completion" or "choices".',
            variable=False,
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        option(
            _PANEL,
            "--logprobs",
            "Add to JSON results each token's log-probability, and those of the N likeliest tokens.",
            variable=False,
            metavar="N",
        ),
    ] = None,
    raw: Annotated[
        bool, option(_PANEL, "--raw", "Continue the text as is, without a chat template.")
    ] = False,
    model: NamedModel = None,
    *,
    loading: Config,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Answer a prompt, or every line of a JSONL file."""
    if prompt is not None and input_name is not None:
        raise UsageError("Both --prompt and --input were given.", "Give one of them.")
    if files and input_name is not None:
        raise UsageError("--file works with a single prompt only.", "Put the text into the lines of --input.")
    if images and input_name is not None:
        raise UsageError("--image works with a single prompt only.", "Leave out one of --image and --input.")
    if images and raw:
        raise UsageError("--image cannot be used with --raw.", "Leave one of them out.")
    system = system_prompt(called, system, system_file)
    if system is not None and raw:
        raise UsageError("--system cannot be used with --raw.", "Leave one of them out.")
    if not 1 <= answers <= MAX_ANSWERS:
        raise UsageError(f"--answers must be from 1 to {MAX_ANSWERS}, not {answers}.")
    if overwrite and (input_name is None or output_name is None):
        raise UsageError("--overwrite needs --input and --output.", "Add them, or leave out --overwrite.")
    if is_on_command_line(called, "ray") and input_name is None:
        raise UsageError("--ray needs --input.", "Add it, or leave out --ray.")
    as_text = input_name is None and output_name is None and not output.as_json
    if logprobs is not None and as_text:
        raise UsageError("--logprobs needs --json, --input or --output.", "Add one, or leave out --logprobs.")
    config_of_options(logprobs=logprobs)  # refuses a wrong number
    if score:
        given = {f"--{name}": is_on_command_line(called, name) for name in ("system", "answers")}
        _check_scoring(given | {"--ray": ray is not None}, has_input=input_name is not None)
    address = None
    if ray is not None and input_name is not None:
        from edgespec.cli.batch.cluster import ray_address

        address = ray_address(ray)
    model, prompt = model_and_prompt(
        words_of(word, words),
        model=model,
        prompt=prompt,
        model_is_given=is_on_command_line(called, "model"),
        asks=input_name is None,
    )
    loading = loading.with_(model=model, mmproj=mmproj, images=bool(images))
    together = loading.with_(parallel=AUTO if parallel is None else parallel)
    terminal = Terminal(quiet=output.quiet, verbose=output.verbose)
    attached = read_attachments(files)
    if attached and prompt is None:
        prompt = attached.pop()[1].removesuffix("\n").removesuffix("\r")
    shown = read_images(images)
    with ExitStack() as stack:
        file = None
        if output_name is None or output_name == "-":
            results = ResultStream(sys.stdout, "Standard output")
        else:
            file = stack.enter_context(ResultFile(output_name, input_name))
            results = file.results
        if input_name is not None:
            batch = BatchRun(
                config_of_options(max_tokens=0, logprobs=logprobs)
                if score
                else _config(sampling, loading, terminal, logprobs),
                terminal,
                results,
                file=file,
                answers=answers,
                system=system,
                raw=raw or score,
                scores=score,
                ordered=not unordered,
                overwrite=overwrite,
                ray=address,
            )
            batch.run(input_name, together)
        else:
            single = _SinglePrompt(
                terminal,
                results,
                WrittenText(results),
                system,
                raw,
                as_text,
                answers,
                files=attached,
                images=shown,
                logprobs=logprobs,
            )
            single.run(prompt, loading, sampling)


def _check_scoring(others: dict[str, bool], *, has_input: bool) -> None:
    """Refuse what says how to answer where texts are scored."""
    if not has_input:
        raise UsageError("--score needs --input.", "Add it, or leave out --score.")
    for name, given in others.items():
        if given:
            raise UsageError(f"{name} has no meaning with --score.", "Leave out one of them.")


def _config(
    sampling: SamplingOptions, loading: Config, terminal: Terminal, logprobs: int | None
) -> GenerationConfig:
    """The settings: greedy unless others are asked for, so that scripts give the same text every time."""
    config = sampling.config_for(loading).with_(logprobs=logprobs)
    if sampling.sampling != "recommended":
        return config
    from edgespec.models.hub import catalog

    with terminal.working() as progress:
        path = catalog.find(loading.model.name, progress)
    return sampling.chosen_for(loading, path, default="greedy").config.with_(logprobs=logprobs)


@dataclass(frozen=True)
class _SinglePrompt:
    """One prompt, answered as streamed text or as a JSON object."""

    terminal: Terminal
    results: ResultStream
    written: WrittenText
    system: str | None
    raw: bool
    as_text: bool
    answers: int
    files: Sequence[tuple[Path, str]] = ()
    images: Sequence[Image] = ()
    logprobs: int | None = None

    def run(self, prompt: str | None, loading: Config, sampling: SamplingOptions) -> None:
        """Answer the prompt, or standard input if there is none; with JSON, a failure gives an object too."""
        try:
            prompt = whole_prompt(prompt, self.terminal, _HOW)
            text = prompt = after_files(prompt, self.files)
            config = _config(sampling, loading, self.terminal, self.logprobs)
            self.terminal.rule(config.rule)
            left = deque(range(self.answers))
            given: list[Generation] = []

            def answer_left(engine: Engine) -> None:
                self.terminal.template(engine, raw=self.raw)
                self.terminal.thinking(engine, config)
                model = ModelIdentity() if self.as_text else model_identity(loading.model)
                while left:
                    seed = None if config.seed is None else (config.seed + left[0]) % (MAX_SEED + 1)
                    asked = after_images(text, [digest_part(image) for image in self.images])
                    origin = Origin.of(model, with_system(asked, self.system), config, raw=self.raw)
                    given.append(self._answer(text, config.with_(seed=seed), engine, origin))
                    left.popleft()
                    if left and self.as_text:
                        self.results.text("\n")

            with_reloads(self.terminal.load, answer_left, loading, self.terminal)
            if self.as_text and any(answer.is_only_thought for answer in given):
                raise typer.Exit(1)
        except EdgeSpecError as error:
            if not self.as_text:
                self.results.failure(prompt, None, str(error))
            raise

    def _answer(self, prompt: str, config: GenerationConfig, engine: Engine, origin: Origin) -> Generation:
        asked = with_system(after_images(prompt, [image.part for image in self.images]), self.system)
        answer = None
        self.written.begin()
        with cancelling(engine, *ENDING) as interruption, self.terminal.status() as status:
            thoughts = ThoughtDisplay(self.terminal, unfolded=self.terminal.verbose)
            chunks = engine.stream(asked, config, raw=self.raw, on_prefill=status.prefill)
            for chunk in interruption.reach(chunks, engine):
                answer = chunk.generation
                if self.as_text:
                    thoughts.feed(chunk, status)
                if chunk.text or answer is not None or not self.as_text:
                    status.clear()
                    thoughts.end()
                if self.as_text:
                    self.written.add(chunk.text)
        assert answer is not None, "the last chunk carries the answer"
        if self.as_text:
            self.written.end()
        else:
            self.results.record(answer.to_json(prompt) | origin.to_json())
        if not interruption:
            self.terminal.only_thought(answer)
        if answer.passes:
            self.terminal.statistics(answer, "A larger value allows a longer answer.")
            self.terminal.all_statistics(answer)
        if answer.context_full:
            self.terminal.note(
                f"The context of {engine.context} tokens is full. --context sets a larger one."
            )
        if interruption:
            early = "the answer ends early" if answer.passes else "there is no answer yet"
            self.terminal.note(f"Interrupted: {early}.")
            raise typer.Exit(interruption.exit_code)
        return answer
