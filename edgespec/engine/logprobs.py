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
            self._found.append(token_logprob(logits[node], token, self._top, self._spell))

    def taken(self) -> list[TokenLogprob]:
        """Return what was recorded since the last call."""
        found, self._found = self._found, []
        return found


def token_logprob(logits: FloatArray, token: int, top: int, spell: Callable[[int], bytes]) -> TokenLogprob:
    """The log-softmax of (n_vocab,) logits at a token, and at the `top` likeliest ones."""
    scores = logits.astype(np.float64)
    best = scores.max()
    total = best + np.log(np.exp(scores - best).sum())
    top = min(top, len(scores))
    likeliest = np.argpartition(scores, -top)[-top:].tolist() if top else []
    likeliest.sort(key=lambda other: (-scores[other], other))  # the first of equals first, as argmax
    return TokenLogprob(
        token,
        float(scores[token] - total),
        spell(token),
        tuple(TokenLogprob(other, float(scores[other] - total), spell(other)) for other in likeliest),
        is_greedy=int(logits.argmax()) == token,
    )
