"""Rows that a head has read: always the text's, each token with the feature of the token before it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgespec.heads.head_sequence import HeadSequence
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.speculation.growth import Frontier
from edgespec.speculation.tree import FloatArray

N_VOCAB, ROWS = 5, 3


def feature(text: Sequence[int], position: int) -> float:
    """A feature of a token, which depends on all of the text up to it."""
    digest = hashlib.blake2b(bytes(text[: position + 1]), digest_size=3).digest()
    return float(int.from_bytes(digest, "little"))


@dataclass
class Cells:
    """A cache that remembers what was read: the token and the feature of each row."""

    rows: list[tuple[int, float]] = field(default_factory=list)
    branches: list[tuple[int, float]] = field(default_factory=list)
    open_paths: int = 1
    max_paths: int = 4

    @property
    def length(self) -> int:
        return len(self.rows)

    def open(self, paths: int) -> None:
        self.open_paths = max(self.open_paths, paths)

    def append(self, batch: TokenBatch, rows: int = 0) -> None:
        assert batch.features is not None
        assert len(batch.features) == len(batch.tokens) <= ROWS
        assert batch.positions.tolist() == list(range(len(self.rows), len(self.rows) + len(batch)))
        assert batch.wants_logits.all() or not batch.wants_logits.any()
        self.rows += zip(batch.tokens.tolist(), batch.features[:, 0].tolist(), strict=True)

    def commit(self, path: int, n_tokens: int, used_paths: int, n_rows: int) -> None:
        assert (path, n_tokens) == (0, 0), "no drafted row is kept"

    def rewind(self, length: int) -> None:
        del self.rows[length:]

    def fork(self, path: int, new_path: int, length: int) -> None:
        pass


class Follower:
    """A head's text that follows a target's; `check` says whether it has kept up."""

    def __init__(self) -> None:
        self.cells = Cells()
        self.text = HeadSequence(self.cells, N_VOCAB, 1)  # type: ignore[arg-type]
        self.target: list[int] = []
        self.stale = 0

    def show(self, start: int, tokens: Sequence[int]) -> None:
        """The target has read tokens from `start` on."""
        self.target = [*self.target[:start], *tokens]
        hidden = [[feature(self.target, p)] for p in range(start, len(self.target))]
        self.text.add_features(self.target, start, np.array(hidden, dtype=np.float32))

    def draft(self, root: int) -> None:
        """Read all but the tree, and a branch of it."""
        text = [*self.target, root]
        self.text.begin(text)
        self.text.keep_accepted(None)
        self.text.read_pending(ROWS)
        batch = self.text.pending_batch()
        assert len(batch) > 0, "the root is read in any case"
        self.cells.append(batch)
        self.text.note_pending_read()
        self.text.keep_features(_frontier([0], [root], [-1], 0), [0], _floats([7]))
        rows, below = self.text.branch_batch(_frontier([1, 2], [3, 4], [0, 0], 1))
        assert rows == [0, 1]
        assert below is not None
        assert below.features is not None
        assert below.features.tolist() == [[7], [7]], "children take the feature of their parent"
        assert below.positions.tolist() == [len(self.cells.rows)] * 2
        self.check(text)

    def check(self, text: Sequence[int]) -> None:
        assert [token for token, _ in self.cells.rows] == self.text.read or self.stale
        assert self.text.read == list(text[self.text.unread :])
        wanted = [
            (token, feature(text, self.text.unread - 1 + row)) for row, token in enumerate(self.text.read)
        ]
        wrong = [row for row, pair in enumerate(self.cells.rows) if pair != wanted[row]]
        assert len(wrong) <= self.stale
        # Even there, the feature is the right one.
        assert all(self.cells.rows[row][1] == wanted[row][1] for row in wrong)


def _frontier(nodes: list[int], tokens: list[int], parents: list[int], depth: int) -> Frontier:
    arrays = (np.array(values, dtype=np.int32) for values in (nodes, tokens, parents, [depth] * len(nodes)))
    return Frontier(*arrays)


def _floats(values: list[float]) -> FloatArray:
    return np.array(values, dtype=np.float32)[:, None]


TOKENS = st.integers(0, N_VOCAB - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.floats(0, 1), st.lists(TOKENS, min_size=1, max_size=9)),
        st.tuples(st.just("restore"), st.floats(0, 1), st.lists(TOKENS, min_size=2, max_size=9)),
        st.tuples(st.just("draft"), st.floats(0, 1), st.lists(TOKENS, min_size=1, max_size=1)),
        st.tuples(st.just("go on"), st.floats(0, 1), st.lists(TOKENS, min_size=1, max_size=9)),
        st.tuples(st.just("read ahead"), st.floats(0, 1), st.lists(TOKENS, max_size=1)),
    ),
    max_size=24,
)


@given(STEPS)
def test_what_was_read_is_the_text(steps: list[tuple[str, float, list[int]]]) -> None:
    follower = Follower()
    for kind, where, tokens in steps:
        length = len(follower.target)
        if kind == "read":  # from somewhere in the text
            follower.stale += 1
            follower.show(round(where * length), tokens)
        elif kind == "go on":
            follower.show(length, tokens)
        elif kind == "restore":  # the first of these tokens come from disk
            follower.stale += 1
            follower.target = [*follower.target[: round(where * length)], *tokens[:-1]]
            follower.show(len(follower.target), tokens[-1:])
        elif kind == "read ahead" and follower.text.n_rows:
            follower.text.prepare_reading()
            follower.text.read_pending(ROWS)
            follower.text.pending = []
        elif kind == "draft" and follower.text.n_rows and follower.text.known_sequence == follower.target:
            follower.draft(tokens[0])


def test_accepted_rows_are_read_again_with_their_true_features() -> None:
    follower = Follower()
    follower.show(0, [1, 2, 3, 4])
    follower.draft(0)
    assert [token for token, _ in follower.cells.rows] == [2, 3, 4, 0]
    follower.show(4, [0, 3])  # the root, and a drafted token that was accepted
    follower.draft(2)
    assert [token for token, _ in follower.cells.rows] == [2, 3, 4, 0, 3, 2]
    follower.draft(1)  # nothing was accepted, and another token follows
    assert follower.stale == 0


def test_a_text_whose_beginning_is_unknown_is_counted_from_there() -> None:
    follower = Follower()
    follower.target = [1, 2, 3]
    follower.show(3, [4, 0])
    follower.draft(2)
    assert follower.text.unread == 4
    assert follower.cells.rows == [(0, feature([1, 2, 3, 4], 3)), (2, feature([1, 2, 3, 4, 0], 4))]


def test_what_is_half_done_is_forgotten() -> None:
    follower = Follower()
    follower.show(0, [1, 2, 3, 4])
    follower.draft(0)
    follower.text.recover()
    assert follower.text.n_rows == 4, "everything is in order"
    follower.text.known_sequence = [1, 2, 3, 4, 0]  # as if interrupted before the features were set
    follower.text.recover()
    assert (follower.text.n_rows, follower.text.read, follower.cells.rows) == (0, [], [])
