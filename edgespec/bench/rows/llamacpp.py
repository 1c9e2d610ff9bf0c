"""Rows measured with llama.cpp's own programs: plain, with its speculative decoding, and in batches."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.bench.rows.capped import CappedResult
from edgespec.bench.rows.figures import Row, spread
from edgespec.bench.rows.row_spec import PLAIN, RowSpec
from edgespec.errors import UsageError
from edgespec.files.user_folders import expanded
from edgespec.generation.config import GenerationConfig
from edgespec.offload.layout import round_up
from edgespec.processes import children
from edgespec.processes.children import python_command

if TYPE_CHECKING:
    from edgespec.bench.rows.runner import Run

DRAFTS = (4, 8, 16)  # draft lengths
BATCHES = "llama-batched-bench"

_PLAIN_PROGRAMS = ("llama-completion", "llama-cli")
_SPECULATIVE = "llama-speculative-simple"
# "eval time = ... ( 12.34 ms per token, 81.05 tokens per second)", which is not the prompt's line.
_EVAL_SPEED = re.compile(r"(?<!prompt )eval time =.*?,\s+([\d.]+) tokens per second")
_NOT_RENDERED = "Its prompts could not be rendered."
_TOKEN_BYTES = 3.5  # of a usual text
_CELLS = 256  # llama.cpp gives each text a multiple of these
_FITS = 0.8  # of a cap: what a model may take
_DECODED_SPEED = re.compile(r"decoded.*speed:\s+([\d.]+) t/s")


@dataclass(frozen=True)
class LlamaCppPrograms:
    """The paths of llama.cpp's programs; `speculative` is None where no drafter is compared."""

    plain: Path
    speculative: Path | None


def find_programs(given: str, *, speculative: bool) -> LlamaCppPrograms:
    """The programs meant by `--compare`.

    Args:
        given: "llama.cpp", or "llama.cpp=PATH" with a folder or a binary.
        speculative: whether the one for speculative decoding is needed.

    Raises:
        UsageError: it names something else, or a program is missing.
    """
    name, _, place = given.partition("=")
    if name != "llama.cpp":
        raise UsageError(
            f"Comparing with '{name}' is not supported.",
            "Give --compare llama.cpp, or llama.cpp=PATH.",
        )
    path = expanded(place) if place else None
    if path is not None and not path.exists():
        raise UsageError(
            f"{path} does not exist.", "Give --compare llama.cpp=PATH the folder of its programs."
        )
    plain = path if path is not None and path.is_file() else find_program(_PLAIN_PROGRAMS, path)
    if plain is None:
        raise _missing(" or ".join(_PLAIN_PROGRAMS), path)
    beside = path.parent if path is not None and path.is_file() else path
    second = find_program((_SPECULATIVE,), beside) if speculative else None
    if speculative and second is None:
        raise _missing(_SPECULATIVE, beside)
    return LlamaCppPrograms(plain.absolute(), second.absolute() if second else None)


