"""Trees along a text that is known already, without running the target.

A target that takes its most likely token, or samples with shared noise, writes the same text whatever drafts
it. So the text is written once, and every way to grow trees is then led along it: a tree is grown where a
pass would begin, the path that the text takes through it is what the target would accept, and the next pass
begins behind the bonus token. Only the drafter runs, and what it says after a context is remembered and
shared by all policies and budgets that ask.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec.generation.config import GenerationConfig
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.speculation.drafters.candidates import Expansions
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.learning.acceptance import CalibratedAcceptance
from edgespec.speculation.learning.drafter_calibration import DrafterCalibration
from edgespec.speculation.learning.tables import Table
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.policies import RankAcceptance, UniformAcceptance
from edgespec.speculation.ranking import CalibratedRanking, ProbabilityRanking, Ranking
from edgespec.speculation.sources.base import KEPT_OF_ROWS, Proposer, TargetRows, proposals_of
from edgespec.speculation.tree import IntArray, TokenTree
from edgespec.speculation.tree_search import TreeSearch, draft_steps

# A context: so many tokens of the text, and the tokens off it that follow them.
Key = tuple[int, tuple[int, ...]]

_BATCH = 64  # contexts read at once: with as many parents of theirs they must find room in _SEQUENCES
_ROWS = 512  # of a batch: those and what is not in the cache above them
_AHEAD = 32  # tokens that one way may be ahead of another
_COLUMNS = KEPT_OF_ROWS  # candidates by probability that are remembered
_SEQUENCES = 256


class Contexts:
    """A drafter's distributions after contexts along one text; each is read once."""

    def __init__(self, model: Model, *, n_cells: int, n_threads: int, kv: str = "f16") -> None:
        self._context = Context(
            model,
            n_cells=n_cells,
            n_rows=_ROWS,
            n_outputs=64,
            n_sequences=_SEQUENCES,
            n_threads=n_threads,
            kv=kv,
        )
        self.n_vocab = model.vocabulary.n_tokens
        # By probability; and the values and tokens that the pair's correction begins with.
        self._found: dict[Key, tuple[Children, Table, IntArray]] = {}
        # The cache holds the text in sequence 0, and branches off it: which sequence a context is in; the
        # one it ends with, the latest used last; and all that were read into it.
        self._places: dict[Key, int] = {}
        self._ends: dict[int, Key] = {}
        self._keys: dict[int, list[Key]] = defaultdict(list)
        self.text: list[int] = []

    def start(
        self, prompt: Sequence[int], answer: Sequence[int], config: GenerationConfig, seed: int
    ) -> None:
        """Read a text that a target wrote by `config` and seed; contexts on it are then known."""
        self._context.clear()
        self._found.clear()
        self._places.clear()
        self._ends.clear()
        self._keys.clear()
        self._by_probability = ProbabilityRanking(config.temperature or 1.0)
        self._by_agreement = CalibratedRanking(config, GumbelNoise(seed, self.n_vocab), DrafterCalibration())
        self.text = [*prompt, *answer]
        first = len(prompt) - 1
        for start in range(0, first, 512):
            self._context.decode(TokenBatch.run(self.text[start : min(start + 512, first)], start, 1))
        for start in range(first, len(self.text), 64):
            piece = self.text[start : start + 64]
            self._context.decode(TokenBatch.run(piece, start, 1, "all"))
            self._remember([(start + i + 1, ()) for i in range(len(piece))])

    def unknown(self, keys: Sequence[Key]) -> list[Key]:
        """Those that have to be read before `candidates` can say what follows them."""
        return [key for key in keys if key not in self._found]

    def candidates(
        self, keys: Sequence[Key], after: IntArray, count: int, calibration: DrafterCalibration | None
    ) -> Children:
        """The best candidates after known contexts: by the pair's agreement, or by probability if None."""
        if calibration is None:
            rows = [self._found[key][0] for key in keys]
            logprobs = np.concatenate([row.logprobs[:, :count] for row in rows])
            return Children(np.concatenate([row.tokens[:, :count] for row in rows]), logprobs)
        values = np.concatenate([self._found[key][1] for key in keys])
        return calibration.children(
            np.concatenate([self._found[key][2] for key in keys]), values, after, count
        )

    def said(self, keys: Sequence[Key]) -> Children:
        """The likeliest tokens after known contexts, by the model's own probability."""
        rows = [self._found[key][0] for key in keys]
        return Children(
            np.concatenate([row.tokens for row in rows]), np.concatenate([row.logprobs for row in rows])
        )

    def read(self, keys: Sequence[Key]) -> None:
        """Read the last tokens of unknown contexts, whose parents were read before."""
        for start in range(0, len(keys), _BATCH):
            self._read(keys[start : start + _BATCH])

    def close(self) -> None:
        """Free the context."""
        self._context.close()

    def forget(self, length: int) -> None:
        """Free the branches that leave the text before it has so many tokens."""
        for sequence in [sequence for sequence, key in self._ends.items() if key[0] < length]:
            self._free(sequence)

    def _free(self, sequence: int) -> None:
        self._context.remove(sequence)
        del self._ends[sequence]
        for key in self._keys.pop(sequence):
            if self._places.get(key) == sequence:  # it may have been read again since, elsewhere
                del self._places[key]

    def _read(self, keys: Sequence[Key]) -> None:
        """Read contexts behind what is in the cache of them, in one batch with what is not."""
        above = self._above([key for key in keys if key not in self._places])
        if len(above) > _ROWS:
            for half in (keys[: len(keys) // 2], keys[len(keys) // 2 :]):
                self._read(half)
            return
        parents = set(above.values())
        leaves = [key for key in above if key not in parents]
        while len(self._ends) + len(leaves) >= _SEQUENCES:
            self._free(next(iter(self._ends)))
        within: dict[Key, list[int]] = {key: [] for key in above}
        for leaf in leaves:
            path = [leaf]
            while above[path[-1]] in above:
                path.append(above[path[-1]])
            sequence = self._sequence_behind(above[path[-1]])
            self._ends[sequence] = leaf
            for key in path:
                within[key].append(sequence)
                if self._places.setdefault(key, sequence) == sequence:
                    self._keys[sequence].append(key)
        order = sorted(above, key=lambda key: len(key[1]))
        wanted = set(keys)
        self._context.decode(
            TokenBatch(
                tokens=np.array([off[-1] for _, off in order], dtype=np.int32),
                positions=np.array([length + len(off) - 1 for length, off in order], dtype=np.int32),
                sequence_ids=np.array([s for key in order for s in within[key]], dtype=np.int32),
                offsets=np.cumsum([0, *(len(within[key]) for key in order)], dtype=np.int64),
                wants_logits=np.array([key in wanted for key in order], dtype=np.bool_),
            )
        )
        self._remember([key for key in order if key in wanted])

    def _above(self, keys: Sequence[Key]) -> dict[Key, Key]:
        """The parents of contexts, and of those above them that are not in the cache any more.

        What is in the cache and needed is marked as used now: it is the last to be freed.
        """
        above: dict[Key, Key] = {}
        for key in keys:
            while key not in above:
                length, off = key
                parent = above[key] = (length, off[:-1])
                if not parent[1]:
                    break
                if parent in self._places:
                    sequence = self._places[parent]
                    self._ends[sequence] = self._ends.pop(sequence)
                    break
                key = parent
        return above

    def _sequence_behind(self, parent: Key) -> int:
        """A sequence that ends with a context on the text or in the cache."""
        sequence = self._places.get(parent, 0)
        if sequence and self._ends[sequence] == parent:
            return sequence
        free = next(s for s in range(1, _SEQUENCES) if s not in self._ends)
        self._context.copy(sequence, free, 0, parent[0] + len(parent[1]))
        return free

    def _remember(self, keys: Sequence[Key]) -> None:
        logits = self._context.logits()
        positions = [length + len(off) for length, off in keys]
        by_probability = self._by_probability.best(logits, positions, _COLUMNS)
        values, tokens = self._by_agreement.candidates(logits, positions)
        for row, key in enumerate(keys):
            self._found[key] = by_probability.row(row), values[row : row + 1], tokens[row : row + 1]


@dataclass
class Run:
    """Results of one way to grow trees along one text.

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


class Walk:
    """One way to grow trees, led along a text.

    Args:
        start: tokens of the prompt. limits: with the policy's expansion, which learns on the way as it would
        while running. proposers: further sources that are merged into the trees. target: what the target says
        after contexts along the same text, for sources that keep that. model: whether the drafter is asked at
        all. whole: whether sources see what the target said after all nodes of a tree, or only after accepted
        ones.
    """

    def __init__(
        self,
        contexts: Contexts,
        start: int,
        limits: TreeLimits,
        proposers: Sequence[Proposer] = (),
        *,
        target: Contexts | None = None,
        model: bool = True,
        whole: bool = True,
        ranking: Ranking | None = None,
    ) -> None:
        self.run = Run(tokens=len(contexts.text) - start)
        self.at = start
        self._contexts = contexts
        self._limits = limits
        self._proposers = proposers
        self._target = target
        self._model = model
        self._whole = whole
        self._ranking = ranking
        # Where scores do not come from what the drafter says, nodes off the text need not be read: they are
        # not accepted, and take their places in the tree whatever they are.
        self._shaped = (
            isinstance(limits.expansion.acceptance, RankAcceptance | UniformAcceptance)
            or limits.branching == 1
        )

    def steps(self) -> Iterator[tuple[Contexts, list[Key]]]:
        """All passes, one after another.

        Yields:
            Contexts that must be read before it can go on, and of which model.
        """
        text, run = self._contexts.text, self.run
        acceptance = self._limits.expansion.acceptance
        while self.at < len(text):
            begun = time.perf_counter()
            within = replace(self._limits, depth=min(self._limits.depth, len(text) - self.at - 1))
            proposals = proposals_of(self._proposers, text[: self.at], within.depth)
            expansions = Expansions()
            keys: dict[int, Key] = {0: (self.at, ())}
            search = draft_steps([TreeSearch(text[self.at - 1], within)], within)
            answer: list[Children] | None = None
            while True:
                try:
                    ((_, found),) = search.send(answer)  # type: ignore[arg-type]
                except StopIteration as end:
                    (tree,) = end.value
                    break
                asked = self._asked(found, keys)
                run.step_rows += [len(asked)] * self._model
                run.grow_s += time.perf_counter() - begun
                rows = [row for row, key in enumerate(asked) if self._model and not (self._shaped and key[1])]
                wanted = [asked[row] for row in rows]
                unknown = self._contexts.unknown(wanted)
                if unknown:
                    yield self._contexts, unknown
                calibration = acceptance.calibration if isinstance(acceptance, CalibratedAcceptance) else None
                children = (
                    _anything(len(asked), within.branching) if self._model else Children.none(len(asked), 0)
                )
                if rows:
                    known = self._contexts.candidates(
                        wanted, found.tokens[rows], within.branching, calibration
                    )
                    children.tokens[rows], children.logprobs[rows] = known.tokens, known.logprobs
                begun = time.perf_counter()
                children = proposals.join(found, children)
                if self._ranking is not None:
                    children = self._ranking.filtered(found, children, self.at)
                expansions.add(found, children)
                answer = [children]
            node, accepted = 0, 0
            while (below := tree.child(node, text[self.at + accepted])) is not None:
                node, accepted = below, accepted + 1
            if self._target is not None and any(proposer.keeps_passes for proposer in self._proposers):
                run.grow_s += time.perf_counter() - begun
                at = self._places(tree)
                nodes = [node for node, key in enumerate(at) if self._whole or not key[1]]
                for depth in range(1 + max(len(off) for _, off in at)):  # parents are read before children
                    level = [at[node] for node in nodes if len(at[node][1]) == depth]
                    if unknown := self._target.unknown(level):  # others may have asked in the meantime
                        yield self._target, unknown
                begun = time.perf_counter()
                said = self._target.said([at[node] for node in nodes])
                rows_of_nodes = TargetRows(
                    np.array(nodes, dtype=np.int32), said.tokens, np.exp(said.logprobs)
                )
                for proposer in self._proposers:
                    proposer.observe(text[: self.at], tree, rows_of_nodes)
            expansions.teach(acceptance, text[self.at : self.at + accepted + 1])
            run.grow_s += time.perf_counter() - begun
            run.passes += 1
            run.nodes += len(tree)
            self.at += accepted + 1

    def _asked(self, frontier: Frontier, keys: dict[int, Key]) -> list[Key]:
        """The contexts of a frontier's nodes; `keys` holds those of nodes so far."""
        asked = []
        for node, parent, token in zip(
            frontier.nodes.tolist(), frontier.parents.tolist(), frontier.tokens.tolist(), strict=True
        ):
            if node:
                keys[node] = self._below(keys[parent], token)
            asked.append(keys[node])
        return asked

    def _places(self, tree: TokenTree) -> list[Key]:
        """The contexts of a tree's nodes."""
        places: list[Key] = [(self.at, ())]
        for parent, token in zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), strict=True):
            places.append(self._below(places[parent], token))
        return places

    def _below(self, key: Key, token: int) -> Key:
        (length, off), text = key, self._contexts.text
        if not off and length < len(text) and text[length] == token:
            return length + 1, ()
        return length, (*off, token)


def _anything(width: int, branching: int) -> Children:
    """Candidates that are no tokens."""
    shape = (width, branching)
    return Children(np.full(shape, -1, dtype=np.int32), np.full(shape, -1.0, dtype=np.float32))


def replay(contexts: Contexts, walks: Sequence[Walk]) -> None:
    """Lead all ways to grow trees along the text, side by side.

    What they have to know is read for all of them at once: a row of a large batch costs the drafter a part
    of what it costs alone. Those that are far ahead wait, so that what they ask for is near.
    """
    going = {walk: walk.steps() for walk in walks}
    while going:
        behind = min(walk.at for walk in going)
        wanted: dict[Contexts, dict[Key, None]] = {}
        for walk, steps in list(going.items()):
            if walk.at >= behind + _AHEAD:
                continue
            asked = next(steps, None)
            if asked is None:
                del going[walk]
            else:
                wanted.setdefault(asked[0], {}).update(dict.fromkeys(asked[1]))
        for contexts, keys in wanted.items():
            contexts.forget(behind)
            contexts.read(list(keys))
