"""Measures recipes for a drafter, and saves every measurement, so that a search can be resumed.

Each quantization is made once as a whole file; layers are masked in a copy of it. Measurements are saved in
`state-*.json` beside them, one after the other.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec.drafting.agreement import (
    STEP_ROWS,
    Agreement,
    AgreementMeter,
    PassCost,
    SampleAnswer,
    SampleAnswers,
)
from edgespec.drafting.layer_masking import MaskedCopy
from edgespec.drafting.recipe_search import Recipe
from edgespec.errors import OutputError
from edgespec.files.writing import atomic_write
from edgespec.llama.quantize import KEEP, make_drafter
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import GGUFHeader
from edgespec.progress import Progress, no_progress
from edgespec.units import readable

_SAME_MEMORY = 0.05  # share by which free memory varies between runs


class RecipeState:
    """The measurements so far, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.values = {}

    @property
    def described(self) -> str:
        """The measurements in words; empty if there are none."""
        recipes = sum(key.startswith("agreement ") for key in self.values)
        measured = f" and {recipes} measured candidate{'' if recipes == 1 else 's'}" if recipes else ""
        return f"the target's sample text{measured}" if "written" in self.values else ""

    def save(self, key: str, value: Any) -> None:
        """Save a value at once."""
        self.values[key] = value
        with atomic_write(self._path) as file:
            file.write(json.dumps(self.values).encode())

    def written(
        self, memory: int, write: Callable[[], SampleAnswers], measure: Callable[[], PassCost]
    ) -> SampleAnswers:
        """The texts that the target generated, and the cost of its passes: saved, or measured now.

        Args:
            memory: bytes that the target has. They change its passes, but not its text.
            write: generates the texts.
            measure: generates just enough to time passes.
        """
        if "written" not in self.values:
            written = write()
            self.save("written", {"texts": [asdict(sample) for sample in written.samples]})
            self.save("passes", {"memory": memory, **asdict(written.cost)})
        known = self.values.get("passes", {})
        if abs(known.get("memory", 0) - memory) > _SAME_MEMORY * memory:
            self.save("passes", {"memory": memory, **asdict(measure())})
        samples = tuple(
            SampleAnswer(tuple(sample["prompt"]), tuple(sample["answer"]))
            for sample in self.values["written"]["texts"]
        )
        cost = {name: value for name, value in self.values["passes"].items() if name != "memory"}
        return SampleAnswers(samples, PassCost(**cost))


class RecipeMeter:
    """Measures recipes for one target.

    Args:
        folder: for temporary files.
    """

    def __init__(
        self,
        target: GGUFHeader,
        folder: Path,
        state: RecipeState,
        samples: tuple[SampleAnswer, ...],
        threads: int | None,
    ) -> None:
        self._target = target
        self._folder = folder
        self._state = state
        self._samples = samples
        self._threads = threads
        self._open: tuple[str, MaskedCopy, AgreementMeter] | None = None
        self.on_progress: Progress = no_progress

    def agreement(self, recipe: Recipe) -> Agreement:
        """See `Measurements`."""
        key = f"agreement {recipe.quantization} {list(recipe.dropped)}"
        if key not in self._state.values:
            copy, meter = self._reader(recipe.quantization)
            copy.mask(recipe.dropped)
            self._state.save(key, asdict(meter.agreement(self._samples)))
        return Agreement(**self._state.values[key])

    def step_s(self, recipe: Recipe) -> float:
        """See `Measurements`: that of the whole model, scaled by the share of bytes that are kept."""
        key = f"step of {STEP_ROWS} {recipe.quantization}"
        if key not in self._state.values:
            with AgreementMeter(self._file(recipe.quantization), self._samples[:1], repack=True) as meter:
                self._state.save(key, meter.step_s())
        whole = self.n_bytes(Recipe(recipe.quantization))
        return float(self._state.values[key]) * self.n_bytes(recipe) / whole

    def n_bytes(self, recipe: Recipe) -> int:
        """See `Measurements`."""
        key = f"bytes {recipe.quantization}"
        if key not in self._state.values:
            header = read_header(self._file(recipe.quantization))
            layers: dict[str, int] = {}
            for tensor in header.tensors:
                if tensor.name.startswith("blk."):
                    layer = tensor.name.split(".")[1]
                    layers[layer] = layers.get(layer, 0) + tensor.n_bytes
            self._state.save(key, {"file": header.file_bytes, "layers": layers})
        sizes = self._state.values[key]
        dropped: int = sum(sizes["layers"].get(str(layer), 0) for layer in recipe.dropped)
        return int(sizes["file"]) - dropped

    def close(self) -> None:
        """Remove the files; the measurements stay."""
        self._close_reader()
        for path in self._folder.glob("*.gguf*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _reader(self, quantization: str) -> tuple[MaskedCopy, AgreementMeter]:
        if self._open is None or self._open[0] != quantization:
            self._close_reader()
            source = self._file(quantization)
            self._check_room(source.stat().st_size)
            copy = MaskedCopy(source, self._folder / "masked.gguf")
            self._open = (quantization, copy, AgreementMeter(copy.path, self._samples, repack=False))
        return self._open[1:]

    def _close_reader(self) -> None:
        if self._open is not None:
            self._open[2].close()
            self._open[1].close()
            self._open = None

    def _file(self, quantization: str) -> Path:
        """The whole target in this quantization; made if necessary."""
        if quantization == KEEP:
            return self._target.path
        path = self._folder / f"{quantization}.gguf"
        if not path.exists():
            self.on_progress(f"Making {quantization} of {self._target.path.name}", 0.0)
            self._check_room(sum(part.stat().st_size for part in split_paths(self._target)))
            make_drafter(self._target.path, path, quantization=quantization, threads=self._threads)
        return path

    def _check_room(self, n_bytes: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < n_bytes:
            raise OutputError(
                f"{self._folder} needs {readable(n_bytes)} of disk space, but {readable(free)} is free.",
                "Free some space, or set XDG_DATA_HOME to a folder on a larger disk.",
            )
