"""Chunked prefill in exact mode: how many prompt tokens one pass over the weights may read.

Under a row rule that pads, a pass has at most 60 rows, and a streamed model is read from disk once for each
pass. Where attention does not depend on the row count (offload.attention), longer chunks may give the same
keys and values. Whether they do depends on the matrix kernels of this machine, so it is tried: the first time
a chunk length could be used, that part of the prompt is read in shorter chunks and then again in one long
chunk, and the states are compared byte for byte. The shorter chunks are the longest that are proven, so a
length is tried only when one that is not much shorter has been. The outcome is remembered for the model, the
build and the processor. The text is the same either way; only the time differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from edgespec.files.small_json import file_stem, files_about, read_json, save_json
from edgespec.llama.row_rule import RowRule

# Multiples of 32, so that attention can be divided into equal streams; close enough to need little padding.
LENGTHS = (4096, 3072, 2048, 1536, 1024, 768, 512, 384, 256, 192, 128, 96)
_LEAST_FILLED = 0.75  # of a padded chunk; more padding costs more arithmetic than it saves reading
_MAX_GROWTH = 4  # times the longest length that is proven: a longer one is not tried yet


class PrefillChunks:
    """The chunk lengths beyond the row rule's in which a prompt may be read.

    Args:
        rule: the row rule, which shorter chunks obey.
        most: most rows that the context allows.
        path: the file in which outcomes are remembered; None remembers none.
    """

    def __init__(self, rule: RowRule, most: int, path: Path | None = None) -> None:
        self._rule = rule
        self._path = path
        self._lengths = [n for n in LENGTHS if rule.maximum < n <= most and n % rule.multiple == 0]
        self._outcomes: dict[int, bool] = _kept(path) if path is not None else {}

    @property
    def longest(self) -> int:
        """Rows of the longest chunk that is allowed, or that may turn out to be."""
        return max((n for n in self._lengths if self._outcomes.get(n, True)), default=self._rule.maximum)

    @property
    def longest_proven(self) -> int:
        """Rows of the longest chunk that is known to give the same bits as short ones."""
        return max((n for n in self._lengths if self._outcomes.get(n, False)), default=self._rule.maximum)

    def next(self, missing: int, room: float = math.inf) -> tuple[int, int]:
        """The next chunk of `missing` tokens: how many it takes, and the rows they are padded to.

        Args:
            room: most rows that the cache has cells for.
        """
        most = min(_MAX_GROWTH * self.longest_proven, room)
        for rows in self._lengths if missing > self._rule.maximum else ():
            if rows <= most and missing >= _LEAST_FILLED * rows and self._outcomes.get(rows, True):
                return min(rows, missing), rows
        tokens = min(missing, self._rule.maximum)
        return tokens, self._rule.padded(tokens)

    def proven(self, wanted: int) -> int:
        """The largest proven number of rows, up to the wanted one, that needs no padding."""
        known = (rows for rows in self._lengths if rows <= wanted and self._outcomes.get(rows, False))
        return next(known, min(wanted, self._rule.maximum))

    def padded(self, rows: int) -> int:
        """Rows to decode for as many as `proven` gave."""
        return rows if rows > self._rule.maximum else self._rule.padded(rows)

    def is_proven(self, rows: int) -> bool:
        """True if chunks of this many rows are known to give the same bits as short ones."""
        return rows <= self._rule.maximum or self._outcomes.get(rows, False)

    def found(self, rows: int, same: bool) -> None:
        """Remember the outcome of a trial."""
        self._outcomes[rows] = same
        if self._path is not None:
            save_json(self._path, self._outcomes)


def outcomes_path(folder: Path, fingerprint: str, identity: Mapping[str, str]) -> Path:
    """The file for a model's caches with this identity (see cache.states)."""
    return folder / (file_stem(fingerprint, f"pieces {sorted(identity.items())}") + ".json")


def lengths_that_differ(folder: Path, fingerprint: str) -> set[int]:
    """The chunk lengths that gave different bits with a model, however its weights were held."""
    outcomes = [_kept(path) for path in files_about(folder, fingerprint)]
    return {rows for found in outcomes for rows, same in found.items() if not same}


def _kept(path: Path) -> dict[int, bool]:
    return read_json(path, lambda kept: {int(rows): bool(same) for rows, same in kept.items()}) or {}
