"""`edgespec bench`: what this machine does with a model."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.base.units import readable_rate
from edgespec.cli.interrupt import ENDING, cancelling
from edgespec.cli.options.common import ModelFlag, check_output
from edgespec.cli.options.declaration import config_option, option, with_options
from edgespec.cli.options.sampling import SamplingOptions
from edgespec.cli.screen.formatting import count
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal, is_terminal
from edgespec.config import OPTIONS, Config
from edgespec.errors import UsageError
from edgespec.files.writing import only_writer, writing_to

if TYPE_CHECKING:
    from edgespec.bench.rows.figures import Row
    from edgespec.bench.rows.preparation import BenchRequest
    from edgespec.bench.rows.runner import BenchMeasurements

_ROWS = "Rows"
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
            help_text="Add rows with N sequences at once, such as 1,4,16.",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        option(
            _ROWS,
            "--compare",
            variable=False,
            metavar="A B",
            help_text="Compare two documents of --json, and measure nothing.",
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
        option(
            _OUTPUT, "--html", variable=False, metavar="FILE", help_text="Write an HTML page with a plot."
        ),
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
    if compare is not None:
        from edgespec.bench.report.compare import compare_files

        results().text(compare_files(compare, flag.or_argument(loading.model.name, called)))
        return
    if max_tokens < 1:
        raise UsageError(f"--max-tokens must be 1 or more, not {max_tokens}: speeds are those of answers.")
    config = sampling.config_for(loading).with_(max_tokens=max_tokens)
    if config.draws and config.seed is None:
        config = config.with_(seed=_SEED)
    from edgespec.bench.report.document import check_writable
    from edgespec.bench.rows.preparation import BenchRequest

    request = BenchRequest(
        load=flag.on(loading, called),
        config=config,
        trees=list(dict.fromkeys(_tree(text) for text in tree_budgets or _TREES)),
        context=context,
        workload=workload,
        prompts=prompts,
        repetitions=repetitions,
        row_seconds=row_seconds,
        texts=_numbers(parallel),
        command=shlex.join(["edgespec", *sys.argv[1:]]),
    )
    request.check()
    as_json = json_name == "-"
    json_path = Path(json_name) if json_name and not as_json else None
    for path in (json_path, html_name):
        if path is not None:
            if path.suffix.lower() == ".gguf":  # `--json big.gguf` was meant as --json and a model
                hint = f"Name the model with -m: -m {path}"
                raise UsageError(f"{path} is a model and would be overwritten.", hint)
            check_writable(path)
            with writing_to(path, "Give another name."):
                called.with_resource(only_writer(Path(path)))
    check_output(quiet=quiet, verbose=verbose)
    terminal = Terminal(quiet=quiet, verbose=verbose)
    code = _Bench(terminal, json_path, html_name, as_json=as_json).run(request)
    if code:
        raise typer.Exit(code)


@dataclass(frozen=True)
class _Bench:
    """Measures, reports progress, and writes the results."""

    terminal: Terminal
    json_path: Path | None  # of files that are wanted
    html_path: Path | None
    as_json: bool  # print the document instead of the table

    def run(self, request: BenchRequest) -> int:
        """Measure, and write everything; returns the exit code."""
        from edgespec.base.units import readable_time
        from edgespec.bench.rows.preparation import prepare_bench
        from edgespec.bench.rows.runner import Runner

        with self.terminal.working(long=True) as progress:
            prepared = prepare_bench(request, progress)
        for note in prepared.about["notes"]:
            self.terminal.note(note)
        rows = count(len(prepared.specs), "row")
        most = readable_time(len(prepared.specs) * request.row_seconds)
        self.terminal.note(f"Measuring {rows}, up to {most}, plus loading.")
        with self.terminal.status() as status:
            runner = Runner(prepared.run_config, on_progress=status.progress, on_row=self._report)
            with cancelling(runner, *ENDING) as interruption:
                measured = runner.run(prepared.specs)
        if interruption:
            done = f"Stopped early: {count(len(measured.rows), 'row')} measured."
            self.terminal.note(done if measured.rows else "Stopped before the first row was measured.")
        if measured.rows:
            self._write(measured, prepared.about)
        if interruption:
            return interruption.exit_code
        failed = [row.name for row in measured.rows if row.error]
        if failed:
            self.terminal.warn(f"{len(failed)} of {rows} failed: {'; '.join(failed)}.")
        return 1 if failed else 0

    def _report(self, row: Row, left: int) -> None:
        rest = f"{count(left, 'row')} left" if left else "the last row"
        if row.error:
            self.terminal.warn(f"{row.name} failed: {row.error}")
        else:
            self.terminal.note(f"{row.name}: {readable_rate(row.tokens_per_second or 0.0)} ({rest})")

    def _write(self, measured: BenchMeasurements, about: dict[str, Any]) -> None:
        from edgespec.bench.report.document import as_text, make_document, write_whole
        from edgespec.bench.report.row_tables import format_rows
        from edgespec.bench.rows.figures import broken_promises

        document = make_document(measured, about)
        for note in document["notes"]:
            self.terminal.detail(note)
        if self.as_json:
            results().text(as_text(document))
        else:
            columns = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
            results().text(format_rows(measured.rows, columns))
            self.terminal.note(_conditions(document))
        for row in broken_promises(measured.rows):
            self.terminal.warn(f"{row.name} is exact, but its answers differ. This is a bug in EdgeSpec.")
        if self.json_path is not None:
            write_whole(self.json_path, as_text(document))
        if self.html_path is not None:
            from edgespec.bench.report.page import make_page

            write_whole(self.html_path, make_page(measured.rows, document))
            self.terminal.note(f"Wrote the page to {self.html_path}.")


def _conditions(document: dict[str, Any]) -> str:
    """The conditions of the measurement, in a line."""
    from edgespec.base.units import readable

    disk, memory = document["disk"], document["settings"]["memory_bytes"]
    parts = [document["model"]["name"], f"drafter {document['draft']}", document["asked"]]
    if memory:
        parts.append(f"memory budget {readable(memory)}")
    if disk:
        parts.append(f"disk {' and '.join(readable(speed) + '/s' for speed in disk['bytes_per_s'])}")
    parts += [f"{name} {value}" for name, value in document["versions"].items() if name != "python"]
    return f"Test setup: {'; '.join(parts)}."


def _numbers(given: str | None) -> list[int]:
    """The numbers of --parallel, each once."""
    words = [word.strip() for word in given.split(",")] if given else []
    for word in words:
        if not word.isdecimal():
            raise UsageError(f"--parallel is '{given}'.", "Give numbers of texts, such as 1,4,16,64.")
    return list(dict.fromkeys(map(int, words)))


def _tree(text: str) -> int | str:
    return OPTIONS["tree_budget"].read(text) or "auto"
