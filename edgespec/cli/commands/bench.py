"""`edgespec bench`: what this machine does with a model."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.interrupt import cancelling
from edgespec.cli.options.declaration import config_option, option, with_options
from edgespec.cli.options.model_flag import ModelFlag
from edgespec.cli.options.output import check_output
from edgespec.cli.options.rows import check_no_model, form_and_file
from edgespec.cli.options.sampling import SamplingOptions
from edgespec.cli.screen.formatting import count
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal, is_terminal
from edgespec.config import OPTIONS, Config
from edgespec.errors import UsageError
from edgespec.files.writing import only_writer, writing_to
from edgespec.units import parse_size, readable_rate

if TYPE_CHECKING:
    from edgespec.bench.rows.figures import Row
    from edgespec.bench.rows.request import BenchRequest
    from edgespec.bench.rows.runner import BenchMeasurements
    from edgespec.bench.rows.synthetic import MixtureShape

_ROWS = "Rows"
_MIXTURE = "moe:"
_WORK = "Workload"
_OUTPUT = "Output"
_TREES = ("16", "32", "auto")
_SEED = 1  # without one, sampled answers could not be compared
_LEFT_OUT = (
    "context",
    "learn",
    "prompt_cache",
    "prompt_cache_size",
    "tree_budget",
    "sampling",
    "max_tokens",
    "stop",
    "json_schema",
    "grammar",
)


@partial(with_options, leave_out=_LEFT_OUT)
def bench(
    called: typer.Context,
    tree_budgets: Annotated[
        list[str] | None,
        config_option(
            "tree_budget",
            panel=_ROWS,
            help_text="Add a row with trees of N nodes; repeatable. Default: 16, 32 and auto.",
        ),
    ] = None,
    parallel: Annotated[
        str | None,
        config_option(
            "parallel",
            panel=_ROWS,
            variable=False,  # EDGESPEC_PARALLEL is a single number, for batches and the server
            metavar="N,N,...",
            help_text="Add rows with N sequences at once, next to llama.cpp's own batching; such as 1,4,16.",
        ),
    ] = None,
    memory_cap: Annotated[
        str | None,
        option(
            _ROWS,
            "--memory-cap",
            metavar="SIZE",
            help_text="Limit the memory of every row, page cache included, where the system allows it.",
        ),
    ] = None,
    synthesize: Annotated[
        str | None,
        option(
            _ROWS,
            "--synthesize",
            metavar="SIZE|moe:EXPERTSxTOP",
            help_text="Measure a synthetic model: widened to SIZE, or turned into a mixture of EXPERTS.",
        ),
    ] = None,
    held: Annotated[
        str | None,
        option(
            _ROWS,
            "--held",
            metavar="PERCENT,...",
            help_text="Add rows with PERCENT of the experts in memory. Default for moe: 25,50,75.",
        ),
    ] = None,
    keep: Annotated[
        bool, option(_ROWS, "--keep", help_text="Keep the model that --synthesize makes.")
    ] = False,
    compare: Annotated[
        str | None,
        option(
            _ROWS,
            "--compare",
            metavar="llama.cpp[=PATH]|A B",
            help_text="Add rows of your own llama.cpp programs, by their folder or those on the PATH; or "
            "compare two documents of --json, and measure nothing.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, option(_WORK, "-n --max-tokens", metavar="N", help_text="Maximum tokens per answer.")
    ] = 64,
    context: Annotated[
        int | None,
        config_option(
            "context",
            panel=_WORK,
            help_text="Maximum tokens, prompt plus answer. Default: as many as needed.",
        ),
    ] = None,
    workload: Annotated[
        Path | None,
        option(
            _WORK, "--workload", metavar="FILE", help_text="JSONL file of questions in Spec-Bench's format."
        ),
    ] = None,
    prompts: Annotated[
        int,
        option(_WORK, "--prompts", metavar="N", help_text="Number of questions, balanced over categories."),
    ] = 3,
    repetitions: Annotated[
        int, option(_WORK, "--repetitions", metavar="N", help_text="Measured runs per row, after a warm-up.")
    ] = 3,
    row_seconds: Annotated[
        float,
        option(_WORK, "--row-seconds", metavar="S", help_text="Maximum measuring time per row, in seconds."),
    ] = 60.0,
    form: Annotated[
        str,
        option(
            _OUTPUT,
            "-o --output",
            variable=False,
            metavar="FILE|md|csv|json|jsonl",
            help_text="Write the rows to FILE, in the format of its extension, or print them in this format.",
        ),
    ] = "md",
    json_name: Annotated[
        str | None,
        option(
            _OUTPUT,
            "--json",
            variable=False,
            metavar="[FILE]",
            help_text="Write everything as a JSON document; without FILE, or with -, to stdout.",
        ),
    ] = None,
    html_name: Annotated[
        Path | None,
        option(_OUTPUT, "--html", variable=False, metavar="FILE", help_text="Write an HTML page with plots."),
    ] = None,
    quiet: Annotated[bool, option(_OUTPUT, "--quiet", help_text="Print only results and errors.")] = False,
    verbose: Annotated[bool, option(_OUTPUT, "--verbose", help_text="Print details and statistics.")] = False,
    *,
    flag: ModelFlag,
    loading: Config,
    sampling: SamplingOptions,
) -> None:
    """Benchmark a model on this machine: tokens per second, plain and with trees.

    The exit code is 1 if any row failed. The other rows are measured and written all the same.
    """
    if compare is not None and (compare.lower().endswith(".json") or Path(compare).is_file()):
        from edgespec.bench.report.compare import compare_files

        results().text(compare_files(compare, flag.or_argument(loading.model.name, called)))
        return
    trees = list(dict.fromkeys(_tree(text) for text in tree_budgets or _TREES))
    form, rows_name = form_and_file(form)
    if form == "md" and rows_name is None and json_name == "-":
        form, json_name = "json", None
    if json_name == "-":
        raise UsageError(
            f"Standard output cannot be both {form} and a JSON document.",
            "Give --json a file, or leave out -o.",
        )
    if max_tokens < 1:
        raise UsageError(f"--max-tokens must be 1 or more, not {max_tokens}: speeds are those of answers.")
    config = sampling.config_for(loading).with_(max_tokens=max_tokens)
    if config.draws and config.seed is None:
        config = config.with_(seed=_SEED)
    cap = parse_size(memory_cap) if memory_cap else None
    wanted = _synthetic(synthesize) if synthesize else None
    from edgespec.bench.report.document import check_writable
    from edgespec.bench.rows.request import BenchRequest, check

    request = BenchRequest(
        load=flag.on(loading, called),
        config=config,
        trees=trees,
        cap=cap,
        context=context,
        workload=workload,
        prompts=prompts,
        repetitions=repetitions,
        row_seconds=row_seconds,
        synthesize=wanted,
        keep=keep,
        compare=compare,
        texts=_numbers("--parallel", parallel, "numbers of texts, such as 1,4,16,64") or [],
        held=_numbers("--held", held, "percents, such as 25,50,75"),
        command=shlex.join(["edgespec", *sys.argv[1:]]),
    )
    check(request)
    rows_path, json_path = (Path(name) if name else None for name in (rows_name, json_name))
    for path in (rows_path, json_path, html_name):
        if path is not None:
            check_no_model(path)
            check_writable(path)
            with writing_to(path, "Give another name."):
                called.with_resource(only_writer(Path(path)))
    if html_name is not None:
        from edgespec.bench.report.plots import check_matplotlib

        check_matplotlib()
    check_output(quiet=quiet, verbose=verbose)
    terminal = Terminal(quiet=quiet, verbose=verbose)
    code = _Bench(terminal, form, rows_path, json_path, html_name).run(request)
    if code:
        raise typer.Exit(code)


def _synthetic(text: str) -> int | MixtureShape:
    """Return the request of --synthesize."""
    if not text.startswith(_MIXTURE):
        return parse_size(text)
    from edgespec.bench.rows.synthetic import MixtureShape

    return MixtureShape.parse(text.removeprefix(_MIXTURE))


@dataclass(frozen=True)
class _Bench:
    """Measures, reports progress, and writes the results; the paths are of the files that are wanted."""

    terminal: Terminal
    form: str
    rows_path: Path | None
    json_path: Path | None
    html_path: Path | None

    def run(self, request: BenchRequest) -> int:
        """Measure, and write everything; returns the exit code."""
        from contextlib import ExitStack

        from edgespec.bench.rows.preparation import prepared_bench
        from edgespec.bench.rows.runner import Runner
        from edgespec.units import readable_time

        with ExitStack() as stack:
            with self.terminal.working(long=True) as progress:
                prepared = stack.enter_context(prepared_bench(request, progress))
            for note in prepared.about["notes"]:
                self.terminal.note(note)
            rows = len(prepared.specs) + sum(len(other.specs) for other in prepared.others)
            most = readable_time(rows * request.row_seconds)
            self.terminal.note(f"Measuring {count(rows, 'row')}, up to {most}, plus loading.")
            with self.terminal.status() as status:
                runner = Runner(
                    prepared.run_config,
                    on_progress=status.progress,
                    on_row=self._report,
                )
                with cancelling(runner, signal.SIGTERM) as interruption:
                    measured = runner.run(prepared.specs, prepared.others)
            if interruption:
                self.terminal.note(_how_far(len(measured.rows)))
            if measured.rows:
                self._write(measured, prepared.about)
        if interruption:
            return interruption.exit_code
        failed = [row.name for row in measured.rows if row.error]
        if failed:
            self.terminal.warn(f"{len(failed)} of {count(rows, 'row')} failed: {'; '.join(failed)}.")
        return 1 if failed else 0

    def _report(self, row: Row, left: int) -> None:
        rest = f"{left} row{'' if left == 1 else 's'} left" if left else "the last row"
        if row.error:
            self.terminal.warn(f"{row.name} failed: {row.error}")
        else:
            self.terminal.note(f"{row.name}: {readable_rate(row.tokens_per_second or 0.0)} ({rest})")

    def _write(self, measured: BenchMeasurements, about: dict[str, Any]) -> None:
        from edgespec.bench.report.document import make_document, write_whole
        from edgespec.bench.report.row_tables import format_rows
        from edgespec.bench.rows.figures import broken_promises

        document = make_document(measured, about)
        for note in document["notes"]:
            self.terminal.detail(note)
        columns = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
        rows = format_rows(measured.rows, document, self.form, None if self.rows_path else columns)
        if self.rows_path is None:
            results().text(rows)
        else:
            write_whole(self.rows_path, rows)
            self.terminal.note(f"Wrote the rows to {self.rows_path}.")
        if self.form == "md":
            self.terminal.note(_conditions(document))
        for row in broken_promises(measured.rows):
            self.terminal.warn(f"{row.name} is exact, but its answers differ. This is a bug in EdgeSpec.")
        if self.json_path is not None:
            import json

            write_whole(self.json_path, json.dumps(document, ensure_ascii=False, indent=1) + "\n")
        if self.html_path is not None:
            from edgespec.bench.report.page import make_page

            write_whole(self.html_path, make_page(measured.rows, document))
            self.terminal.note(f"Wrote the plots to {self.html_path}.")


def _how_far(rows: int) -> str:
    if not rows:
        return "Stopped before the first row was measured."
    return f"Stopped early: {rows} row{' was' if rows == 1 else 's were'} measured."


def _conditions(document: dict[str, Any]) -> str:
    """The conditions of the measurement, in a line."""
    from edgespec.units import readable

    disk, limits = document["disk"], document["limits"]
    parts = [document["model"]["name"], f"drafter {document['draft']}", document["asked"]]
    if limits["cap_bytes"] and limits["cap"] != "none":
        parts.append(f"capped at {readable(limits['cap_bytes'])} ({limits['cap']})")
    elif limits["memory_bytes"]:
        parts.append(f"memory budget {readable(limits['memory_bytes'])}")
    if disk:
        parts.append(f"disk {' and '.join(readable(speed) + '/s' for speed in disk['bytes_per_s'])}")
    parts += [f"{name} {value}" for name, value in document["versions"].items() if name != "python"]
    return f"Test setup: {'; '.join(parts)}."


def _numbers(name: str, given: str | None, what: str) -> list[int] | None:
    """The numbers that an option was given, each once; None if it was left out.

    Raises:
        UsageError: one of them is no number.
    """
    if given is None:
        return None
    words = [word.strip() for word in given.split(",")] if given else []
    for word in words:
        if not word.isdecimal():
            raise UsageError(f"{name} is '{given}'.", f"Give {what}.")
    return list(dict.fromkeys(map(int, words)))


def _tree(text: str) -> int | str:
    return OPTIONS["tree_budget"].read(text) or "auto"
