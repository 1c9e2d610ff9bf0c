"""A target, a drafter and a vocabulary without a model, for the engine around them.

The target is a fixed function of the last tokens. It enforces what a cache requires: a test fails if it
verifies after a text that the cache does not hold, or commits what was not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from edgespec.engine.engine import Engine
from edgespec.engine.target import TargetPass, TextTree, Verified
from edgespec.models.llama.row_rule import RowRule
from edgespec.models.llama.runtime.abort import AbortFlag
from edgespec.models.llama.runtime.residency import AllInMemory
from edgespec.models.text.encoding import Encoder
from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.tree import FloatArray, IntArray, TokenTree

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


class FakeTarget:
    """Verifies trees by the fixed function."""

    max_nodes = 16
    max_leaves = 8

    def __init__(self, seed: int, *, never_ends: bool = False, rule: RowRule | None = None) -> None:
        self.rule = rule
        self.model = SimpleNamespace(
            path=Path("fake.gguf"), vocabulary=LetterVocabulary(), weights=AllInMemory()
        )
        self.context = SimpleNamespace(n_threads=1)
        self.tokens: list[int] = []
        self.passes = 0
        self.closed = False
        self.on_pass: Callable[[], None] = lambda: None
        self._seed = seed
        self._never_ends = never_ends
        self._verified: list[TextTree] = []

    def prefill(self, tokens: Sequence[int], on_progress: Callable[[int, int], None] | None = None) -> int:
        self.tokens, self._verified = list(tokens), []
        if on_progress is not None:
            on_progress(len(tokens), len(tokens))
        return len(tokens)

    def verify(self, trees: Sequence[TextTree]) -> TargetPass:
        self.on_pass()
        (only,) = trees
        assert list(only.text[:-1]) == self.tokens
        assert int(only.tree.tokens[0]) == only.text[-1]
        assert len(only.tree) <= self.max_nodes
        self.passes += 1
        self._verified = list(trees)
        text = list(only.text)
        rows = []
        for node in range(len(only.tree)):
            row = logits_after(
                text + [int(only.tree.tokens[n]) for n in only.tree.path(node)[1:]], self._seed
            )
            row[END] = -np.inf if self._never_ends else row[END]
            rows.append(row)
        return TargetPass((Verified(np.stack(rows)),), waited_s=0.0)

    def commit(self, trees: Sequence[TextTree], paths: Sequence[Sequence[int]]) -> None:
        assert list(trees) == self._verified, "only what was verified can be kept"
        (only,), (path,) = trees, paths
        self.tokens += [int(only.tree.tokens[node]) for node in path]
        self._verified = []

    def settle(self, length: int) -> None:
        self.tokens, self._verified = self.tokens[:length], []

    def close(self) -> None:
        self.closed = True


class FakeDrafter(Drafter):
    """Guesses the target's likeliest tokens with a given accuracy, and some siblings.

    Attributes:
        accuracy: how often the target's likeliest token is among the candidates.
        learned: the texts that it was given to learn from.
    """

    name = "fake drafter"

    def __init__(self, seed: int, accuracy: float) -> None:
        self.accuracy = accuracy
        self.learned: list[list[int]] = []
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

    def learn(self, text: Sequence[int]) -> None:
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
) -> tuple[Engine, FakeTarget]:
    """An engine around a fake target."""
    rule = RowRule(multiple=4, minimum=4, maximum=16) if exact else None
    target = FakeTarget(seed, never_ends=never_ends, rule=rule)
    encoder = Encoder(target.model.vocabulary, None, CONTEXT)
    engine = Engine(
        target,  # type: ignore[arg-type]
        drafter,
        encoder,
        AbortFlag(),
        context=CONTEXT,
        tree_budget=tree_budget,
        exact=exact,
    )
    return engine, target
