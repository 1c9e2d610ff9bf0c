"""The row rule: how many rows a pass may have if the row count is not to change the result.

llama.cpp chooses kernels by the number of rows, and kernels round differently, so a token's logits depend on
what is decoded with it. Under a rule (pad to a multiple, with a minimum and a maximum) they do not, and the
text is the same bit for bit whatever the tree. Which rule holds depends on the model's quantizations and on
the CPU, so rules are tried, and the outcome is remembered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from edgespec.files.small_json import file_stem, remembered
from edgespec.llama.cache.state_cache import StateCache
from edgespec.llama.first_layers import FirstLayers
from edgespec.llama.runtime.backend import build_identity
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context

# From 64 rows on, ggml's attention works on tiles of keys, whose rounding depends on the cells' positions.
MAX_PADDED_ROWS = 60

_ANY = 1 << 20  # more rows than any context has

_ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 32, 47, 59)
_FEW_ROW_COUNTS = (1, 5, 13, 32, 47)
FEW_PASSES = (1, 8, 32, 56)  # those whose time is measured
_LONG_PASS = 120


@dataclass(frozen=True)
class RowRule:
    """Pad a pass to a multiple of `multiple` rows, at least `minimum`, and never above `maximum`."""

    multiple: int
    minimum: int
    maximum: int = MAX_PADDED_ROWS

    def padded(self, rows: int) -> int:
        """Rows to decode for a tree of `rows` nodes."""
        return max(self.minimum, -(-rows // self.multiple) * self.multiple)


@dataclass(frozen=True)
class Search:
    """Rules to try, cheapest first, with the row counts to try them with, and the batches of each.

    Different kernels may agree on some inputs, so one batch of a few rows proves little.
    """

    rules: tuple[RowRule, ...]
    row_counts: tuple[int, ...]
    batches: int


# With kernels whose results do not depend on the number of rows there is nothing to pad, and no limit. Where
# ggml computes the attention, no rule allows a single row: beyond 512 cells it takes a kernel that splits the
# keys between threads.
ANY_ROWS = RowRule(1, 1, _ANY)
FREE = Search((ANY_ROWS,), _FEW_ROW_COUNTS, 3)
FREE_SPARING = Search((ANY_ROWS,), (1, 13, 47), 1)  # where passes are slow

THOROUGH = Search(
    (RowRule(1, 2), RowRule(2, 2), RowRule(4, 4), RowRule(4, 8), RowRule(8, 8, 56)), _ROW_COUNTS, 60
)

# Where passes are slow and rows cost nothing: the rules that pad most, tried with few passes. They hold
# wherever a rule with less padding does, and give the same text.
SPARING = Search((RowRule(4, 8), RowRule(8, 8, 56)), _FEW_ROW_COUNTS, 1)


def find_row_rule(
    context: Context, search: Search = THOROUGH, first_layers: FirstLayers | None = None
) -> RowRule | None:
    """The first rule under which all row counts give identical logits, or None.

    The context must be empty, and is left empty.

    Args:
        first_layers: of a streamed model, whose passes take seconds each; where own kernels compute
            everything, they show enough.
    """
    if ANY_ROWS in search.rules and first_layers is not None and _own_kernels_agree(first_layers):
        return ANY_ROWS
    if ANY_ROWS in search.rules and not _computed_by_own(context):
        return None
    rng = np.random.default_rng(0)
    n_vocab = context.model.vocabulary.n_tokens
    tokens = rng.integers(0, n_vocab, _rows_with_logits(context)).astype(np.int32)
    return next((rule for rule in search.rules if _holds(context, rule, search, tokens)), None)


def _rows_with_logits(context: Context) -> int:
    """The maximum number of rows in a pass in which all logits are wanted."""
    return min(context.n_rows, context.n_outputs)


def _computed_by_own(context: Context) -> bool:
    """True if EdgeSpec's own kernels compute all products and attention in a context; found by a pass."""
    all_own = context.watch_own()
    try:
        context.decode(TokenBatch.run([0, 0], 0, n_sequences=1, logits="all"))
    finally:
        context.clear()
    return all_own()


def _own_kernels_agree(first_layers: FirstLayers) -> bool:
    """True if own kernels compute all of a model, and its first layers with any number of rows alike."""
    if not first_layers.all_own:
        return False
    all_own = first_layers.watch_own()
    found = [first_layers.decode(rows) for rows in (*FEW_PASSES, _LONG_PASS) if rows <= first_layers.max_rows]
    states = [rows for rows in found if rows is not None]
    if len(states) < len(found) or not all_own():
        return False
    return all((rows == states[-1][: len(rows)]).all() for rows in states)


def _holds(context: Context, rule: RowRule, search: Search, tokens: np.ndarray) -> bool:
    """True if a chain decoded in batches of any row count gives the logits of one large batch."""
    tokens = tokens[: rule.maximum]
    (reference,) = _digests(context, tokens, len(tokens), rule)
    for rows in distinct_counts(rule, search.row_counts):
        chain = tokens[: rows * search.batches]
        start = 0
        for digests in _digests(context, chain, rows, rule):
            if digests != reference[start : start + len(digests)]:
                return False
            start += len(digests)
    return True


def distinct_counts(rule: RowRule, row_counts: tuple[int, ...]) -> list[int]:
    """Return, for each size that a rule pads to, the largest row count: it fills the places of all others."""
    return sorted({rule.padded(rows): rows for rows in sorted(row_counts)}.values())


def _digests(context: Context, tokens: np.ndarray, rows: int, rule: RowRule) -> Iterator[list[bytes]]:
    """A hash of each row's logits, of a chain decoded in batches of `rows`, padded by the rule.

    Hashes, as logits of a large vocabulary would be more than 100 MiB beside those that llama.cpp holds.
    """
    states = StateCache(context, ordered=True) if context.branches else None
    try:
        for start in range(0, len(tokens), rows):
            batch = TokenBatch.run(tokens[start : start + rows], start, n_sequences=1, logits="all")
            padded = rule.padded(len(batch))
            if states is not None:
                states.append(batch, padded)
            else:
                context.decode(batch.padded(padded, sequence_id=1))
            # Zeros compare equal whatever their sign, and adding 0 gives them all the same one.
            yield [hashlib.blake2b((row + 0).data).digest() for row in context.logits()]
            if states is None:
                context.remove(1)
    finally:
        context.clear()


class RowRuleStore:
    """Rules found earlier: a small file for each model, its way of being held, llama.cpp build and CPU."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(
        self,
        fingerprint: str,
        held: str,
        context: Context,
        search: Search = THOROUGH,
        first_layers: FirstLayers | None = None,
    ) -> RowRule | None:
        """The rule for a model: remembered, or found now and saved.

        Args:
            fingerprint: of the model's header.
            held: what else determines its kernels: the layout of its weights, layers on a GPU.
            first_layers: as for find_row_rule.
        """
        path = self.path(fingerprint, f"{held} {_rows_with_logits(context)}", search)
        (rule,) = remembered(
            path,
            lambda kept: (RowRule(**kept["rule"]) if kept["rule"] else None,),
            lambda: (find_row_rule(context, search, first_layers),),
            lambda found: {"rule": asdict(found[0]) if found[0] else None},
        )
        return rule

    def path(self, fingerprint: str, held: str, search: Search) -> Path:
        """The file for a model with this header fingerprint, held in this way."""
        identity = f"{fingerprint} {held} {build_identity()} {search}"
        return self._folder / (file_stem(fingerprint, identity) + ".json")
