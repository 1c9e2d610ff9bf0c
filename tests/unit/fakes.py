"""A target, a drafter and a vocabulary without a model, for the engine around them.

The target is a fixed function of the last tokens. It enforces what a cache requires: a test fails if it
verifies after a text that the cache does not hold, or commits what was not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgespec.engine.drafting import Speculator
from edgespec.engine.engine import Engine
from edgespec.engine.sequence import PromptChunk, SequenceTree, TextSequence
from edgespec.engine.sequence_maker import Loaded
from edgespec.engine.target import TargetPass
from edgespec.llama.row_rule import RowRule
from edgespec.llama.runtime.abort import AbortFlag
from edgespec.llama.runtime.weight_store import AllInMemory
from edgespec.profiles.store import ProfileStore
from edgespec.profiles.updates import ProfileUpdates
from edgespec.speculation.drafters.base import Drafter, DraftRequest
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.tree import FloatArray, IntArray, TokenTree
from edgespec.text.encoding import Encoder

N_VOCAB = 24
END = 0
CONTEXT = 96
_ORDER = 2  # tokens that the next one depends on


class LetterVocabulary:
    """Tokens are letters; 0 ends an answer."""

    n_tokens = N_VOCAB
    adds_bos = False

    def is_end(self, token: int) -> bool:
        return token == END

    def ends(self, tokens: IntArray) -> np.ndarray:
        return np.asarray(tokens) == END

    def piece(self, token: int, *, control: bool = False) -> bytes:
        return bytes([ord("a") + token])


def logits_after(text: Sequence[int], seed: int) -> FloatArray:
    """(N_VOCAB,) the target's logits after a text."""
    state = np.random.default_rng([seed, *text[-_ORDER:]])
    return (3 * state.standard_normal(N_VOCAB)).astype(np.float32)


class FakeCells:
    """The number of cells, shared by the texts of a fake target."""

    def __init__(self, n_cells: int) -> None:
        self.n_cells = n_cells
        self.n_threads = 1
        self.n_rows = 24


class FakeTarget:
    """Verifies trees by the fixed function."""

    max_nodes = 16
    max_unread = 0
    n_pending = 0
    max_leaves = 8
    max_sequences = 8

    def __init__(
        self, seed: int, *, never_ends: bool = False, rule: RowRule | None = None, n_cells: int = 1 << 20
    ) -> None:
        self.rule = rule
        self.model = SimpleNamespace(
            path=Path("fake.gguf"), vocabulary=LetterVocabulary(), weights=AllInMemory()
        )
        self.context = FakeCells(n_cells)
        self.cache = SimpleNamespace(ordered=False)
        self.sequences = [TextSequence([], cache=FakeCache())]  # type: ignore[arg-type]
        self.identity: dict[str, str] = {}
        self.passes = 0
        self.shared_passes = 0
        self.recalled = 0
        self.closed = False
        self.on_pass: Callable[[], None] = lambda: None
        self.waits = 0  # for the disk, in every pass
        self.read_s = 0.0  # seconds of reading so far
        self._seed = seed
        self._never_ends = never_ends
        self._verified: list[SequenceTree] = []
        self.states: list[FakeState] = []  # of texts that were moved to disk

    @property
    def own(self) -> TextSequence:
        return self.sequences[0]

    @property
    def tokens(self) -> list[int]:
        return self.own.cached

    @property
    def reading_s(self) -> float:
        return self.read_s

    @property
    def n_free_leaves(self) -> int:
        return self.max_leaves - len(self.sequences)

    @property
    def n_live(self) -> int:
        return sum(sequence.n_cached for sequence in self.sequences)

    def open_sequence(self, sequence: TextSequence) -> None:
        assert len(self.sequences) < self.max_sequences
        _, shared = self.longest_prefix(sequence)
        sequence.cache = FakeCache(shared)  # type: ignore[assignment]
        self.sequences.append(sequence)

    def close_sequence(self, sequence: TextSequence) -> None:
        if sequence is not self.own:
            self.sequences.remove(sequence)
            sequence.cache = None

    def longest_prefix(self, sequence: TextSequence) -> tuple[TextSequence | None, int]:
        others = [other for other in self.sequences if other is not sequence]
        best = max(others, key=sequence.shared_with, default=None)
        return best, sequence.shared_with(best) if best else 0

    def recall(self, sequence: TextSequence, length: int | None = None) -> int:
        if sequence.state is not None:
            assert isinstance(sequence.state, FakeState)
            assert not sequence.state.closed
            assert sequence.state.tokens == sequence.tokens[: len(sequence.state.tokens)]
            sequence.kv_cache.appended(len(sequence.state.tokens) - sequence.n_cached)
        return sequence.n_cached

    def set_aside(self, sequence: TextSequence, folder: Path) -> None:
        self.states.append(FakeState(sequence.cached))
        sequence.state = self.states[-1]  # type: ignore[assignment]
        self.close_sequence(sequence)

    def read_chunk(self, sequence: TextSequence, *, image_rows: int | None = None) -> int:
        self.on_pass()
        size = min(sequence.missing, self.context.n_rows)
        sequence.kv_cache.appended(size)
        return size

    def storing(self, sequence: TextSequence) -> Iterator[None]:
        return iter(())

    def rewind(self, length: int) -> None:
        self.own.rewind(length)

    def readable_together(self, sequence: TextSequence, length: int | None = None) -> int:
        """None of the texts here has an image."""
        return 0

    def prefill(
        self,
        sequence: TextSequence,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        max_unread: int = 0,
    ) -> int:
        length = len(sequence.tokens) - 1
        sequence.cache = FakeCache(length)  # type: ignore[assignment]
        self.sequences[0].cache = None
        self.sequences[0], self._verified = sequence, []
        if on_progress is not None:
            on_progress(length, length)
        return 0

    def verify(self, trees: Sequence[SequenceTree], chunks: Sequence[PromptChunk] = ()) -> TargetPass:
        self.on_pass()
        rows = sum(len(drafted.tree) for drafted in trees)
        assert rows <= self.max_nodes
        leaves = sum(len(drafted.tree.leaves) for drafted in trees)
        assert leaves <= len(trees) + self.n_free_leaves or len(trees) == 1
        rows += sum(len(chunk.tokens) for chunk in chunks)
        assert 0 < rows <= (self.rule.maximum if self.rule else self.context.n_rows)
        assert self.n_live + rows <= self.context.n_cells or len(self.sequences) == 2, "the cells are full"
        self.passes += 1
        self.shared_passes += len(trees) > 1
        self._verified = list(trees)
        taking_part = [part.sequence for part in (*trees, *chunks)]
        assert len(set(map(id, taking_part))) == len(taking_part), "a text takes part once"
        assert all(sequence in self.sequences for sequence in taking_part)
        for chunk in chunks:
            assert list(chunk.tokens) == chunk.sequence.tokens[chunk.start :][: len(chunk.tokens)]
            assert chunk.start == chunk.sequence.n_cached
            chunk.sequence.kv_cache.appended(len(chunk.tokens))
        return TargetPass(tuple(self._verify(drafted) for drafted in trees), waited_s=float(self.waits))

    def _verify(self, drafted: SequenceTree) -> FloatArray:
        tree, text = drafted.tree, drafted.sequence.tokens
        assert drafted.sequence.kv_cache.length == len(text) - 1
        assert int(tree.tokens[0]) == text[-1]
        rows = []
        for node in range(len(tree)):
            row = logits_after(text + [int(tree.tokens[n]) for n in tree.path(node)[1:]], self._seed)
            row[END] = -np.inf if self._never_ends else row[END]
            rows.append(row)
        return np.stack(rows)

    def commit(self, trees: Sequence[SequenceTree], paths: Sequence[Sequence[int]]) -> None:
        assert list(trees) == self._verified, "only what was verified can be kept"
        for drafted, path in zip(trees, paths, strict=True):
            sequence, start = drafted.sequence, drafted.sequence.kv_cache.length
            assert sequence.tokens[start:][: len(path)] == [int(drafted.tree.tokens[node]) for node in path]
            sequence.kv_cache.appended(len(path))
        self._verified = []

    def truncate_to(self, sequence: TextSequence, length: int) -> None:
        sequence.rewind(length)
        self._verified = []

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeState:
    """A text that a fake target has moved to disk."""

    tokens: list[int]
    closed: bool = False

    def close(self) -> None:
        self.closed = True


