"""Log-probabilities of the tokens of prompts and answers, from the logits that passes computed anyway."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from edgespec.generation.result import TokenLogprob
from edgespec.llama.cache.kv_cache import common_prefix
from edgespec.speculation.top import top as top_of
from edgespec.speculation.tree import Acceptance, FloatArray, TokenTree


class Logprobs:
    """Records how likely the target found each accepted token: `Answer.on_accept`.

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


class PromptScores:
    """The log-probabilities of a prompt's tokens, as far as they are known.

    The logits of a row give the probability of the token after it. So a sequence may share cells with another
    one only as far as the log-probabilities that these cells' rows gave are known, too.

    Args:
        tokens: the prompt.
        first: position of the first token whose log-probability is wanted.
        top: how many of the likeliest tokens are recorded beside each.
        spell: gives the bytes of a token.

    Attributes:
        tokens, first, top: as given.
    """

    def __init__(self, tokens: Sequence[int], first: int, top: int, spell: Callable[[int], bytes]) -> None:
        self.tokens = list(tokens)
        self.first = first
        self.top = top
        self._spell = spell
        self._found: dict[int, TokenLogprob] = {}
        self._next = max(first, 1)  # everything that is wanted before this position is known

    @property
    def values(self) -> list[TokenLogprob | None]:
        """The log-probability of each token from the first wanted one on.

        None stands for one that is not known, and for the first token of the prompt, which follows nothing.
        """
        return [self._found.get(position) for position in range(self.first, len(self.tokens))]

    @property
    def is_complete(self) -> bool:
        """True if all that are wanted are known."""
        return self.covered == len(self.tokens) - 1

    @property
    def covered(self) -> int:
        """Tokens at the beginning of the prompt that need not be read for the sake of their logits."""
        while self._next in self._found:
            self._next += 1
        return self._next - 1

    def rows(self, start: int, end: int) -> range:
        """The rows whose logits are wanted, of those that read the tokens start .. end - 1."""
        start = max(start, self.covered)
        return range(start, max(min(end, len(self.tokens) - 1), start))

    def add(self, row: int, logits: FloatArray) -> None:
        """Take the logits (rows, n_vocab) of consecutive rows, beginning with row `row`."""
        for position, values in enumerate(logits, start=row + 1):
            self._found[position] = token_logprob(values, self.tokens[position], self.top, self._spell)

    def shareable(self, other: PromptScores | None, cells: int) -> int:
        """The number of the `cells` tokens that another sequence holds which need not be read again."""
        if other is None or other.top < self.top or cells <= self.covered:
            return min(cells, self.covered)
        same = common_prefix(other.tokens, self.tokens)
        position = self.covered + 1
        while position < same and position in other._found:
            position += 1
        return min(cells, position - 1)

    def inherit(self, other: PromptScores | None, cells: int) -> None:
        """Take over the log-probabilities that the rows of shared cells gave."""
        if other is not None:
            for position in range(self.covered + 1, cells + 1):
                self._found[position] = other._found[position].cut(self.top)

    def will_share(self, other: PromptScores | None, prefix: int) -> int:
        """The tokens of a common prefix to share with another sequence once that sequence has read them."""
        if other is None or other.top < self.top or other.first > self.covered + 1:
            return min(prefix, self.covered)
        return max(prefix - 1, min(prefix, self.covered))


def token_logprob(logits: FloatArray, token: int, top: int, spell: Callable[[int], bytes]) -> TokenLogprob:
    """The log-softmax of (n_vocab,) logits at a token, and at the `top` likeliest ones."""
    best = logits.max()
    # Exponentials in single precision take a tenth of the time; their errors cancel out in the sum.
    total = float(best) + math.log(np.exp(logits - best).sum(dtype=np.float64))
    likeliest = top_of(logits[None], top)[1][0].tolist() if top else []
    return TokenLogprob(
        token,
        float(logits[token]) - total,
        spell(token),
        tuple(TokenLogprob(other, float(logits[other]) - total, spell(other)) for other in likeliest),
        is_greedy=int(logits.argmax()) == token,
    )
