"""The model drafter: a small model, resident in memory, grows the tree with batched draft steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgespec.models.gguf.header import read_header
from edgespec.models.llama.cache.identity import cache_identity
from edgespec.models.llama.cache.states import BLOCK, StateStore
from edgespec.models.llama.cache.text_cache import common_prefix, open_cache
from edgespec.models.llama.runtime.batch import Batch
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model
from edgespec.speculation.drafters.base import Drafter, Source
from edgespec.speculation.drafters.expansions import Expansions
from edgespec.speculation.drafters.proposers import Proposals, Proposer, proposals_of
from edgespec.speculation.growth import Children, Frontier, TreeLimits, grow
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sampled_trees import Drawing, grow_drawn
from edgespec.speculation.tree import FloatArray, TokenTree
from edgespec.speculation.verification.base import DraftedTree

_TRIAL_TEXT = 32  # tokens before the rows that are timed


@dataclass
class _Branches:
    """The nodes of the last tree that the drafter has read, and the sequence ids of their keys and values.

    Attributes:
        paths: node -> sequence id of the branch that ends at the node or continues below it.
        extended: nodes whose sequence id a child has taken over.
        children: (parent, token) -> node, for the nodes that were read.
        found: node -> its candidates, for the nodes that were read.
        used_paths: how many sequence ids are in use.
    """

    paths: dict[int, int] = field(default_factory=dict)
    extended: set[int] = field(default_factory=set)
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    found: dict[int, Children] = field(default_factory=dict)
    used_paths: int = 0


class ModelDrafter(Drafter):
    """Drafts with a model whose vocabulary is the target's.

    The cache holds the text and, until the next call, the branches of the last tree. The branch that the
    target accepted is kept, so that nothing accepted is read twice. So is a node that was read but did not
    make it into the tree, if the target chose its token after all: the next tree then grows below it at once.

    Whatever a call raises and wherever it is interrupted, the next call first discards what it left behind.

    Args:
        proposers: sources whose candidates are merged into the tree (SpecInfer's collective tree, Miao et al.
            2024, section 3).

    Attributes:
        cache: the keys and values of what the drafter has read.
        steps, rows: draft steps of the last tree, and nodes read in them.
        root_was_known: whether the last tree's root had already been read in the search for the tree before.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        target_vocabulary: int,
        proposers: Sequence[Proposer] = (),
    ) -> None:
        self.name = " and ".join([model.path.stem, *(proposer.name for proposer in proposers)])
        self._model = model
        self._context = context
        self.cache = open_cache(context, ordered=False)
        # One vocabulary may be padded at its end; padding is no token of the other.
        self._n_vocab = min(model.vocabulary.n_tokens, target_vocabulary)
        self._proposers = proposers
        self._read: list[int] = []
        self._pending: list[int] = []
        self._branches = _Branches()
        self._store: StateStore | None = None
        self._proposals: Proposals | None = None
        self._expansions = Expansions()
        self._text: list[int] = []
        self._ranking: Ranking | None = None
        self._limits: TreeLimits | None = None
        self.steps = self.rows = 0
        self.root_was_known = False
        self._changing = False  # a call has begun and not ended

    def draft(self, text: Sequence[int], limits: TreeLimits, ranking: Ranking) -> TokenTree:
        """A tree of at most `limits.budget` nodes below the last token of the text.

        Raises:
            DecodeAborted: stopped from outside; the next call continues from what was read.
        """
        self._begin(text)
        tree = TokenTree.root_only(text[-1])
        if limits.allows_drafting:
            self._catch_up(text, ranking, limits.branching)
            self._limits, self._ranking = limits, ranking
            merged = self._proposers if limits.growth.merges else ()
            self._proposals = proposals_of(merged, text, limits.depth) if merged else None
            tree = grow(text[-1], self._expand, limits)
        self._changing = False
        return tree

    def draw(self, text: Sequence[int], drawing: Drawing, width: int) -> DraftedTree:
        """A tree whose tokens are sampled from this model's distribution.

        Raises:
            DecodeAborted: stopped from outside; the next call continues from what was read.
        """
        self._begin(text)
        self._catch_up(text, None)
        self._limits = self._ranking = None  # draws are not candidates: none is learned from or reused
        drafted = grow_drawn(text[-1], self._read_frontier, drawing, width)
        self._changing = False
        return drafted

    def step_seconds(self, rows: int) -> float:
        """Seconds of one decode of this many rows, after a short text; the cache is emptied.

        Args:
            rows: at most the width that the drafter was opened with.

        Raises:
            DecodeAborted: stopped from outside.
        """
        self.forget()
        tokens = np.random.default_rng(rows).integers(0, self._n_vocab, _TRIAL_TEXT + rows).astype(np.int32)
        text, drafted = tokens[:_TRIAL_TEXT], tokens[_TRIAL_TEXT:]
        self._changing = True  # `_read` does not have these tokens, so the next call discards them
        self.cache.append(Batch.run(text, 0, self.cache.open_paths, "last"))
        self._context.logits()
        start = time.perf_counter()
        self.cache.append(Batch.run(drafted, _TRIAL_TEXT, self.cache.open_paths, "all"))
        self._context.logits()
        return time.perf_counter() - start

    def forget(self) -> None:
        """Forget everything that was read."""
        self._recover()
        self.cache.rewind(0)
        self._read = []

    def _recover(self) -> None:
        """Return to the text that was certainly read, and forget the last tree."""
        self._changing = True  # in case this is interrupted too
        self.cache.recover()
        self.cache.rewind(len(self._read))
        del self._read[self.cache.length :]
        self._branches, self._pending = _Branches(), []
        self._expansions, self._text, self._limits, self._ranking = Expansions(), [], None, None
        self._changing = False

    def sources(self, tree: TokenTree) -> list[Source]:
        """Who proposed each node of the last tree."""
        return self._expansions.sources(tree)

    def learn(self, text: Sequence[int]) -> None:
        """Teach the policy which candidates of the last tree the target chose."""
        if self._limits is not None and list(text[: len(self._text)]) == self._text:
            self._expansions.teach(self._limits.growth.chances, text[len(self._text) :])
        self._expansions = Expansions()  # each counts as evidence once

    def close(self) -> None:
        """Free the context and the weights."""
        self._context.close()
        self._model.close()

    def save_to(self, folder: Path) -> None:
        """Save the cache's state to a folder from now on, and restore it from there."""
        header = read_header(self._model.path)
        identity = cache_identity(
            header, self._model, context=self._context.n_cells, rows=self._context.n_rows
        )
        self._store = StateStore(folder, repr(sorted(identity.items())))

    def save(self) -> None:
        """Write the state of the text that was drafted for last; the last tree is forgotten."""
        if self._store is not None:
            if self._changing:
                self._recover()
            self._changing = True
            last, self._branches = self._branches, _Branches()
            self.cache.commit(0, 0, last.used_paths, len(last.paths))
            self._store.keep(self.cache, self._read, tail=True)
            self._store.prune(self._read, parts=self.cache.saves_parts)
            self._changing = False

    def stop_saving(self) -> None:
        """Undo `save_to`."""
        self._store = None

    def _recall(self, text: Sequence[int]) -> None:
        """Restore as much of a long text as the saved state holds."""
        if self._store is not None and len(text) - len(self._read) > BLOCK:
            self._read[:] = text[: self._store.restore(self.cache, text)]

    def _begin(self, text: Sequence[int]) -> None:
        """Begin a new tree."""
        if self._changing:
            self._recover()
        self._changing = True
        self._expansions = Expansions()
        self._text = list(text)
        self.steps = self.rows = 0

    def _catch_up(self, text: Sequence[int], ranking: Ranking | None, count: int = 0) -> None:
        """Keep the part of the last tree that became text; what remains to be read is pending.

        Args:
            ranking: how candidates are ranked now; None reads the root in any case.
            count: how many candidates of each node are wanted.
        """
        last, self._branches = self._branches, _Branches()
        known = len(self._read)
        path = [0]
        goes_on = list(text[:known]) == self._read
        if goes_on:
            for token in text[known:]:
                child = last.children.get((path[-1], token))
                if child is None:
                    break
                path.append(child)
        # The tree begins with the last token's candidates. The token is read for its logits, unless the
        # search for the last tree has already found them.
        same = ranking is not None and ranking is self._ranking
        root = last.found.get(path[-1]) if same else None
        if root is not None and root.tokens.shape[1] < min(count, self._n_vocab):
            root = None
        if not goes_on or known + len(path) - 1 < len(text):
            root = None
        elif root is None and len(path) > 1:
            path.pop()
        self.cache.commit(last.paths.get(path[-1], 0), len(path) - 1, last.used_paths, len(last.paths))
        self._read.extend(text[known : known + len(path) - 1])
        self.root_was_known = root is not None
        if root is not None:
            self._branches.found[0] = root
        else:
            shared = common_prefix(self._read, list(text[:-1]))
            if shared < len(self._read):
                self.cache.rewind(shared)
                del self._read[self.cache.length :]
            self._recall(text[:-1])
        self._pending = list(text[len(self._read) :])

    def _expand(self, frontier: Frontier) -> Children:
        """One draft step."""
        assert self._limits is not None
        children = self._candidates(frontier, self._limits.branching)
        if self._proposals is not None:
            assert self._ranking is not None
            children = self._ranking.filtered(frontier, self._proposals.join(frontier, children))
        self._expansions.add(frontier, children)
        return children

    def _candidates(self, frontier: Frontier, count: int) -> Children:
        """The model's candidates for the nodes of a frontier."""
        assert self._ranking is not None
        found = self._branches.found
        if frontier.nodes[0] == 0 and 0 in found:
            return found[0].first(count)
        rows, logits = self._read_frontier(frontier)
        if not rows:
            return Children.none(len(frontier.nodes), count)
        positions = [len(self._read) + int(depth) for depth in frontier.depths[rows]]
        self._ranking.before_ranking(frontier, rows)
        best = self._ranking.best(logits, positions, count, frontier.tokens[rows])
        for row, place in enumerate(rows):
            found[int(frontier.nodes[place])] = best.row(row)
        if len(rows) == len(frontier.nodes):
            return best
        children = Children.none(len(frontier.nodes), best.tokens.shape[1])
        children.tokens[rows], children.logprobs[rows] = best.tokens, best.logprobs
        return children

    def _read_frontier(self, frontier: Frontier) -> tuple[list[int], FloatArray]:
        """The rows of a frontier that could be read, and their logits, valid until the next decode."""
        if frontier.nodes[0] == 0:
            self._read_pending()
            rows = [0]
        else:
            rows = self._read_nodes(frontier)
        self.steps += bool(rows)
        self.rows += len(rows)
        return rows, self._context.logits()[: len(rows), : self._n_vocab]

    def _read_pending(self) -> None:
        """Read the text up to the root, and compute the root's logits."""
        step = self._context.n_rows
        for start in range(0, len(self._pending), step):
            piece = self._pending[start : start + step]
            last = start + step >= len(self._pending)
            self.cache.append(
                Batch.run(piece, len(self._read), self.cache.open_paths, "last" if last else "none")
            )
            self._read.extend(piece)
        self._pending = []

    def _read_nodes(self, frontier: Frontier) -> list[int]:
        """Read nodes into their branches; those without a free sequence id are left out."""
        rows, paths = [], []
        for row, (node, token, parent, depth) in enumerate(
            zip(
                frontier.nodes.tolist(),
                frontier.tokens.tolist(),
                frontier.parents.tolist(),
                frontier.depths.tolist(),
                strict=True,
            )
        ):
            path = self._path_for(parent, depth)
            if path is None:
                continue
            self._branches.paths[node] = path
            self._branches.children[parent, token] = node
            rows.append(row)
            paths.append(path)
        if not rows:
            return rows
        batch = Batch(
            tokens=frontier.tokens[rows],
            positions=frontier.depths[rows] + np.int32(len(self._read) - 1),
            sequence_ids=np.array(paths, dtype=np.int32),
            offsets=np.arange(len(rows) + 1, dtype=np.int64),
            wants_logits=np.ones(len(rows), dtype=np.bool_),
        )
        self.cache.try_branches(batch)
        return rows

    def _path_for(self, parent: int, depth: int) -> int | None:
        """A sequence id whose branch ends at `parent`: the parent's own for the first child, then copies."""
        branches = self._branches
        if parent in branches.paths and parent not in branches.extended:
            branches.extended.add(parent)
            return branches.paths[parent]
        if branches.used_paths == self.cache.max_paths:
            return None
        path = branches.used_paths
        branches.used_paths += 1
        self.cache.open(path + 1)
        if parent in branches.paths:
            self.cache.fork(branches.paths[parent], path, len(self._read) + depth - 1)
        return path