class FakeCache:
    """The place of a text in the cache of a fake target."""

    max_paths = 1 << 20

    def __init__(self, length: int = 0) -> None:
        self.length = length

    def appended(self, n_tokens: int) -> None:
        self.length += n_tokens

    def rewind(self, length: int) -> None:
        self.length = min(self.length, length)


class FakeDrafter(Drafter):
    """Guesses the target's likeliest tokens with a given accuracy, and some siblings.

    Attributes:
        accuracy: how often the target's likeliest token is among the candidates.
        learned: the texts that it was given to learn from.
        drafted_together: how often it drafted for several texts at once.
    """

    name = "fake drafter"

    def __init__(self, seed: int, accuracy: float) -> None:
        self.accuracy = accuracy
        self.learned: list[list[int]] = []
        self.drafted_together = 0
        self.on_draft: Callable[[], None] = lambda: None
        self.closed = False
        self._seed = seed
        self._chance = np.random.default_rng(seed)

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        self.on_draft()
        path: list[int] = []
        for _ in range(min(limits.depth, limits.budget - 1, 3)):
            row = logits_after([*text, *path], self._seed)
            right = self._chance.random() < self.accuracy
            path.append(int(np.argmax(row)) if right else int(self._chance.integers(1, N_VOCAB)))
        paths = [(path, [-0.5] * len(path))] if path else []
        if limits.budget - 1 - len(path) > 0 and limits.leaves > 1 and path:
            sibling = int(self._chance.integers(1, N_VOCAB))
            if sibling != path[0]:
                paths.append(([sibling], [-2.0]))
        return TokenTree.from_paths(text[-1], paths) if paths else TokenTree.root_only(text[-1])

    def draft_together(self, requests: Sequence[DraftRequest], limits: TreeLimits) -> list[TokenTree]:
        self.drafted_together += len(requests) > 1
        share = limits.budget // len(requests), limits.leaves // len(requests)
        return [
            self.draft(
                request.sequence, replace(request.limits, budget=share[0], leaves=share[1]), request.ranking
            )
            for request in requests
        ]

    def learn(self, text: Sequence[int], index: int = 0) -> None:
        self.learned.append(list(text))

    def close(self) -> None:
        self.closed = True


def fake_engine(
    drafter: Drafter,
    seed: int,
    *,
    tree_budget: int | None = None,
    never_ends: bool = False,
    exact: bool = False,
    n_cells: int = 1 << 20,
) -> tuple[Engine, FakeTarget]:
    """An engine around a fake target."""
    rule = RowRule(multiple=4, minimum=4, maximum=16) if exact else None
    target = FakeTarget(seed, never_ends=never_ends, rule=rule, n_cells=n_cells)
    encoder = Encoder(target.model.vocabulary, None, CONTEXT)
    fake: Any = target
    speculator = Speculator(fake, drafter, ProfileUpdates(None, ProfileStore()), tree_budget=tree_budget)
    engine = Engine(fake, speculator, encoder, AbortFlag(), context=CONTEXT, loaded=Loaded(exact=exact))
    return engine, target
