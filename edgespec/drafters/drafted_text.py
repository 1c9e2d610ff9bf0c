"""One text in a model drafter: what was read of it, and the branches of its last tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.models.llama.cache.text_cache import TextCache, common_prefix
from edgespec.models.llama.runtime.batch import Batch
from edgespec.speculation.drafters.base import ProposedBy
from edgespec.speculation.drafters.expansions import Expansions
from edgespec.speculation.growth import Children, Frontier, TreeLimits
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.sources.base import JoinedProposals
from edgespec.speculation.tree import FloatArray, TokenTree


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


class DraftedText:
    """A text that trees are drafted for, and its part of the drafter's cache.

    The cache holds the text and, until the next tree, the branches of the last one. The branch that the
    target accepted is kept, so that nothing accepted is read twice. So is a node that was read but did not
    make it into the tree, if the target chose its token after all: the next tree then grows below it at once.

    Args:
        n_vocab: tokens that are drafted; padding at the end of the vocabulary is none.

    Attributes:
        cache: the keys and values of what was read.
        read: the tokens that were read, without the branches.
        pending: the tokens up to the root that are still to be read.
        root_was_known: whether the root was read in the search for the last tree already.
        unused: rounds since this text was last drafted for.
        unread: tokens at the beginning of the text that are not read at all; 0 for models.
    """

    def __init__(self, cache: TextCache, n_vocab: int) -> None:
        self.cache = cache
        self.read: list[int] = []
        self.pending: list[int] = []
        self.root_was_known = False
        self.unused = 0
        self.unread = 0
        self._n_vocab = n_vocab
        self._branches = _Branches()
        self._expansions = Expansions()
        self._text: list[int] = []
        self._limits: TreeLimits | None = None
        self._ranking: Ranking | None = None
        self._proposals: JoinedProposals | None = None

    def begin(self, text: Sequence[int]) -> None:
        """Begin a new tree after this text."""
        self._expansions = Expansions()
        self._text = list(text[self.unread :])
        self.unused = 0

    def recover(self) -> None:
        """Return to the text that was certainly read, and forget the last tree; the cells are in order."""
        self.cache.rewind(len(self.read))
        del self.read[self.cache.length :]
        self._branches, self.pending = _Branches(), []
        self._expansions, self._text, self._limits, self._ranking = Expansions(), [], None, None

    def forget(self) -> None:
        """Forget everything that was read."""
        self.cache.rewind(0)
        self.read = []

    def forget_tree(self) -> None:
        """Drop the branches of the last tree from the cache."""
        last, self._branches = self._branches, _Branches()
        self.cache.commit(0, 0, last.used_paths, len(last.paths))

    def take_up(
        self, limits: TreeLimits | None, ranking: Ranking | None, proposals: JoinedProposals | None
    ) -> None:
        """Set what the candidates of the new tree depend on; None if tokens are drawn instead."""
        self._limits, self._ranking, self._proposals = limits, ranking, proposals

    def keep_accepted(self, ranking: Ranking | None, count: int = 0) -> None:
        """Keep the part of the last tree that became text; what remains to be read is pending.

        Args:
            ranking: how candidates are ranked now; None reads the root in any case.
            count: how many candidates of each node are wanted.
        """
        text = self._text
        last, self._branches = self._branches, _Branches()
        known = len(self.read)
        path = [0]
        goes_on = text[:known] == self.read
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
        self.read.extend(text[known : known + len(path) - 1])
        self.root_was_known = root is not None
        if root is not None:
            self._branches.found[0] = root
        else:
            shared = common_prefix(self.read, text[:-1])
            if shared < len(self.read):
                self.cache.rewind(shared)
                del self.read[self.cache.length :]
        self.pending = text[len(self.read) :]

    def read_pending(self, most: int) -> None:
        """Read pending tokens until at most `most` are left, in passes of up to `most` rows."""
        while len(self.pending) > most:
            piece = self.pending[:most]
            self.cache.append(self._text_batch(piece, "none"))
            self._note_read(len(piece))

    def pending_batch(self) -> Batch:
        """The rows that read the pending tokens, with logits for the root."""
        return self._text_batch(self.pending, "last")

    def _text_batch(self, tokens: Sequence[int], logits: str) -> Batch:
        """The rows that read the next tokens of the text."""
        return Batch.run(tokens, len(self.read), self.cache.open_paths, logits)

    def note_pending_read(self) -> None:
        """Note that `pending_batch` was decoded and its cells belong to the text."""
        self._note_read(len(self.pending))

    def _note_read(self, n_tokens: int) -> None:
        self.read.extend(self.pending[:n_tokens])
        self.pending = self.pending[n_tokens:]

    def known_root(self, frontier: Frontier) -> Children | None:
        """The candidates of a frontier that is only the root, if they are known already."""
        assert self._limits is not None
        if frontier.nodes[0] == 0 and 0 in self._branches.found:
            return self._branches.found[0].first(self._limits.branching)
        return None

    def branch_batch(self, frontier: Frontier) -> tuple[list[int], Batch | None]:
        """The rows that read a frontier's nodes into their branches.

        Returns:
            The indices of the nodes that are read, and their rows; nodes without a free sequence id are left
            out.
        """
        rows, paths = [], []
        steps = zip(
            frontier.nodes.tolist(),
            frontier.tokens.tolist(),
            frontier.parents.tolist(),
            frontier.depths.tolist(),
            strict=True,
        )
        for row, (node, token, parent, depth) in enumerate(steps):
            path = self._path_for(parent, depth)
            if path is None:
                continue
            self._branches.paths[node] = path
            self._branches.children[parent, token] = node
            rows.append(row)
            paths.append(path)
        if not rows:
            return rows, None
        return rows, Batch(
            tokens=frontier.tokens[rows],
            positions=frontier.depths[rows] + np.int32(len(self.read) - 1),
            sequence_ids=np.array(paths, dtype=np.int32),
            offsets=np.arange(len(rows) + 1, dtype=np.int64),
            wants_logits=np.ones(len(rows), dtype=np.bool_),
        )

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
            self.cache.fork(branches.paths[parent], path, len(self.read) + depth - 1)
        return path

    def ranked(self, frontier: Frontier, rows: list[int], logits: FloatArray) -> Children:
        """The candidates of a frontier.

        Args:
            rows: the nodes that were read.
            logits: (rows, n_vocab) after each of them.
        """
        assert self._limits is not None
        assert self._ranking is not None
        count = self._limits.branching
        if not rows:
            return Children.none(len(frontier.nodes), count)
        start = self.unread + len(self.read)
        positions = [start + int(depth) for depth in frontier.depths[rows]]
        self._ranking.before_ranking(frontier, rows)
        best = self._ranking.best(logits, positions, count, frontier.tokens[rows])
        for row, place in enumerate(rows):
            self._branches.found[int(frontier.nodes[place])] = best.row(row)
        if len(rows) == len(frontier.nodes):
            return best
        children = Children.none(len(frontier.nodes), best.tokens.shape[1])
        children.tokens[rows], children.logprobs[rows] = best.tokens, best.logprobs
        return children

    def joined(self, frontier: Frontier, children: Children) -> Children:
        """The model's candidates, joined by those of the proposers; kept until the target has decided."""
        if self._proposals is not None:
            assert self._ranking is not None
            children = self._proposals.join(frontier, children)
            children = self._ranking.filtered(frontier, children, self.unread + len(self._text))
        self._expansions.add(frontier, children)
        return children

    def proposed_by(self, tree: TokenTree) -> list[ProposedBy]:
        """Who proposed each node of the last tree."""
        return self._expansions.proposed_by(tree)

    def learn(self, text: Sequence[int]) -> None:
        """Teach the policy which candidates of the last tree the target chose."""
        end = self.unread + len(self._text)
        if self._limits is not None and list(text[self.unread : end]) == self._text:
            self._expansions.teach(self._limits.growth.chances, text[end:])
        self._expansions = Expansions()  # each counts as evidence once
