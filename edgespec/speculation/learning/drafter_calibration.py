"""Corrections for a pair of models: how the target's logits differ from the drafter's.

Three things, all fitted online by maximizing the likelihood of the target's choices:

- the *disagreement*, the scale of the difference in nats. If the target's logits are the drafter's plus
  independent Gumbel errors of this scale, a greedy target chooses each candidate with the softmax of
  logit / scale, and one that samples with shared noise chooses with the softmax of
  (logit + temperature x noise) / scale. One number therefore serves every temperature;
- a *bias* for each token: what this drafter proposes too often or too rarely for this target;
- the same for each token after each other token, in a hashed table.

Where a token has its number in these tables follows from a secret, so that a reader of the tables alone
cannot tell what was written. Without that, half of the pairs of tokens in a single answer could be read out
of them.

This corrects what a drafter gets wrong repeatedly, without changing the drafter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.speculation.growth import Children
from edgespec.speculation.learning.tables import Table, TableStore
from edgespec.speculation.tree import IntArray

_CELLS = 1 << 18

# Prior standard deviations of the biases, in units of the disagreement.
_SPREAD_OF_TOKENS = 0.5
_SPREAD_AFTER_TOKENS = 1.2
_MAX_BIAS = 10.0

_USUAL_NATS, _LEAST_NATS, _MAX_NATS = 0.65, 0.1, 5.0
_FIRST_INFORMATION = 20.0
_FADE = 1 - 1 / 2000


class DrafterCalibration:
    """A target and its drafter.

    Attributes:
        nats: the disagreement.
    """

    def __init__(self, store: TableStore | None = None, nats: float = _USUAL_NATS) -> None:
        self.nats = nats
        self._store = store or TableStore()
        self._information = _FIRST_INFORMATION
        self._cells = _TokenHash(self._store.secret)
        known = self._store.get("disagreement", (2,))
        if known is not None and _LEAST_NATS <= known[0] <= _MAX_NATS:
            self.nats = float(known[0])
            self._information = max(float(known[1]), _FIRST_INFORMATION)
        self._of_token = _Biases(self._store, "bias of token", _SPREAD_OF_TOKENS)
        self._after_token = _Biases(self._store, "bias after token", _SPREAD_AFTER_TOKENS)
        self._changed = False

    def children(self, tokens: IntArray, values: Table, after: IntArray, count: int) -> Children:
        """The `count` best of the drafter's candidates, with the probabilities that the target chooses them.

        Args:
            tokens: (rows, candidates) token ids.
            values: (rows, candidates) the drafter's logits plus the noise of the position.
            after: (rows,) the token that each row's candidates follow.
        """
        scores = values + self._of_token.nats[self._cells.of_tokens(tokens)]
        scores += self._after_token.nats[self._cells.of_pairs(tokens, after[:, None])]
        scores /= self.nats
        scores -= scores.max(axis=1, keepdims=True)
        logprobs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        order = np.argsort(-logprobs, axis=1, kind="stable")[:, :count]
        return Children(
            np.take_along_axis(tokens, order, axis=1).astype(np.int32),
            np.take_along_axis(logprobs, order, axis=1).astype(np.float32),
        )

    def learn(self, children: Children, after: int, token: int) -> None:
        """Learn from the target's choice.

        Args:
            children: the candidates of one node, as `children` returned them.
            after: the node's token.
            token: the target's choice; it need not be a candidate.
        """
        listed = np.isfinite(children.logprobs[0])
        if not listed.any():
            return
        self._changed = True
        tokens = children.tokens[:1, listed]
        logprobs = children.logprobs[0, listed].astype(np.float64)
        chances = np.exp(logprobs)
        taken = tokens[0] == token
        if taken.any():
            self._fit_nats(logprobs, chances / chances.sum(), taken)
        else:
            tokens = np.append(tokens, [[token]], axis=1)
            chances, taken = np.append(chances, 0.0), np.append(taken, True)
        of_pairs = self._cells.of_pairs(tokens[0], np.array(after))
        self._of_token.learn(self._cells.of_tokens(tokens[0]), taken - chances, chances, self.nats)
        self._after_token.learn(of_pairs, taken - chances, chances, self.nats)

    def flush(self) -> None:
        """Hand what was learned to the store, if anything is new."""
        if self._changed:
            self._store.put("disagreement", np.array([self.nats, self._information]))
            self._of_token.flush()
            self._after_token.flush()
            self._changed = False

    def _fit_nats(self, logprobs: Table, chances: Table, taken: NDArray[np.bool_]) -> None:
        """A natural-gradient step on 1 / nats.

        Restricted to the listed candidates, the choice is again a softmax with the same scale, so the other
        tokens are not needed.
        """
        # In units of the current 1 / nats: logprobs are logits / nats, up to a constant.
        mean = float((chances * logprobs).sum())
        spread = float((chances * logprobs**2).sum()) - mean**2
        self._information = _FADE * self._information + spread
        step = np.clip((float(logprobs[taken].sum()) - mean) / self._information, -0.2, 0.2)
        self.nats = float(np.clip(self.nats / (1 + step), _LEAST_NATS, _MAX_NATS))


class _Biases:
    """Biases by cell: a Gaussian each, updated by every choice.

    Attributes:
        nats: (cells,) what is added to the logits.
    """

    def __init__(self, store: TableStore, name: str, spread: float) -> None:
        self._store = store
        self._name = name
        self._spread = spread
        known = store.get(name, (2, _CELLS))
        self._table = (
            np.zeros((2, _CELLS), dtype=np.float32) if known is None else known.astype(np.float32, copy=False)
        )
        self.nats, self._information = self._table
        if known is not None:
            np.clip(self.nats, -_MAX_BIAS, _MAX_BIAS, out=self.nats)
            np.clip(self._information, 0, None, out=self._information)

    def learn(self, cells: IntArray, missed: Table, chances: Table, disagreement: float) -> None:
        """A natural-gradient step, which is longer the less is known about a cell."""
        self._information[cells] += chances * (1 - chances) / disagreement**2
        weight = self._information[cells] + (self._spread * disagreement) ** -2
        self.nats[cells] = np.clip(self.nats[cells] + missed / disagreement / weight, -_MAX_BIAS, _MAX_BIAS)

    def flush(self) -> None:
        """Hand the biases to the store."""
        self._store.put(self._name, self._table)


class _TokenHash:
    """The cells of tokens, and of pairs of tokens: tabulation hashing (Zobrist 1970).

    Args:
        secret: the random tables follow from it.
    """

    def __init__(self, secret: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=secret))
        self._of_token = rng.permutation(np.arange(_CELLS, dtype=np.int32))  # each has one of its own
        self._of_second, self._of_first = rng.integers(0, _CELLS, (2, _CELLS), dtype=np.int32)

    def of_tokens(self, tokens: IntArray) -> IntArray:
        cells: IntArray = self._of_token[tokens % _CELLS]
        return cells

    def of_pairs(self, tokens: IntArray, after: IntArray) -> IntArray:
        """The cells of tokens after other tokens."""
        cells: IntArray = self._of_second[tokens % _CELLS] ^ self._of_first[after % _CELLS]
        return cells
