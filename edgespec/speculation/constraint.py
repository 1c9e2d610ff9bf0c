"""Constrained decoding: which tokens a grammar permits next, for the target and for drafted trees.

The target's logits are masked before it chooses, so the sequence is what plain decoding with the same mask
gives. The drafter's logits are masked too, and any other token that is not permitted is pruned from the tree,
so no row of a pass is wasted. The grammar engine is llguidance (https://github.com/guidance-ai/llguidance),
which reaches any node of the tree by rolling tokens back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import GrammarError
from edgespec.speculation.evidence import NOTHING
from edgespec.speculation.growth import Children, Frontier
from edgespec.speculation.ranking import PathRanking, Ranking
from edgespec.speculation.tree import FloatArray, IntArray, TokenTree

BoolArray = NDArray[np.bool_]

_FORCED = np.log(0.98)  # that the target spells the only permitted text with these tokens


class Matcher(Protocol):
    """A position in a grammar: the part of llguidance.LLMatcher that is used here.

    It never raises. When it hits one of its limits it enters a permanent error state, and from then on
    permits only the end of the answer.
    """

    def try_consume_tokens(self, tokens: list[int]) -> int: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def compute_logit_bias(self) -> bytes: ...
    def compute_ff_tokens(self) -> list[int]: ...
    def is_accepting(self) -> bool: ...
    def get_error(self) -> str: ...
    def deep_copy(self) -> Matcher: ...


class _Stuck(Exception):
    """The matcher cannot say which tokens may follow."""


class Constraint:
    """The grammar of one answer.

    Args:
        matcher: at the beginning of the grammar.
        start: where the answer begins in the sequence.
        ends: (n_vocab,) tokens that end an answer; permitted wherever the grammar may end.
        on_failure: called when the grammar cannot be followed any further.
    """

    def __init__(
        self,
        matcher: Matcher,
        start: int,
        ends: BoolArray,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._first = matcher
        self._matcher = matcher.deep_copy()
        self._on_failure = on_failure
        self._start = start
        self._ends = ends
        self._read: list[int] = []  # tokens that the matcher has consumed
        self._agreed = 0  # the first of these that are certain to begin `_sequence`
        self._ended = False  # whether `_sequence` has an end token
        self._known: dict[tuple[int, ...], BoolArray] = {}  # masks by path after `_sequence`
        self._forced: dict[tuple[int, ...], Sequence[int]] = {}
        self._sequence: list[int] = []

    def permitted(self, sequence: Sequence[int], path: Sequence[int] = ()) -> BoolArray:
        """(n_vocab,) whether each token may follow the sequence and a path after it.

        Nothing may follow an end token, or a path that is not itself permitted.

        Raises:
            GrammarError: the matcher cannot say what may follow the sequence, because it has hit a limit or
                permits nothing. After a path this is not an error: the sequence need not take that path.
        """
        answer = list(sequence[self._start :])
        if answer != self._sequence:
            self._move_to(answer)
        key = tuple(path)
        if key not in self._known:
            try:
                self._known[key] = self._mask(path)
            except _Stuck as stuck:
                self._matcher, self._read, self._agreed = self._first.deep_copy(), [], 0
                if not path:
                    self._on_failure()
                    raise GrammarError(
                        f"The answer cannot continue in the requested form: {stuck}.",
                        "Make the grammar or schema simpler.",
                    ) from None
                self._known[key] = np.zeros(len(self._ends), dtype=np.bool_)
        return self._known[key]

    def forced(self, sequence: Sequence[int], path: Sequence[int] = ()) -> Sequence[int]:
        """Tokens that spell the only text that may follow the sequence and a path; none if several may.

        The text is certain, its tokens are not: other ones may spell it, too.
        """
        permitted = self.permitted(sequence, path)
        key = tuple(path)
        if key not in self._forced:
            above = self._forced.get(key[:-1], ()) if key else ()
            if len(above) > 1 and above[0] == key[-1]:
                tokens = above[1:]
            else:
                tokens = self._fast_forward(path) if permitted.any() else ()
            self._forced[key] = tokens if tokens and permitted[tokens[0]] else ()
        return self._forced[key]

    def _move_to(self, answer: list[int]) -> None:
        """Continue with an answer: of one that extends the last one, only the new tokens are looked at."""
        before, forced = len(self._sequence), self._forced.get((), ())
        extends = answer[:before] == self._sequence
        new = answer[before:] if extends else answer
        # The rest of the forced text is kept when the answer takes its beginning: finding it anew takes long.
        kept = extends and 0 < len(new) < len(forced) and new == [*forced[: len(new)]]
        self._forced = {(): forced[len(new) :]} if kept else {}
        self._ended = (extends and self._ended) or any(self._ends[token] for token in new)
        self._agreed = self._agreed if extends else 0
        self._sequence, self._known = answer, {}

    def _fast_forward(self, path: Sequence[int]) -> Sequence[int]:
        try:
            whole = self._follow(path) == len(self._sequence) + len(path)
            return self._matcher.compute_ff_tokens() if whole else ()
        except _Stuck:
            return ()

    def masked(self, logits: FloatArray, tree: TokenTree, sequence: Sequence[int]) -> FloatArray:
        """(nodes, n_vocab) logits with -inf for every token that is not permitted: a copy if there are any.

        Args:
            tree: as `pruned` returned it.
        """
        result = logits
        for node in range(len(tree)):
            permitted = self.permitted(sequence, self._path(tree, node))
            # In a pruned tree only end tokens have no successor, and nobody asks what follows them.
            if permitted.any() and not permitted.all():
                result = logits.copy() if result is logits else result
                result[node, ~permitted[: result.shape[1]]] = -np.inf
        return result

    def pruned(self, tree: TokenTree, sequence: Sequence[int]) -> TokenTree:
        """The tree without nodes that are not permitted or lead nowhere, and without their subtrees."""
        parents = tree.parents.tolist()
        kept = [0]
        place = {0: 0}
        for node in range(1, len(tree)):
            parent, token = parents[node], tree.tokens[node]
            if parent not in place or not self.permitted(sequence, self._path(tree, parent))[token]:
                continue
            if self._ends[token] or self.permitted(sequence, self._path(tree, node)).any():
                place[node] = len(kept)
                kept.append(node)
        if len(kept) == len(tree):
            return tree
        above = [-1, *(place[parents[node]] for node in kept[1:])]
        return TokenTree.build(tree.tokens[kept], above, tree.logprobs[kept])

    def _path(self, tree: TokenTree, node: int) -> list[int]:
        return [int(tree.tokens[n]) for n in tree.path(node)[1:]]

    def _mask(self, path: Sequence[int]) -> BoolArray:
        if self._ended or any(self._ends[token] for token in path):
            return np.zeros(len(self._ends), dtype=np.bool_)
        taken = self._follow(path)
        mask = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8)[: len(self._ends)] != 0
        if self._matcher.get_error():
            raise _Stuck(self._reason())
        if taken < len(self._sequence) + len(path):
            if taken < len(self._sequence):
                raise _Stuck("it has already left that form")
            return np.zeros(len(self._ends), dtype=np.bool_)
        accepting = self._matcher.is_accepting()
        mask = np.where(self._ends, accepting, mask)
        if not mask.any():
            raise _Stuck("the grammar permits none of this model's tokens here")
        return mask

    def _follow(self, path: Sequence[int]) -> int:
        """Move the matcher to the end of a path, or as far as it is permitted.

        Returns:
            How many tokens of the sequence and the path are permitted.
        """
        tokens = [*self._sequence[self._agreed :], *path]
        alike = 0
        for a, b in zip(tokens, self._read[self._agreed :], strict=False):
            if a != b:
                break
            alike += 1
        shared = self._agreed + alike
        if shared < len(self._read) and not self._matcher.rollback(len(self._read) - shared):
            raise _Stuck(self._reason())
        more = self._matcher.try_consume_tokens(tokens[alike:])
        self._read[shared:] = tokens[alike : alike + more]
        self._agreed = min(len(self._read), len(self._sequence))
        return len(self._read)

    def _reason(self) -> str:
        lines = self._matcher.get_error().strip().splitlines()
        return lines[0].rstrip(".") if lines else "the grammar engine has failed"


class ConstrainedRanking(PathRanking):
    """Ranks only the permitted ones among a drafter's candidates."""

    def __init__(self, ranking: Ranking, constraint: Constraint) -> None:
        super().__init__(ranking)
        self._constraint = constraint
        self._permitted: BoolArray | None = None  # what may follow each row that is ranked next

    def about_to_rank(self, paths: Sequence[tuple[int, ...]]) -> None:
        self._permitted = self._after(paths) if paths else None

    def best(
        self, logits: FloatArray, positions: list[int], count: int, after: IntArray | None = None
    ) -> Children:
        assert self._permitted is not None, "the nodes of the rows were not announced"
        permitted, self._permitted = self._permitted[:, : logits.shape[1]], None
        if permitted.all():
            return self.ranking.best(logits, positions, count, after)
        # After an end token nothing is permitted, but a row of nothing but -inf could not be ranked.
        ruled_out = ~permitted & permitted.any(axis=1, keepdims=True)
        logits = np.where(ruled_out, np.float32(-np.inf), logits)
        return _only(self.ranking.best(logits, positions, count, after), permitted)

    def filtered(self, frontier: Frontier, children: Children, start: int) -> Children:
        children = super().filtered(frontier, children, start)
        paths = self.paths(frontier)
        permitted = self._after(paths)
        forced = [next(iter(self._constraint.forced(self.sequence, path)), None) for path in paths]
        return _with_forced(_only(children, permitted), forced)

    def _after(self, paths: Sequence[tuple[int, ...]]) -> BoolArray:
        """(paths, n_vocab) what may follow each path."""
        return np.stack([self._constraint.permitted(self.sequence, path) for path in paths])


