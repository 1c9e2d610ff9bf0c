"""Rows measured with llama.cpp's own programs: plain, and with its speculative decoding."""

from __future__ import annotations

import re
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.bench.rows.capped import Capped
from edgespec.bench.rows.figures import Row, spread
from edgespec.bench.rows.row_spec import PLAIN, RowSpec
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.bench.rows.runner import Run

DRAFTS = (4, 8, 16)  # draft lengths

_PLAIN_PROGRAMS = ("llama-completion", "llama-cli")
_SPECULATIVE = "llama-speculative-simple"
# "eval time = ... ( 12.34 ms per token, 81.05 tokens per second)", which is not the prompt's line.
_EVAL_SPEED = re.compile(r"(?<!prompt )eval time =.*?,\s+([\d.]+) tokens per second")
_DECODED_SPEED = re.compile(r"decoded.*speed:\s+([\d.]+) t/s")


@dataclass(frozen=True)
class Programs:
    """The paths of llama.cpp's programs; `speculative` is None where no drafter is compared."""

    plain: Path
    speculative: Path | None


def find_programs(given: str, *, speculative: bool) -> Programs:
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
    path = Path(place).expanduser() if place else None
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
    return Programs(plain.absolute(), second.absolute() if second else None)


class LlamaCpp:
    """Rows that llama.cpp measures.

    Args:
        target: the model; `drafter` is None if no model drafts.
        n_bytes: the target's size.
        cap: bytes of the control group, or None.
        repetitions: runs of each prompt; each loads the model anew.
    """

    def __init__(
        self,
        programs: Programs,
        target: Path,
        drafter: Path | None,
        *,
        n_bytes: int,
        cap: int | None,
        context: int,
        threads: int,
        temperature: float,
        seed: int,
        max_tokens: int,
        repetitions: int,
        row_seconds: float,
        marks: tuple[str, ...] = (),
    ) -> None:
        self._programs = programs
        self._drafter = drafter
        self._repetitions = repetitions
        self._row_seconds = row_seconds
        self._common = ["-m", str(target), "-c", str(context), "-n", str(max_tokens), "-t", str(threads)]
        self._common += ["--temp", str(temperature), "--seed", str(seed)]
        if not may_repack(n_bytes, cap):
            self._common.append("--no-repack")
        drafts: Sequence[int | str] = DRAFTS if programs.speculative and drafter else ()
        self.specs = [RowSpec("llama.cpp", tree, marks=marks) for tree in (PLAIN, *drafts)]

    def measure(self, spec: RowSpec, prompts: Sequence[str], run: Run) -> Row:
        """Measure a row: each prompt in its own process, while there is time."""
        command, pattern = self._command(spec)
        end = time.monotonic() + self._row_seconds
        repetitions: list[list[float]] = []
        peak = rss = 0
        cut = False
        for _ in range(self._repetitions):
            speeds: list[float] = []
            repetitions.append(speeds)
            for prompt in prompts:
                if cut := time.monotonic() > end and bool(speeds or len(repetitions) > 1):
                    break
                ended = run([*command, "-p", prompt], with_errors=True)
                found = pattern.findall(ended.output)
                if ended.status or not found:
                    return Row.of(spec, error=failure(ended))
                speeds.append(float(found[-1]))
                peak, rss = max(peak, ended.peak_bytes), max(rss, ended.rss_bytes)
            if cut:
                break
        if not prompts:
            return Row.of(spec, error="The prompts could not be rendered for it.")
        whole = repetitions[:-1] if cut else repetitions
        # The overall speed of answers of equal length.
        samples = [statistics.harmonic_mean(r) for r in whole] if len(whole) > 1 else [*chain(*repetitions)]
        return Row.of(
            spec,
            samples=samples,
            **spread(samples),
            peak_bytes=peak or rss or None,
            peak_rss_bytes=rss or None,
            capped=peak > 0,
            cut=cut,
            drafter=self._drafter.stem if self._drafter and spec.tree != PLAIN else None,
        )

    def _command(self, spec: RowSpec) -> tuple[list[str], re.Pattern[str]]:
        if spec.tree == PLAIN:
            only = ["-no-cnv", "--no-warmup", "--no-display-prompt"]
            return [str(self._programs.plain), *self._common, *only], _EVAL_SPEED
        draft = ["-md", str(self._drafter), "--spec-draft-n-max", str(spec.tree)]
        program = str(self._programs.speculative)
        return [program, *self._common, *draft, "--spec-type", "draft-simple"], _DECODED_SPEED


def may_repack(n_bytes: int, cap: int | None) -> bool:
    """True if llama.cpp may rearrange a model of this size in memory.

    By default it copies mapped weights for that, and under a cap that the model does not fit it would be
    killed.
    """
    return cap is None or n_bytes <= 0.8 * cap


def failure(ended: Capped) -> str:
    """The reason why a run has no figures."""
    if ended.killed:
        return "Killed: out of memory."
    last = next((line.strip() for line in reversed(ended.output.splitlines()) if line.strip()), "")
    return f"Ended with status {ended.status}: {last}" if ended.status else "It did not report its speed."


def program_folder(given: str | None) -> Path | None:
    """The folder that `--compare` names; None for the PATH."""
    place = Path((given or "").partition("=")[2]).expanduser()
    if not place.name:
        return None
    return place.parent if place.is_file() else place


def find_program(names: Sequence[str], folder: Path | None) -> Path | None:
    """The first of these programs that exists: in a folder, its bin or its build/bin; or on the PATH."""
    for name in names:
        places = [str(folder / sub) for sub in ("", "bin", "build/bin")] if folder else [None]
        for place in places:
            found = shutil.which(name, path=place)
            if found:
                return Path(found)
    return None


def _missing(program: str, folder: Path | None) -> UsageError:
    where = f"in {folder}" if folder else "on the PATH"
    return UsageError(
        f"There is no {program} {where}.",
        "Build llama.cpp's programs, and give their folder: --compare llama.cpp=PATH.",
    )
