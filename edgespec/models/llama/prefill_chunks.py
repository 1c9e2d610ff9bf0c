"""Long pieces of prompts in exact mode: how many tokens one pass over the weights may read.

Under a row rule a pass has at most 60 rows, and a streamed model is read from disk once for each pass.
Where attention is kept from depending on the row count (offload.attention), longer pieces may give the same
keys and values. Whether they do depends on the matrix kernels of this machine, so it is found by trying:
the first time a length could be used, that part of the prompt is read in short pieces and then once more in
one, and the states are compared byte for byte. The outcome is remembered for the model, the build and the
processor. Both ways lead to the same text; only the time differs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from edgespec.files.writing import atomic_write
from edgespec.models.llama.row_rule import RowRule, file_stem, files_about

# Multiples of 32, so that attention can be cut into equal streams; close enough that little is padded.
LENGTHS = (512, 384, 256, 192, 128, 96)
_LEAST_FILLED = 0.75  # of a piece that is padded; more padding costs more arithmetic than reading it saves


class PrefillChunks:
    """The lengths above the row rule's that a prompt may be read in.

    Args:
        rule: what shorter pieces obey.
        most: rows that the context allows.
        path: where outcomes are remembered; None forgets them.
    """

    def __init__(self, rule: RowRule, most: int, path: Path | None = None) -> None:
        self._rule = rule
        self._path = path
        self._lengths = [n for n in LENGTHS if rule.maximum < n <= most and n % rule.multiple == 0]
        self._outcomes: dict[int, bool] = _read(path) if path is not None else {}

    @property
    def longest(self) -> int:
        """Rows of the longest piece that is allowed, or that may turn out to be."""
        return max((n for n in self._lengths if self._outcomes.get(n, True)), default=self._rule.maximum)

    def next(self, missing: int) -> tuple[int, int]:
        """The next piece where so many tokens are missing: its tokens, and the rows they are padded to."""
        if missing > self._rule.maximum:
            for rows in self._lengths:
                if missing >= _LEAST_FILLED * rows and self._outcomes.get(rows, True):
                    return min(rows, missing), rows
        tokens = min(missing, self._rule.maximum)
        return tokens, self._rule.padded(tokens)

    def is_proven(self, rows: int) -> bool:
        """Whether pieces of so many rows are known to give the bits of short ones."""
        return rows <= self._rule.maximum or self._outcomes.get(rows, False)

    def found(self, rows: int, same: bool) -> None:
        """Remember the outcome of a trial."""
        self._outcomes[rows] = same
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # it is tried again next time
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path) as file:
                file.write(json.dumps({str(n): ok for n, ok in self._outcomes.items()}).encode())


def outcomes_path(folder: Path, fingerprint: str, identity: Mapping[str, str]) -> Path:
    """The file for a model's caches with this identity (see models.identity)."""
    return folder / (file_stem(fingerprint, f"pieces {sorted(identity.items())}") + ".json")


def lengths_that_differ(folder: Path, fingerprint: str) -> set[int]:
    """The lengths that were tried with a model and gave other bits, in whatever way it was held."""
    outcomes = [_read(path) for path in files_about(folder, fingerprint)]
    return {rows for found in outcomes for rows, same in found.items() if not same}


def _read(path: Path) -> dict[int, bool]:
    try:
        return {int(rows): bool(same) for rows, same in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}