def _with_forced(children: Children, forced: Sequence[int | None]) -> Children:
    """The candidates, with the forced token of each node that no model was asked for."""
    exists = np.array([token is not None for token in forced])
    new = exists & ~np.isfinite(children.logprobs).any(axis=1)
    if not new.any():
        return children
    tokens = np.array([token or 0 for token in forced], dtype=np.int32)
    repeated = (children.tokens == tokens[:, None]) & new[:, None]
    width = len(forced)
    logprobs = np.where(new, np.float32(_FORCED), np.float32(-np.inf))[:, None]
    evidence, noise = children.evidence, children.noise
    if evidence is not None:
        nothing = np.full((width, 1, evidence.shape[2]), NOTHING, dtype=np.int8)
        evidence = np.where(repeated[..., None], np.int8(NOTHING), evidence)
        evidence = np.concatenate([evidence, nothing], axis=1)
    if noise is not None:
        noise = np.concatenate([noise, np.zeros((width, 1), dtype=np.float32)], axis=1)
    return Children(
        np.concatenate([children.tokens, tokens[:, None]], axis=1),
        np.concatenate([children.logprobs, logprobs], axis=1),
        evidence,
        noise,
        np.where(new, tokens, -1).astype(np.int32),
    )


def _only(children: Children, permitted: BoolArray) -> Children:
    """The candidates that are permitted below each node."""
    ruled_out = ~np.take_along_axis(permitted, children.tokens, axis=1)
    evidence = children.evidence
    return Children(
        children.tokens,
        np.where(ruled_out, np.float32(-np.inf), children.logprobs),
        None if evidence is None else np.where(ruled_out[..., None], np.int8(NOTHING), evidence),
        children.noise,
    )
