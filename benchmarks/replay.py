"""Trees along a text that is known already, without running the target.

A target that takes its most likely token, or samples with shared noise, writes the same text whatever drafts
it. So the text is written once, and every way to grow trees is then led along it: a tree is grown where a
pass would begin, the path that the text takes through it is what the target would accept, and the next pass
begins behind the bonus token. Only the drafter runs, and what it says after a context is remembered and
shared by all policies and budgets that ask.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from edgespec.generation import GenerationConfig
from edgespec.models.batch import Batch
from edgespec.models.runtime import Context, Model
from edgespec.speculation.acceptance import Calibrated
from edgespec.speculation.counts import Table
from edgespec.speculation.drafters.expansions import Expansions
from edgespec.speculation.drafters.lookup import Continuations, LookupDrafter
from edgespec.speculation.growth import Children, Frontier, TreeLimits, grow
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.pair import Pair
from edgespec.speculation.ranking import ByAgreement, ByProbability
from edgespec.speculation.tree import IntArray

# A context: so many tokens of the text, and the tokens off it that follow them.
Key = tuple[int, tuple[int, ...]]

_BATCH = 32  # contexts read at once
_COLUMNS = 16  # candidates by probability that are remembered
_SEQUENCES = 256


class Contexts:
    """What a drafter says after contexts along one text; each is read once."""

    def __init__(self, model: Model, *, n_cells: int, n_threads: int) -> None:
        self._context = Context(
            model,
            n_cells=n_cells,
            n_rows=512,
            n_outputs=64,
            n_sequences=_SEQUENCES,
            n_threads=n_threads,
        )
        self.n_vocab = model.vocabulary.n_tokens
        # By probability; and the values and tokens that the pair's correction begins with.
        self._found: dict[Key, tuple[Children, Table, IntArray]] = {}
        # The cache holds the text in sequence 0, and branches off it: which sequence a context is in, and
        # those that end in it.
        self._places: dict[Key, int] = {}
        self._ends: dict[int, Key] = {}
        self.text: list[int] = []

    def start(
        self, prompt: Sequence[int], answer: Sequence[int], config: GenerationConfig, seed: int
    ) -> None:
        """Read a text that a target wrote by `config` and seed; contexts on it are then known."""
        self._context.clear()
        self._found.clear()
        self._places.clear()
        self._ends.clear()
        self._by_probability = ByProbability(config.temperature or 1.0)
        self._by_agreement = ByAgreement(config, GumbelNoise(seed, self.n_vocab), Pair())
        self.text = [*prompt, *answer]
        first = len(prompt) - 1
        for start in range(0, first, 512):
            self._context.decode(Batch.run(self.text[start : min(start + 512, first)], start, 1))
        for start in range(first, len(self.text), 64):
            piece = self.text[start : start + 64]
            self._context.decode(Batch.run(piece, start, 1, "all"))
            self._remember([(start + i + 1, ()) for i in range(len(piece))])

    def candidates(self, keys: Sequence[Key], after: IntArray, count: int, pair: Pair | None) -> Children:
        """The best candidates after each context: by the pair's agreement, or by probability if None."""
        missing = [key for key in keys if key not in self._found]
        for start in range(0, len(missing), _BATCH):
            self._read(missing[start : start + _BATCH])
        if pair is None:
            rows = [self._found[key][0] for key in keys]
            logprobs = np.concatenate([row.logprobs[:, :count] for row in rows])
            return Children(np.concatenate([row.tokens[:, :count] for row in rows]), logprobs)
        values = np.concatenate([self._found[key][1] for key in keys])
        return pair.children(np.concatenate([self._found[key][2] for key in keys]), values, after, count)

    def close(self) -> None:
        """Free the context."""
        self._context.close()

    def forget(self, length: int) -> None:
        """Free the branches that leave the text before it has so many tokens."""
        for sequence in [sequence for sequence, key in self._ends.items() if key[0] < length]:
            self._context.remove(sequence)
            del self._ends[sequence]
        self._places = {key: at for key, at in self._places.items() if key[0] >= length}

    def _read(self, keys: Sequence[Key]) -> None:
        """Read the last tokens of contexts, each behind what is in the cache of it."""
        if len(self._ends) + 2 * len(keys) >= _SEQUENCES:
            self.forget(len(self.text) + 1)
        parents = [(length, off[:-1]) for length, off in keys]
        lost = [parent for parent in dict.fromkeys(parents) if parent[1] and parent not in self._places]
        if lost:
            self._read(lost)
        free = (sequence for sequence in range(1, _SEQUENCES) if sequence not in self._ends)
        sequences = []
        for key, parent in zip(keys, parents, strict=True):
            above = self._places.get(parent, 0)
            if not above or self._ends[above] != parent:
                sequence = next(free)
                self._context.copy(above, sequence, 0, parent[0] + len(parent[1]))
            else:
                sequence = above
            self._places[key] = sequence
            self._ends[sequence] = key
            sequences.append(sequence)
        self._context.decode(
            Batch(
                tokens=np.array([off[-1] for _, off in keys], dtype=np.int32),
                positions=np.array([length + len(off) - 1 for length, off in keys], dtype=np.int32),
                sequence_ids=np.array(sequences, dtype=np.int32),
                offsets=np.arange(len(keys) + 1, dtype=np.int64),
                wants_logits=np.ones(len(keys), dtype=np.bool_),
            )
        )
        self._remember(keys)

    def _remember(self, keys: Sequence[Key]) -> None:
        logits = torch.from_numpy(self._context.logits())
        positions = [length + len(off) for length, off in keys]
        by_probability = self._by_probability.best(logits, positions, _COLUMNS)
        values, tokens = self._by_agreement.top(logits, positions)
        for row, key in enumerate(keys):
            self._found[key] = by_probability.row(row), values[row : row + 1], tokens[row : row + 1]