@dataclass(frozen=True)
class LlamaCppSettings:
    """The settings that all rows of llama.cpp share.

    Attributes:
        target: the model; `n_bytes` is its size.
        cap: bytes of the control group, or None.
        config: what sampling and lengths it can be told of.
        repetitions: runs of each prompt, or of each batch; each loads the model anew.
        row_seconds: most seconds to measure a row.
        marks: as for RowSpec.
    """

    target: Path
    n_bytes: int
    cap: int | None
    context: int
    threads: int
    config: GenerationConfig
    repetitions: int
    row_seconds: float
    marks: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Most tokens of each answer."""
        return self.config.max_tokens or 0

    @property
    def repacking(self) -> list[str]:
        """The arguments that keep llama.cpp from rearranging a model that does not fit the cap.

        By default it copies mapped weights for that, and would be killed.
        """
        fits = self.cap is None or self.n_bytes <= _FITS * self.cap
        return [] if fits else ["--no-repack"]


class LlamaCppRows:
    """Rows of single answers that llama.cpp's programs measure.

    Args:
        drafter: None if no model drafts.
    """

    def __init__(self, programs: LlamaCppPrograms, drafter: Path | None, shared: LlamaCppSettings) -> None:
        self._programs = programs
        self._drafter = drafter
        self._shared = shared
        config = shared.config
        self._common = ["-m", str(shared.target), "-c", str(shared.context), "-n", str(shared.tokens)]
        self._common += ["-t", str(shared.threads), "--temp", str(config.temperature)]
        self._common += ["--seed", str(config.seed or 0), *shared.repacking]
        drafts: Sequence[int | str] = DRAFTS if programs.speculative and drafter else ()
        self.specs = [RowSpec("llama.cpp", tree, marks=shared.marks) for tree in (PLAIN, *drafts)]

    def measure(self, spec: RowSpec, prompts: Sequence[str], run: Run) -> Row:
        """Measure a row: each prompt in its own process, while there is time."""
        if not prompts:
            return Row.of(spec, error=_NOT_RENDERED)
        command, pattern = self._command(spec)
        end = time.monotonic() + self._shared.row_seconds
        repetitions: list[list[float]] = []
        runs: list[CappedResult] = []
        cut = False
        for _ in range(self._shared.repetitions):
            speeds: list[float] = []
            repetitions.append(speeds)
            for prompt in prompts:
                if cut := time.monotonic() > end and bool(speeds or len(repetitions) > 1):
                    break
                runs.append(run([*command, "-p", prompt], with_errors=True))
                found = pattern.findall(runs[-1].output)
                if runs[-1].status or not found:
                    return Row.of(spec, error=failure(runs[-1]))
                speeds.append(float(found[-1]))
            if cut:
                break
        whole = repetitions[:-1] if cut else repetitions
        # The overall speed of answers of equal length.
        samples = [statistics.harmonic_mean(r) for r in whole] if len(whole) > 1 else [*chain(*repetitions)]
        drafter = self._drafter.stem if self._drafter and spec.tree != PLAIN else None
        return _row(spec, samples, runs, cut=cut, drafter=drafter)

    def _command(self, spec: RowSpec) -> tuple[list[str], re.Pattern[str]]:
        if spec.tree == PLAIN:
            only = ["-no-cnv", "--no-warmup", "--no-display-prompt"]
            return [str(self._programs.plain), *self._common, *only], _EVAL_SPEED
        draft = ["-md", str(self._drafter), "--spec-draft-n-max", str(spec.tree)]
        program = str(self._programs.speculative)
        return [program, *self._common, *draft, "--spec-type", "draft-simple"], _DECODED_SPEED


class LlamaCppBatchRows:
    """Rows of so many texts at once that llama.cpp measures, each text with a prompt as long as ours.

    Args:
        folder: of llama.cpp's programs; None looks on the PATH. Where the program is missing, the bindings
            decode.
    """

    def __init__(self, folder: Path | None, texts: Sequence[int], shared: LlamaCppSettings) -> None:
        self._program = find_program((BATCHES,), folder)
        self._shared = shared
        self.specs = [RowSpec("llama.cpp", PLAIN, marks=shared.marks, texts=n) for n in texts]

    def measure(self, spec: RowSpec, prompts: Sequence[str], run: Run) -> Row:
        """Measure a row: total tokens per second while all sequences are decoded."""
        if not prompts:
            return Row.of(spec, error=_NOT_RENDERED)
        length = round(statistics.mean(len(prompt.encode()) for prompt in prompts) / _TOKEN_BYTES)
        command = self._command(spec.texts, max(length, 1))
        end = time.monotonic() + self._shared.row_seconds
        samples: list[float] = []
        first: list[float] = []
        runs: list[CappedResult] = []
        cut = False
        for _ in range(self._shared.repetitions):
            if cut := bool(samples) and time.monotonic() > end:
                break
            runs.append(run(command, with_errors=True))
            figures = _figures(runs[-1])
            if figures is None:
                return Row.of(spec, error=failure(runs[-1]))
            samples.append(figures["speed_tg"])
            first.append(figures["t_pp"] + figures["t_tg"] / (self._shared.tokens or 1))
        return _row(
            spec,
            samples,
            runs,
            cut=cut,
            tokens_per_second_a_text=statistics.median(samples) / spec.texts,
            first_token_s=statistics.median(first),
            texts_per_pass=float(spec.texts),
            notes=[] if self._program else [f"There is no {BATCHES}: measured through llama-cpp-python."],
        )

    def _command(self, texts: int, prompt: int) -> list[str]:
        shared = self._shared
        tokens = shared.tokens or 1
        if self._program is None:
            sizes = {"prompt": prompt, "tokens": tokens, "texts": texts, "threads": shared.threads}
            words = [word for name, n in sizes.items() for word in (f"--{name}", str(n))]
            own = python_command("edgespec.llama.plain_batches")
            return [*own, "--model", str(shared.target), *words, *shared.repacking]
        cells = texts * round_up(prompt + tokens, _CELLS)
        numbers = ["-c", cells, "-npp", prompt, "-ntg", tokens, "-npl", texts, "-t", shared.threads]
        model = [str(self._program), "-m", str(shared.target)]
        return [*model, *map(str, numbers), *shared.repacking, "--output-format", "jsonl"]


def _figures(ended: CappedResult) -> dict[str, Any] | None:
    """The figures that a run has printed as JSON; None if it failed."""
    if ended.status:
        return None
    for line in reversed(ended.output.splitlines()):
        if line.startswith("{") and "speed_tg" in line:
            figures: dict[str, Any] = json.loads(line)
            return figures
    return None


def _row(spec: RowSpec, samples: list[float], runs: Sequence[CappedResult], **more: Any) -> Row:
    """The row of so many runs; `more` are further fields."""
    peak, rss = max(run.peak_bytes for run in runs), max(run.rss_bytes for run in runs)
    memory = {"peak_bytes": peak or rss or None, "peak_rss_bytes": rss or None, "capped": peak > 0}
    return Row.of(spec, samples=samples, **spread(samples), **memory, **more)


def failure(ended: CappedResult) -> str:
    """The reason why a run has no figures."""
    if ended.killed:
        return "Killed: out of memory."
    last = next((line.strip() for line in reversed(ended.output.splitlines()) if line.strip()), "")
    return f"Ended with status {ended.status}: {last}" if ended.status else "It did not report its speed."


def program_folder(given: str | None) -> Path | None:
    """The folder that `--compare` names; None for the PATH."""
    place = expanded((given or "").partition("=")[2])
    if not place.name:
        return None
    return place.parent if place.is_file() else place


def find_program(names: Sequence[str], folder: Path | None) -> Path | None:
    """The first of these programs that exists: in a folder, its bin or its build/bin; or on the PATH."""
    for name in names:
        places = [folder / sub for sub in ("", "bin", "build/bin")] if folder else [None]
        for place in places:
            found = children.find_program(str(place / name) if place else name)
            if found:
                return Path(found)
    return None


def _missing(program: str, folder: Path | None) -> UsageError:
    where = f"in {folder}" if folder else "on the PATH"
    return UsageError(
        f"There is no {program} {where}.",
        "Build llama.cpp's programs, and give their folder: --compare llama.cpp=PATH.",
    )
