"""Log-probabilities of the tokens of an answer, from the logits that its passes computed anyway."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgespec.generation.result import TokenLogprob
from edgespec.speculation.tree import Acceptance, FloatArray, TokenTree


class Logprobs:
    """Records how likely the target found each accepted token: `RunningSequence.on_accept`.

    Args:
        top: how many of the likeliest tokens are recorded beside it.
        spell: gives the bytes of a token.
    """

    def __init__(self, top: int, spell: Callable[[int], bytes]) -> None:
        self._top = top
        self._spell = spell
        self._found: list[TokenLogprob] = []

    def __call__(self, logits: FloatArray, tree: TokenTree, accepted: Acceptance) -> None:
        chosen = [*(int(tree.tokens[node]) for node in accepted.path[1:]), accepted.bonus]
        for node, token in zip(accepted.path, chosen, strict=True):
            self._found.append(self._logprob(logits[node], token))

    def taken(self) -> list[TokenLogprob]:
        """Return what was recorded since the last call."""
        found, self._found = self._found, []
        return found

    def _logprob(self, logits: FloatArray, token: int) -> TokenLogprob:
        """The log-softmax of (n_vocab,) logits at a token, and at the likeliest ones."""
        scores = logits.astype(np.float64)
        best = scores.max()
        scores -= best + np.log(np.exp(scores - best).sum())
        top = min(self._top, len(scores))
        likeliest = np.argpartition(scores, -top)[-top:].tolist() if top else []
        likeliest.sort(key=lambda other: (-scores[other], other))  # the first of equals first, as argmax
        return TokenLogprob(
            token,
            float(scores[token]),
            self._spell(token),
            tuple(TokenLogprob(other, float(scores[other]), self._spell(other)) for other in likeliest),
        )