@dataclass
class Run:
    """How one way to grow trees did along one text.

    Attributes:
        tokens, passes, nodes: of the target.
        step_rows: nodes the drafter read in each of its steps.
        grow_s: seconds spent growing outside the drafter.
    """

    tokens: int = 0
    passes: int = 0
    nodes: int = 0
    step_rows: list[int] = field(default_factory=list)
    grow_s: float = 0.0


@dataclass
class _Pass:
    """The drafter's side of one pass: draft steps, answered from what is known of contexts."""

    contexts: Contexts
    at: int
    branching: int
    pair: Pair | None
    looked_up: Continuations | None
    expansions: Expansions = field(default_factory=Expansions)
    step_rows: list[int] = field(default_factory=list)
    drafter_s: float = 0.0

    def __post_init__(self) -> None:
        self._keys: dict[int, Key] = {0: (self.at, ())}

    def expand(self, frontier: Frontier) -> Children:
        """One draft step."""
        begun = time.perf_counter()
        steps = zip(frontier.nodes.tolist(), frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        for node, parent, token in steps:
            if node:
                self._keys[node] = self._below(self._keys[parent], token)
        asked = [self._keys[node] for node in frontier.nodes.tolist()]
        children = self.contexts.candidates(asked, frontier.tokens, self.branching, self.pair)
        self.drafter_s += time.perf_counter() - begun
        self.step_rows.append(len(asked))
        if self.looked_up is not None:
            children = self.looked_up.join(frontier, children)
        self.expansions.add(frontier, children)
        return children

    def _below(self, key: Key, token: int) -> Key:
        (length, off), text = key, self.contexts.text
        if not off and length < len(text) and text[length] == token:
            return length + 1, ()
        return length, (*off, token)


class Walk:
    """One way to grow trees, led along a text.

    Args:
        start: tokens of the prompt.
        limits: with the policy's growth, which learns on the way as it would while running.
        lookup: merges the text's own continuations into the trees.
    """

    def __init__(
        self, contexts: Contexts, start: int, limits: TreeLimits, lookup: LookupDrafter | None = None
    ) -> None:
        self.run = Run(tokens=len(contexts.text) - start)
        self.at = start
        self._contexts = contexts
        self._limits = limits
        self._lookup = lookup

    def step(self) -> None:
        """One pass."""
        text, at, run = self._contexts.text, self.at, self.run
        chances = self._limits.growth.chances
        within = replace(self._limits, depth=min(self._limits.depth, len(text) - at - 1))
        begun = time.perf_counter()
        looked_up = self._lookup.continuations(text[:at], within.depth) if self._lookup else None
        pair = chances.pair if isinstance(chances, Calibrated) else None
        one = _Pass(self._contexts, at, within.branching, pair, looked_up)
        tree = grow(text[at - 1], one.expand, within)
        node, accepted = 0, 0
        while (below := tree.child(node, text[at + accepted])) is not None:
            node, accepted = below, accepted + 1
        one.expansions.teach(chances, text[at : at + accepted + 1])
        run.grow_s += time.perf_counter() - begun - one.drafter_s
        run.step_rows += one.step_rows
        run.passes += 1
        run.nodes += len(tree)
        self.at += accepted + 1


def replay(contexts: Contexts, start: int, walks: Sequence[Walk]) -> None:
    """Lead all ways to grow trees along the text, side by side, so that what they ask for is near."""
    for at in range(start, len(contexts.text)):
        contexts.forget(at)
        for walk in walks:
            if walk.at == at:
                walk.step()
