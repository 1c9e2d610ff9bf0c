"""`edgespec merge`: joins the answers of a batch whose lines several runs have shared."""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated

import typer

from edgespec.cli.batch.input_file import open_input, read_jobs
from edgespec.cli.batch.result_file import EarlierResult, Key, read_results, results_of
from edgespec.cli.options.declaration import option
from edgespec.cli.origin import compact, models_of, same
from edgespec.cli.screen.formatting import count
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal
from edgespec.errors import OutputError, UsageError
from edgespec.files.writing import atomic_write, only_writer, writing_to


def merge(
    parts: Annotated[list[Path], typer.Argument(help="Output files of the sharded runs.", metavar="PART...")],
    input_name: Annotated[
        str,
        option(None, "-i --input", "The JSONL input of those runs.", variable=False, metavar="FILE"),
    ],
    output: Annotated[
        Path, option(None, "-o --output", "File for the merged results.", variable=False, metavar="FILE")
    ],
    answers: Annotated[
        int,
        option(
            None,
            "--n --answers",
            "Answers per prompt, as for generate.",
            envvar=["EDGESPEC_ANSWERS", "EDGESPEC_N"],
            metavar="N",
        ),
    ] = 1,
    overwrite: Annotated[
        bool, option(None, "--overwrite", "Replace the output file if it exists.", variable=False)
    ] = False,
    as_json: Annotated[bool, option(None, "--json", "Print JSON.")] = False,
    quiet: Annotated[bool, option(None, "--quiet", "Print only results and errors.")] = False,
) -> None:
    """Join the results of generate --shard, in the order of the input.

    Nothing is written unless every line of the input has a result.
    """
    if input_name == "-":
        raise UsageError("The input of a merge must be a file.", "Give the input file of the shards.")
    if output.exists() and not overwrite:
        raise OutputError(f"{output} exists.", "Give another name to --output, or --overwrite.")
    for path in [*parts, Path(input_name)]:
        if output.exists() and path.exists() and output.samefile(path):
            raise UsageError(f"{output} is one of the input files.", "Give another name to --output.")

    terminal = Terminal(quiet=quiet)
    merged = Merger(parts, input_name, answers).write(output)
    if merged.not_asked:
        terminal.warn(
            f"Left out {count(merged.not_asked, 'result')} for lines that {input_name} does not have."
        )
    if as_json:
        results().record({"output": str(output), "answered": merged.answered, "failed": merged.failed})
    summary = f"{merged.answered} answered" + (f", {merged.failed} failed" if merged.failed else "")
    terminal.note(f"{output}: {summary}, from {count(len(parts), 'part')}.")
    if merged.failed:
        raise typer.Exit(1)


_HINT = "Name files that 'edgespec generate --output' has written."
_SHOWN = 5  # lines that a message names


@dataclass(frozen=True)
class _FoundResult:
    """A result, and where it is.

    Attributes:
        file, at: which of the files, and the byte in it.
        models: what it was made with, by kind; see `models_of`.
        fingerprint: of everything that it was made with.
    """

    file: int
    at: int
    failed: bool
    models: Mapping[str, str]
    fingerprint: str | None


@dataclass
class MergeResult:
    """The outcome of joining files.

    Attributes:
        answered, failed: results that are answers, and those that say why there is none.
        not_asked: results in the files that no line of the input asks for; they are left out.
    """

    answered: int = 0
    failed: int = 0
    not_asked: int = 0


@dataclass
class Merger:
    """Puts the results of several files into the order of the input that they answer.

    Args:
        parts: the files.
        input_name: the input of the whole batch.
        answers: how many each line gets, unless it has an "n".
    """

    parts: Sequence[Path]
    input_name: str
    answers: int = 1
    _found: dict[Key, _FoundResult] = field(default_factory=dict)

    def write(self, output: Path) -> MergeResult:
        """Write the joined file, whole or not at all."""
        with writing_to(output, "Give another name."), only_writer(output):
            return self._write(output)

    def _write(self, output: Path) -> MergeResult:
        for number, part in enumerate(self.parts):
            self._read(number, part)
        order = list(self._wanted())
        results = [self._found[key] for key in order]
        self._check_models(results)
        failed = sum(result.failed for result in results)
        with ExitStack() as stack:
            parts = [stack.enter_context(path.open("rb")) for path in self.parts]
            with atomic_write(output) as new:
                for result in results:
                    new.write(_line(parts[result.file], result.at))
                Path(new.name).chmod(stat.S_IMODE(self.parts[0].stat().st_mode))
        return MergeResult(len(results) - failed, failed, len(self._found) - len(set(order)))

    def _read(self, number: int, part: Path) -> None:
        """Add a file's results; a later one of the same file replaces an earlier one."""
        own: dict[Key, _FoundResult] = {}
        try:
            for at, result in read_results(part, _HINT):
                if result is not None and result.key is not None and not result.cancelled:
                    own[result.key] = _entry(number, at, result)
        except OSError as error:
            raise OutputError(f"{part} cannot be read: {error.strerror}.", _HINT) from error
        for key, found in own.items():
            other = self._found.get(key)
            if other is None or other.failed:
                self._found[key] = found
            elif not found.failed and _contradict(other, found):
                raise UsageError(
                    f"{self.parts[other.file]} and {part} answer '{key[0]}' with different models, "
                    "prompts or settings.",
                    "Merge only files that were made by the same command.",
                )

    def _wanted(self) -> Iterator[Key]:
        """The keys of the whole input's results, in order."""
        missing: list[int] = []
        with open_input(self.input_name) as source:
            for job in read_jobs(source.lines):
                for key, _ in results_of(job, self.answers):
                    if key in self._found:
                        yield key
                    elif not missing or missing[-1] != job.line:
                        missing.append(job.line)
        if missing:
            shown = ", ".join(map(str, missing[:_SHOWN]))
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            have = "has" if len(missing) == 1 else "have"
            raise UsageError(
                f"{count(len(missing), 'line')} of {self.input_name} {have} no complete result: "
                f"{shown}{more}.",
                "Run the unfinished shards again; they resume where they stopped.",
            )

    def _check_models(self, results: Sequence[_FoundResult]) -> None:
        files: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for result in results:
            for kind, made_with in result.models.items():
                if made_with:
                    files[kind][made_with].add(result.file)
        for kind, found in files.items():
            if len(found) > 1:
                (first, second) = sorted(found.values(), key=min)[:2]
                raise UsageError(
                    f"{self.parts[min(first)]} and {self.parts[min(second)]} were written with different "
                    f"{kind}.",
                    "Run one of the shards again with the options of the other.",
                )


def _entry(number: int, at: int, result: EarlierResult) -> _FoundResult:
    made_with = result.made_with
    fingerprint = compact(made_with.get("fingerprint"))
    return _FoundResult(number, at, result.error is not None, models_of(made_with), fingerprint)


def _contradict(one: _FoundResult, other: _FoundResult) -> bool:
    if one.fingerprint is None or other.fingerprint is None:
        return False
    return not same(one.fingerprint, other.fingerprint)


def _line(part: IO[bytes], at: int) -> bytes:
    part.seek(at)
    return part.readline()
