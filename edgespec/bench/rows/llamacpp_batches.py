"""Rows of llama.cpp's own batched decoding: with its program, or where there is none through the bindings."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.bench.rows.capped import Capped
from edgespec.bench.rows.figures import Row, spread
from edgespec.bench.rows.llamacpp import failure, find_program, may_repack
from edgespec.bench.rows.row_spec import PLAIN, RowSpec
from edgespec.offload.layout import round_up

if TYPE_CHECKING:
    from edgespec.bench.rows.runner import Run

PROGRAM = "llama-batched-bench"

_BINDINGS = [sys.executable, "-m", "edgespec.models.llama.plain_batches"]
_TOKEN_BYTES = 3.5  # of a usual text
_CELLS = 256  # llama.cpp gives each text a multiple of these


class LlamaCppBatches:
    """Rows of so many texts at once that llama.cpp measures, each text with a prompt as long as ours.

    Args:
        folder: of llama.cpp's programs; None looks on the PATH.
        target: the model.
        n_bytes: its size.
        cap: bytes of the control group, or None.
        tokens: that each text gets.
        repetitions: runs, each of which loads the model anew.
    """

    def __init__(
        self,
        folder: Path | None,
        target: Path,
        texts: Sequence[int],
        *,
        n_bytes: int,
        cap: int | None,
        threads: int,
        tokens: int,
        repetitions: int,
        row_seconds: float,
        marks: tuple[str, ...] = (),
    ) -> None:
        self._program = find_program((PROGRAM,), folder)
        self._target = target
        self._options = [] if may_repack(n_bytes, cap) else ["--no-repack"]
        self._threads = threads
        self._tokens = tokens
        self._repetitions = repetitions
        self._row_seconds = row_seconds
        self.specs = [RowSpec("llama.cpp", PLAIN, marks=marks, texts=n) for n in texts]

    def measure(self, spec: RowSpec, prompts: Sequence[str], run: Run) -> Row:
        """Measure a row: total tokens per second while all sequences are decoded."""
        if not prompts:
            return Row.of(spec, error="The prompts could not be rendered for it.")
        length = round(statistics.mean(len(prompt.encode()) for prompt in prompts) / _TOKEN_BYTES)
        command = self._command(spec.texts, max(length, 1))
        end = time.monotonic() + self._row_seconds
        samples: list[float] = []
        first: list[float] = []
        peak = rss = 0
        cut = False
        for _ in range(self._repetitions):
            if cut := bool(samples) and time.monotonic() > end:
                break
            ended = run(command, with_errors=True)
            figures = _figures(ended)
            if figures is None:
                return Row.of(spec, error=failure(ended))
            samples.append(figures["speed_tg"])
            first.append(figures["t_pp"] + figures["t_tg"] / self._tokens)
            peak, rss = max(peak, ended.peak_bytes), max(rss, ended.rss_bytes)
        return Row.of(
            spec,
            samples=samples,
            **spread(samples),
            tokens_per_second_a_text=statistics.median(samples) / spec.texts,
            first_token_s=statistics.median(first),
            texts_per_pass=float(spec.texts),
            peak_bytes=peak or rss or None,
            peak_rss_bytes=rss or None,
            capped=peak > 0,
            cut=cut,
            notes=[] if self._program else [f"There is no {PROGRAM}: measured through llama-cpp-python."],
        )

    def _command(self, texts: int, prompt: int) -> list[str]:
        model = ["-m", str(self._target)] if self._program else ["--model", str(self._target)]
        if self._program is None:
            sizes = [
                "--prompt",
                prompt,
                "--tokens",
                self._tokens,
                "--texts",
                texts,
                "--threads",
                self._threads,
            ]
            return [*_BINDINGS, *model, *map(str, sizes), *self._options]
        cells = texts * round_up(prompt + self._tokens, _CELLS)
        sizes = ["-c", cells, "-npp", prompt, "-ntg", self._tokens, "-npl", texts, "-t", self._threads]
        return [str(self._program), *model, *map(str, sizes), *self._options, "--output-format", "jsonl"]


def _figures(ended: Capped) -> dict[str, Any] | None:
    """The figures that a run has printed as JSON; None if it failed."""
    if ended.status:
        return None
    for line in reversed(ended.output.splitlines()):
        if line.startswith("{") and "speed_tg" in line:
            figures: dict[str, Any] = json.loads(line)
            return figures
    return None
