"""The row rule: how many rows a pass may have so that the row count does not change the result.

llama.cpp picks kernels by the number of rows, and kernels round differently, so a token's logits depend
on what was decoded beside it. Within a rule (pad to a multiple, at least so many, at most so many) they
do not, and the text is the same bit for bit whatever the tree. Which rule holds depends on the model's
quantizations and on the CPU, so it is found by trying and remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from edgespec.files.writing import atomic_write
from edgespec.models.llama.runtime.backend import build_identity
from edgespec.models.llama.runtime.batch import Batch
from edgespec.models.llama.runtime.context import Context

# From 64 rows on attention runs in tiles of keys, whose rounding depends on where cells lie.
MOST_ROWS = 60

_ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 32, 47, 59)
_FEW_ROW_COUNTS = (1, 5, 13, 32, 47)


@dataclass(frozen=True)
class RowRule:
    """Pad a pass to a multiple of `multiple` rows, at least `minimum`, and never above `maximum`."""

    multiple: int
    minimum: int
    maximum: int = MOST_ROWS

    def padded(self, rows: int) -> int:
        """Rows to decode for a tree of `rows` nodes."""
        return max(self.minimum, -(-rows // self.multiple) * self.multiple)


@dataclass(frozen=True)
class Search:
    """Which rules are tried, cheapest first, with which row counts, and on how many batches of each.

    Kernels that differ need not differ for every input, so one batch of a few rows proves little.
    """

    rules: tuple[RowRule, ...]
    row_counts: tuple[int, ...]
    batches: int


# One row alone is never among them: beyond 512 cells it takes a kernel that splits the keys between
# threads.
THOROUGH = Search(
    (RowRule(1, 2), RowRule(2, 2), RowRule(4, 4), RowRule(4, 8), RowRule(8, 8, 56)), _ROW_COUNTS, 60
)

# Where passes are slow and rows cost nothing: rules that pad most, which hold wherever a thriftier one
# does and then give the same text, tried with few passes.
SPARING = Search((RowRule(4, 8), RowRule(8, 8, 56)), _FEW_ROW_COUNTS, 1)


def find_row_rule(context: Context, search: Search = THOROUGH) -> RowRule | None:
    """The first rule under which every row count tried gives identical logits, if there is one.

    The context must be empty, and is left empty.
    """
    rng = np.random.default_rng(0)
    n_vocab = context.model.vocabulary.n_tokens
    tokens = rng.integers(0, n_vocab, MOST_ROWS).astype(np.int32)
    return next((rule for rule in search.rules if _holds(context, rule, search, tokens)), None)


def _holds(context: Context, rule: RowRule, search: Search, tokens: np.ndarray) -> bool:
    """Whether a chain decoded in batches of any row count gives the logits of one large batch."""
    (reference,) = _digests(context, tokens[: rule.maximum], rule.maximum, rule)
    for rows in search.row_counts:
        chain = tokens[: min(rows * search.batches, rule.maximum)]
        start = 0
        for digests in _digests(context, chain, rows, rule):
            if digests != reference[start : start + len(digests)]:
                return False
            start += len(digests)
    return True


def _digests(context: Context, tokens: np.ndarray, rows: int, rule: RowRule) -> Iterator[list[bytes]]:
    """A hash of each row's logits, of a chain decoded in batches of `rows`, padded by the rule.

    Hashes, as logits of a large vocabulary would be more than 100 MiB beside those that llama.cpp holds.
    """
    try:
        for start in range(0, len(tokens), rows):
            batch = Batch.run(tokens[start : start + rows], start, n_sequences=1, logits="all")
            context.decode(batch.padded(rule.padded(len(batch)), sequence_id=1))
            # Zeros compare equal whatever their sign, and adding 0 gives them all the same one.
            yield [hashlib.blake2b((row + 0).data).digest() for row in context.logits()]
            context.remove(1)
    finally:
        context.clear()


def file_stem(fingerprint: str, identity: str) -> str:
    """The name of a file about a model, so that all of a model's can be found, and each by its identity."""
    return f"{fingerprint[:16]}-{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}"


def files_about(folder: Path, fingerprint: str) -> list[Path]:
    """The files in a folder that were named for this model by `file_stem`."""
    return sorted(folder.glob(f"{fingerprint[:16]}-*.json"))


class RowRuleStore:
    """Rules already found, one small file for each model, way to hold it, llama.cpp build and CPU."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, fingerprint: str, held: str, context: Context, search: Search = THOROUGH) -> RowRule | None:
        """The rule for a model: remembered, or found now and kept.

        Args:
            fingerprint: of the model's header.
            held: what else its kernels depend on: the layout of its weights, layers on a GPU.
        """
        path = self.path(fingerprint, held, search)
        try:
            stored = json.loads(path.read_text())
            return RowRule(**stored["rule"]) if stored["rule"] else None
        except (OSError, ValueError, TypeError, KeyError):
            pass  # not tried yet, or unreadable: try (again)
        rule = find_row_rule(context, search)
        self._put(path, rule)
        return rule

    def path(self, fingerprint: str, held: str, search: Search) -> Path:
        """The file for a model with this header fingerprint, held so."""
        identity = f"{fingerprint} {held} {build_identity()} {search}"
        return self._folder / (file_stem(fingerprint, identity) + ".json")

    def _put(self, path: Path, rule: RowRule | None) -> None:
        with contextlib.suppress(OSError):  # it is found anew next time
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(json.dumps({"rule": asdict(rule) if rule else None}).encode())
