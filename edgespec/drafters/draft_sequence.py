"""One sequence in a model drafter: what was read of it, and the branches of its last tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.branches import DraftBranches
from edgespec.drafters.translation import Translation
from edgespec.llama.cache.kv_cache import KVCache, common_prefix, cut, inherit
from edgespec.llama.cache.states import SavedState
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.speculation.drafters.candidates import TreeCandidates
from edgespec.speculation.growth import Children, Frontier
from edgespec.speculation.ranking import Ranking
from edgespec.speculation.tree import FloatArray

SINKS = 64  # tokens at the beginning that are kept


@dataclass(frozen=True)
class DraftWindow:
    """The part of a sequence that a drafter reads.

    The middle of a long sequence is left out. It grows in steps of half the window, so that between two steps
    the drafter's cache only grows at its end.
    """

    last: int  # most tokens at the end that are read; at least half as many are
    first: int = SINKS  # tokens at the beginning that are read

    @property
    def most(self) -> int:
        """Most tokens that are read of a sequence."""
        return self.first + self.last

    @property
    def _step(self) -> int:
        return max(self.last // 2, 1)

    def left_out(self, length: int) -> int:
        """The number of tokens behind the first ones that are left out of a sequence of `length` tokens."""
        return max(-(-(length - self.most) // self._step), 0) * self._step

    def steps_to(self, left_out: int) -> list[int]:
        """The numbers of tokens that were left out lately, the latest first, if `left_out` are now."""
        steps = [left_out, left_out - self._step, left_out - 2 * self._step]
        return [earlier for earlier in steps if earlier >= 0]

    def part(self, sequence: Sequence[int], left_out: int) -> list[int]:
        """A sequence without `left_out` tokens behind its first ones."""
        return [*sequence[: self.first], *sequence[self.first + left_out :]]

    def length_read(self, length: int) -> int:
        """The number of tokens that are read of a sequence of `length` tokens."""
        return length - self.left_out(length)


WHOLE = DraftWindow(1 << 62, first=0)
"""The window of a drafter that reads every sequence from its beginning to its end."""


class DraftSequence:
    """A sequence that trees are drafted for, and its part of the drafter's cache.

    The cache holds the sequence and, until the next tree, the branches of the last one. The branch that the
    target accepted is kept, so that nothing accepted is read twice. So is a node that was read but did not
    make it into the tree, if the target chose its token after all: the next tree then grows below it at once,
    beginning with whatever else was read below it.

    Sequences are in the drafter's own tokens, and so are the branches; candidates are the target's tokens.

    Args:
        n_vocab: tokens that are drafted; padding at the end of the vocabulary is none.
        window: what is read of long sequences.
        translation: of the nodes' tokens, if the drafter's vocabulary is another one.

    Attributes:
        cache: the keys and values of what was read.
        candidates: of the last tree's nodes; set anew when a tree begins.
        read: the tokens that were read, without the branches.
        pending: the tokens up to the root that are still to be read.
        root_was_known: whether the root was read in the search for the last tree already.
        unused: rounds since this sequence was last drafted for.
        unread: tokens skipped: the middle of the window, or for heads a missing prefix.
    """

    def __init__(
        self,
        cache: KVCache,
        n_vocab: int,
        window: DraftWindow = WHOLE,
        translation: Translation | None = None,
    ) -> None:
        self.cache = cache
        self.read: list[int] = []
        self.pending: list[int] = []
        self.root_was_known = False
        self.unused = 0
        self.unread = 0
        self._n_vocab = n_vocab
        self._window = window
        self._translation = translation
        self._branches = DraftBranches()
        self._sequence: list[int] = []
        self.candidates = TreeCandidates(())
        self._asked = 0  # candidates of each node in the last tree

    def begin(self, sequence: Sequence[int]) -> None:
        """Begin a new tree after this sequence."""
        self._move_window(self._left_out(len(sequence)))
        self._sequence = self.part(sequence)
        self.unused = 0

    def part(self, sequence: Sequence[int]) -> list[int]:
        """The tokens of a sequence that are read while as many are left out as now."""
        return self._window.part(sequence, self.unread)

    def agreement(self, sequence: Sequence[int]) -> int:
        """Tokens at the beginning of a sequence that agree with what was read, those left out included."""
        shared = common_prefix(self.read, self.part(sequence))
        return shared + self.unread if shared > self._window.first else shared

    def is_continued_by(self, sequence: Sequence[int]) -> bool:
        """True if all that was read begins a sequence."""
        return self.read == self.part(sequence)[: len(self.read)]

    def share(self, source: DraftSequence, sequence: Sequence[int]) -> None:
        """Share what another one has read of the beginning of a sequence; this one must be empty."""
        self.unread = self._left_out(len(sequence))
        wanted = self.part(sequence[:-1])
        shared = common_prefix(source.read, wanted)
        if source.unread != self.unread:
            shared = min(shared, self._window.first)
        if shared:
            inherit(self.cache, source.cache, shared)
            self.read = wanted[:shared]

    def restore(self, store: SavedState, sequence: Sequence[int]) -> None:
        """Restore as much of the sequence as a store holds, now or from before the window moved here."""
        left_out = self.unread
        for earlier in self._window.steps_to(left_out):
            if self.unread != earlier and len(self.read) > self._window.first:
                break
            self.unread = earlier
            wanted = self.part(sequence[:-1])
            self.read[:] = wanted[: store.restore(self.cache, wanted)]
        self._move_window(left_out)
        self.pending = self._sequence[len(self.read) :]

    def _left_out(self, length: int) -> int:
        """The number of tokens to leave out of a sequence of `length` tokens."""
        return self._window.left_out(length)

    def _move_window(self, left_out: int) -> None:
        """Leave out this many tokens; cells behind a gap that grows move up, if they can."""
        more = left_out - self.unread
        if not more:
            return
        self.forget_tree()
        first, read = self._window.first, self.read
        kept = read[:first]
        self.read = kept  # all that is certain until the cells are in place
        if len(read) > first + more > first and cut(self.cache, first, first + more):
            kept = read[:first] + read[first + more :]
        else:
            self.cache.rewind(len(kept))
            kept = kept[: self.cache.length]
        self.unread = left_out
        self.read = kept

    def recover(self) -> None:
        """Return to the tokens that were certainly read, and forget the last tree; the cells are in order."""
        self.cache.rewind(len(self.read))
        del self.read[self.cache.length :]
        self._branches, self.pending = DraftBranches(), []
        self._sequence, self.candidates = [], TreeCandidates(())

    def forget(self) -> None:
        """Forget everything that was read."""
        self.cache.rewind(0)
        self.read = []

    def forget_tree(self) -> None:
        """Drop the branches of the last tree from the cache."""
        last, self._branches = self._branches, DraftBranches()
        self.cache.commit(0, 0, last.used_paths, len(last))

    def keep_accepted(
        self, ranking: Ranking | None, count: int = 0, *, alone: bool = False, room: int = 0
    ) -> None:
        """Keep the path of the last tree that joined the sequence; what remains to be read is pending.

        Args:
            ranking: how candidates are ranked now; None reads the root in any case.
            count: how many candidates of each node are wanted.
            alone: no other sequence is drafted for, so that the branches below the root may be kept, too.
            room: most cells of sequence and branches.
        """
        sequence = self._sequence
        last, self._branches = self._branches, DraftBranches()
        known = len(self.read)
        extends = sequence[:known] == self.read
        path = last.walk(sequence[known:]) if extends else [0]
        # The tree begins with the last token's candidates. The token is read for its logits, unless the
        # search for the last tree has already found them.
        same = ranking is not None and ranking is self.candidates.ranking
        root = last.found.get(path[-1]) if same else None
        if root is not None and root.tokens.shape[1] < min(count, self._n_vocab):
            root = None
        if not extends or known + len(path) - 1 < len(sequence):
            root = None
        elif root is None and len(path) > 1:
            path.pop()
        if root is not None:
            self._branches = last.rerooted(path[-1])
            if not alone or self._asked != count or len(sequence) + len(self._branches) > room:
                self._branches = self._branches.root_only()
        self.cache.commit(
            last.path_of(path[-1]), len(path) - 1, last.used_paths, len(last), self._branches.held_paths
        )
        self.read.extend(sequence[known : known + len(path) - 1])
        self.root_was_known = root is not None
        self._asked = count
        if root is None:
            shared = common_prefix(self.read, sequence[:-1])
            if shared < len(self.read):
                self.cache.rewind(shared)
                del self.read[self.cache.length :]
        self.pending = sequence[len(self.read) :]

    def read_pending(self, most: int) -> None:
        """Read pending tokens until at most `most` are left, in passes of up to `most` rows."""
        while len(self.pending) > most:
            piece = self.pending[:most]
            self.cache.append(self._sequence_batch(piece, "none"))
            self._note_read(len(piece))

    def pending_batch(self) -> TokenBatch:
        """The rows that read the pending tokens, with logits for the root."""
        return self._sequence_batch(self.pending, "last")

    def _sequence_batch(self, tokens: Sequence[int], logits: str) -> TokenBatch:
        """The rows that read the next tokens of the sequence."""
        return TokenBatch.run(tokens, len(self.read), self.cache.open_paths, logits)

    def note_pending_read(self) -> None:
        """Note that `pending_batch` was decoded and its cells belong to the sequence."""
        self._note_read(len(self.pending))

    def _note_read(self, n_tokens: int) -> None:
        self.read.extend(self.pending[:n_tokens])
        self.pending = self.pending[n_tokens:]

    def known(self, frontier: Frontier) -> NDArray[np.bool_]:
        """(nodes,) whether a node's candidates are known already."""
        return self._branches.known(self._read_as(frontier))

    def _read_as(self, frontier: Frontier) -> Frontier:
        """The nodes with the tokens that the drafter reads; -1 for one that is no single token to it."""
        if self._translation is None:
            return frontier
        return replace(frontier, tokens=self._translation.single(frontier.tokens))

    def branch_batch(self, frontier: Frontier) -> tuple[list[int], TokenBatch | None]:
        """The rows that read a frontier's nodes into their branches.

        Returns:
            The indices of the nodes that are read, and the rows; nodes that were read already, those
            without a free sequence id, and those that are no single token to the drafter are left out.
        """
        frontier = self._read_as(frontier)
        rows, paths = list[int](), list[int]()
        for row, (node, parent, token, depth) in enumerate(frontier.rows()):
            if token < 0 or self._branches.number(node, parent, token) in self._branches.found:
                continue
            path = self._branches.add(node, parent, token, depth, self.cache)
            if path is not None:
                rows.append(row)
                paths.append(path)
        if not rows:
            return rows, None
        read = frontier.part(rows)
        return rows, TokenBatch(
            tokens=read.tokens,
            positions=read.depths + np.int32(len(self.read) - 1),
            sequence_ids=np.array(paths, dtype=np.int32),
            offsets=np.arange(len(paths) + 1, dtype=np.int64),
            wants_logits=np.ones(len(paths), dtype=np.bool_),
        )

    def ranked(self, frontier: Frontier, rows: list[int], logits: FloatArray) -> Children:
        """The candidates of a frontier.

        Args:
            rows: the nodes that were read.
            logits: (rows, n_vocab) after each of them.
        """
        count, found = self.candidates.branching, self._branches.found
        numbers = self._branches.numbers(self._read_as(frontier))
        best = self.candidates.ranked(frontier, rows, logits)
        for row, place in enumerate(rows):
            number = numbers[place]
            assert number is not None, "it was read"
            found[number] = best.row(row)
        if len(rows) == len(frontier.nodes):
            return best
        # Nodes that were read earlier have their candidates, and those that could not be read have none.
        parts = [
            (row, found[n].first(count)) for row, n in enumerate(numbers) if n is not None and n in found
        ]
        columns = max((part.tokens.shape[1] for _, part in parts), default=count)
        children = Children.none(len(frontier.nodes), columns)
        for row, part in parts:
            width = part.tokens.shape[1]
            children.tokens[row, :width], children.logprobs[row, :width] = part.tokens, part.logprobs
        return children

    def learn(self, sequence: Sequence[int]) -> None:
        """Teach the policy which candidates of the last tree the target chose."""
        self.candidates.learn(sequence, None if self._translation is None else self._translation.split)


@dataclass
class DraftStep:
    """The part of a draft step that concerns one sequence: which nodes are read, and their rows.

    Attributes:
        rows: which nodes of the frontier are read.
        batch: the rows that are decoded; None if there are none.
    """

    sequence: DraftSequence
    frontier: Frontier
    batch: TokenBatch | None = None

    def __post_init__(self) -> None:
        self.rows: list[int] = [0]

    @property
    def n_outputs(self) -> int:
        """Rows of the batch whose logits are computed; the nodes' are the last of them."""
        return self.batch.n_outputs if self.batch is not None else 0

    @property
    def n_nodes(self) -> int:
        """Nodes of the frontier that are read."""
        return 1 if self.reads_sequence else self.n_outputs

    @property
    def reads_sequence(self) -> bool:
        """True if this step reads the sequence up to the root, instead of nodes below it."""
        return bool(self.frontier.nodes[0] == 0)

    def prepare(self, max_pending: int) -> None:
        """Set the rows to decode; of many pending tokens only the last tokens are left to them."""
        if self.reads_sequence:
            self.sequence.read_pending(max_pending)
            self.batch = self.sequence.pending_batch()
        else:
            self.rows, self.batch = self.sequence.branch_batch(self.frontier)
