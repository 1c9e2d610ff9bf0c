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
from edgespec.speculation.drafters.expansions import Expansions
from edgespec.speculation.drafters.lookup import Continuations, LookupDrafter
from edgespec.speculation.growth import Children, Frontier, TreeLimits, grow
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.ranking import ByAgreement, ByProbability, Disagreement

# A context: so many tokens of the text, and the tokens off it that follow them.
Key = tuple[int, tuple[int, ...]]

_BATCH = 16  # contexts read at once
_COLUMNS = 64  # candidates that are remembered: all that the calibrated ranking compares


class Contexts:
    """What a drafter says after contexts along one text; each is read once."""

    def __init__(self, model: Model, *, n_cells: int, n_threads: int) -> None:
        self._context = Context(
            model,
            n_cells=n_cells,
            n_rows=512,
            n_outputs=128,
            n_sequences=_BATCH + 1,
            n_threads=n_threads,
        )
        self.n_vocab = model.vocabulary.n_tokens
        self._found: dict[Key, tuple[Children, Children]] = {}  # by probability, and by agreement
        self.text: list[int] = []

    def start(
        self, prompt: Sequence[int], answer: Sequence[int], config: GenerationConfig, seed: int
    ) -> None:
        """Read a text that a target wrote by `config` and seed; contexts on it are then known."""
        self._context.clear()
        self._found.clear()
        self._by_probability = ByProbability(config.temperature or 1.0)
        # With a disagreement of 1 the scores are the logits themselves, up to a constant.
        self._by_agreement = ByAgreement(config, GumbelNoise(seed, self.n_vocab), Disagreement(1.0))
        self.text = [*prompt, *answer]
        first = len(prompt) - 1
        for start in range(0, first, 512):
            self._context.decode(Batch.run(self.text[start : min(start + 512, first)], start, 1))
        for start in range(first, len(self.text), 64):
            piece = self.text[start : start + 64]
            self._context.decode(Batch.run(piece, start, 1, "all"))
            self._remember([(start + i + 1, ()) for i in range(len(piece))])

    def candidates(self, keys: Sequence[Key], count: int, pair: Disagreement | None) -> Children:
        """The best candidates after each context: by the pair's agreement, or by probability if None."""
        missing = [key for key in keys if key not in self._found]
        for start in range(0, len(missing), _BATCH):
            self._read(missing[start : start + _BATCH])
        rows = [self._found[key][pair is not None] for key in keys]
        logprobs = np.concatenate([row.logprobs for row in rows])
        if pair is not None:
            logprobs = torch.from_numpy(logprobs / np.float32(pair.nats)).log_softmax(dim=1).numpy()
        return Children(np.concatenate([row.tokens[:, :count] for row in rows]), logprobs[:, :count])

    def close(self) -> None:
        """Free the context."""
        self._context.close()

    def _read(self, keys: Sequence[Key]) -> None:
        """Read the tokens off the text anew, as a tree with a sequence id for every context."""
        rows: dict[Key, list[int]] = {}
        for leaf, (length, off) in enumerate(keys, start=1):
            self._context.copy(0, leaf, 0, length)
            for end in range(1, len(off) + 1):
                rows.setdefault((length, off[:end]), []).append(leaf)
        order = sorted(rows, key=lambda key: len(key[1]))
        counts = np.array([len(rows[key]) for key in order])
        wanted = set(keys)
        wants = [key in wanted for key in order]
        self._context.decode(
            Batch(
                tokens=np.array([off[-1] for _, off in order], dtype=np.int32),
                positions=np.array([length + len(off) - 1 for length, off in order], dtype=np.int32),
                sequence_ids=np.concatenate([rows[key] for key in order]).astype(np.int32),
                offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
                wants_logits=np.array(wants, dtype=np.bool_),
            )
        )
        self._remember([key for key, want in zip(order, wants, strict=True) if want])
        for leaf in range(1, len(keys) + 1):
            self._context.remove(leaf)

    def _remember(self, keys: Sequence[Key]) -> None:
        logits = torch.from_numpy(self._context.logits())
        positions = [length + len(off) for length, off in keys]
        by_probability = self._by_probability.best(logits, positions, _COLUMNS)
        by_agreement = self._by_agreement.best(logits, positions, _COLUMNS)
        for row, key in enumerate(keys):
            self._found[key] = by_probability.row(row), by_agreement.row(row)


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
    pair: Disagreement | None
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
        children = self.contexts.candidates(asked, self.branching, self.pair)
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


def replay(contexts: Contexts, start: int, limits: TreeLimits, lookup: LookupDrafter | None = None) -> Run:
    """Lead one way to grow trees along the text.

    Args:
        start: tokens of the prompt.
        limits: with the policy's growth, which learns on the way as it would while running.
        lookup: merges the text's own continuations into the trees.
    """
    run = Run()
    text = contexts.text
    chances = limits.growth.chances
    pair = chances.pair if isinstance(chances, Calibrated) else None
    at = start
    while at < len(text):
        within = replace(limits, depth=min(limits.depth, len(text) - at - 1))
        begun = time.perf_counter()
        looked_up = lookup.continuations(text[:at], within.depth) if lookup is not None else None
        one = _Pass(contexts, at, within.branching, pair, looked_up)
        tree = grow(text[at - 1], one.expand, within)
        node, accepted = 0, 0
        while (below := tree.child(node, text[at + accepted])) is not None:
            node, accepted = below, accepted + 1
        one.expansions.teach(chances, text[at : at + accepted + 1])
        run.grow_s += time.perf_counter() - begun - one.drafter_s
        run.step_rows += one.step_rows
        run.passes += 1
        run.nodes += len(tree)
        at += accepted + 1
    run.tokens = len(text) - start
    return run
