"""A target, a drafter and a vocabulary without a model, for the engine around them.

The target is a fixed function of the last tokens. It enforces what a cache requires: a test fails if it
verifies after a text that the cache does not hold, or commits what was not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from edgespec.engine.engine import Engine
from edgespec.engine.passes import PromptChunk, SequenceTree, TargetPass, VerifiedTree
from edgespec.llama.cache.kv_cache import common_prefix
from edgespec.llama.cache.states import StateStore
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
    most_unread = 0
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
        self.own = FakeSequence()
        self.sequences: list[FakeSequence] = [self.own]
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
    def tokens(self) -> list[int]:
        return self.own.tokens

    @property
    def reading_s(self) -> float:
        return self.read_s

    @property
    def n_free_leaves(self) -> int:
        return self.max_leaves - len(self.sequences)

    @property
    def n_live(self) -> int:
        return sum(len(text.tokens) for text in self.sequences)

    def open_sequence(self, tokens: Sequence[int], scores: None = None) -> FakeSequence:
        assert len(self.sequences) < self.max_sequences
        cached = FakeSequence()
        _, shared = self.longest_prefix(tokens, but=cached)
        cached.tokens = list(tokens[:shared])
        self.sequences.append(cached)
        return cached

    def close_sequence(self, cached: FakeSequence) -> None:
        if cached is not self.own:
            self.sequences.remove(cached)

    def longest_prefix(
        self, tokens: Sequence[int], but: FakeSequence | None = None, scores: None = None
    ) -> tuple[FakeSequence | None, int]:
        others = [other for other in self.sequences if other is not but]
        best = max(others, key=lambda other: common_prefix(other.tokens, tokens), default=None)
        return best, common_prefix(best.tokens, tokens) if best else 0

    def recall(self, tokens: Sequence[int], cached: FakeSequence, store: FakeState | None = None) -> int:
        assert tokens[: len(cached.tokens)] == cached.tokens
        if store is not None:
            assert not store.closed
            assert store.tokens == tokens[: len(store.tokens)]
            cached.tokens = list(store.tokens)
        return len(cached.tokens)

    def set_aside(self, cached: FakeSequence, folder: Path) -> FakeState:
        self.states.append(FakeState(list(cached.tokens)))
        self.close_sequence(cached)
        return self.states[-1]

    def read_chunk(self, tokens: Sequence[int], cached: FakeSequence) -> int:
        self.on_pass()
        start = len(cached.tokens)
        cached.tokens += tokens[start : start + self.context.n_rows]
        return len(cached.tokens) - start

    def storing(self, cached: FakeSequence) -> Iterator[None]:
        return iter(())

    def rewind(self, length: int) -> None:
        del self.own.tokens[length:]

    def prefill(
        self,
        tokens: Sequence[int],
        on_progress: Callable[[int, int], None] | None = None,
        *,
        most_unread: int = 0,
        store: StateStore | None = None,
    ) -> int:
        self.own.tokens, self._verified = list(tokens), []
        if on_progress is not None:
            on_progress(len(tokens), len(tokens))
        return 0

    def verify(self, trees: Sequence[SequenceTree], chunks: Sequence[PromptChunk] = ()) -> TargetPass:
        self.on_pass()
        rows = sum(len(text.tree) for text in trees)
        assert rows <= self.max_nodes
        leaves = sum(len(text.tree.leaves) for text in trees)
        assert leaves <= len(trees) + self.n_free_leaves or len(trees) == 1
        rows += sum(len(chunk.tokens) for chunk in chunks)
        assert 0 < rows <= (self.rule.maximum if self.rule else self.context.n_rows)
        assert self.n_live + rows <= self.context.n_cells or len(self.sequences) == 2, "the cells are full"
        self.passes += 1
        self.shared_passes += len(trees) > 1
        self._verified = list(trees)
        taking_part = [text.cached or self.own for text in trees] + [chunk.cached for chunk in chunks]
        assert len(set(map(id, taking_part))) == len(taking_part), "a text takes part once"
        for chunk in chunks:
            chunk.cached.tokens.extend(chunk.tokens)
        return TargetPass(tuple(self._verify(text) for text in trees), waited_s=float(self.waits))

    def _verify(self, sequence_tree: SequenceTree) -> VerifiedTree:
        tree, text = sequence_tree.tree, list(sequence_tree.tokens)
        assert text[:-1] == (sequence_tree.cached or self.own).tokens
        assert int(tree.tokens[0]) == text[-1]
        rows = []
        for node in range(len(tree)):
            row = logits_after(text + [int(tree.tokens[n]) for n in tree.path(node)[1:]], self._seed)
            row[END] = -np.inf if self._never_ends else row[END]
            rows.append(row)
        return VerifiedTree(np.stack(rows))

    def commit(self, trees: Sequence[SequenceTree], paths: Sequence[Sequence[int]]) -> None:
        assert list(trees) == self._verified, "only what was verified can be kept"
        for sequence_tree, path in zip(trees, paths, strict=True):
            cached = sequence_tree.cached or self.own
            cached.tokens.extend(int(sequence_tree.tree.tokens[node]) for node in path)
        self._verified = []

    def truncate_to(self, length: int, cached: FakeSequence | None = None) -> None:
        del (cached or self.own).tokens[length:]
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


class FakeSequence:
    """A text in the cache of a fake target."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cache = None
        self.scores = None


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
    engine = Engine(
        target,  # type: ignore[arg-type]
        drafter,
        encoder,
        AbortFlag(),
        context=CONTEXT,
        updates=ProfileUpdates(None, ProfileStore()),
        tree_budget=tree_budget,
        exact=exact,
    )
    return engine, target
