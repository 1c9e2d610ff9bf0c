"""Between a target's tokens and those of a drafter with another vocabulary, by the bytes of their texts.

The drafter reads every token of the target as the token with the same bytes, or as several where it has none.
It drafts the tokens that both have: the probabilities of the others are left out, and these scaled up
("token-level intersection", Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies"). So everything outside the drafter's cache is in the target's
tokens: trees, noise, what is learned, and the candidates of other sources.

Some texts that are several tokens to the drafter, such as a bracket and the end of a line, are one to the
target. Where the tokens along a path are such a text, the finished tree has the target's token instead.
Trees of tokens that were drawn at random are left as they are, with the probabilities that these had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgespec.llama.tokenizer.vocabulary import Vocabulary
from edgespec.speculation.tree import FloatArray, IntArray, TokenTree

_MAX_JOINED = 4  # tokens of a path that may become one
_MAX_KNOWN = 1 << 16  # joined paths that are remembered


class Translation:
    """Translates the target's tokens for a drafter, and the drafter's logits and trees for the target.

    Tokens are translated one by one, so a sequence that grows stays the same at its beginning.

    Attributes:
        n_target: tokens of the target.
        n_shared: tokens that both have.
    """

    def __init__(self, target: Vocabulary, own: Vocabulary) -> None:
        self._target = target
        self._vocabulary = own
        self.n_target = target.n_tokens
        spelled, known = _by_bytes(target), _by_bytes(own)
        pairs = {token: known[text] for text, token in spelled.items() if text in known}
        end = own.eot if own.eot >= 0 else own.eos
        if target.eos >= 0 and end >= 0:
            pairs.setdefault(target.eos, end)  # spelled differently, and the same
        self.n_shared = len(pairs)
        self._shared = np.array(sorted(pairs), dtype=np.int32)
        self._shared_own = np.array([pairs[token] for token in sorted(pairs)], dtype=np.int32)
        self._single = np.full(self.n_target, -1, dtype=np.int32)
        self._single[self._shared] = self._shared_own
        self._back = np.full(own.n_tokens, -1, dtype=np.int32)
        self._back[self._shared_own] = self._shared
        self._bytes = {text[0]: token for text, token in known.items() if len(text) == 1}
        self._read_as: dict[int, tuple[int, ...]] = {token: (mine,) for token, mine in pairs.items()}
        self._joined: dict[tuple[int, ...], int] = {}
        self._begin = [own.bos] if own.adds_bos and own.bos >= 0 else []
        self._logits = np.empty((0, self.n_target), dtype=np.float32)

    def read(self, sequence: Sequence[int]) -> list[int]:
        """The tokens that the drafter reads for a sequence of the target's; there is always one."""
        if self._target.adds_bos and len(sequence) > 1 and sequence[0] == self._target.bos:
            sequence = sequence[1:]
        known = self._read_as
        for token in set(sequence).difference(known):
            known[token] = self._spelled(token)
        return [*self._begin, *(mine for token in sequence for mine in known[token])]

    def parts(self, token: int) -> tuple[int, ...]:
        """The tokens that the drafter reads for one of the target's within a sequence."""
        if token not in self._read_as:
            self._read_as[token] = self._spelled(token)
        return self._read_as[token]

    def single(self, tokens: IntArray) -> IntArray:
        """The drafter's token for each of the target's; -1 where it has none with the same bytes."""
        return self._single[tokens]

    def logits(self, logits: FloatArray) -> FloatArray:
        """(rows, n_target) the drafter's logits of the target's tokens, valid until the next call.

        Args:
            logits: (rows, tokens of the drafter).
        """
        if len(self._logits) < len(logits):
            self._logits = np.empty((len(logits), self.n_target), dtype=np.float32)
        translated = self._logits[: len(logits)]
        translated.fill(-np.inf)
        for row, values in zip(translated, logits, strict=True):
            row[self._shared] = values[self._shared_own]
        return translated

    def split(self, tokens: Sequence[int]) -> list[int]:
        """The target's tokens as paths have them before they are joined."""
        found = list[int]()
        for token in tokens:
            parts = self._back[list(self.parts(token))].tolist()
            found += parts if min(parts) >= 0 else [token]
        return found

    def joined(self, tree: TokenTree) -> TokenTree:
        """The tree with one token for each part of a path that is one token to the target.

        A node that another one was joined with keeps the rest of its probability. It keeps its place unless
        that is less than the worst node has.
        """
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        chances = np.exp(tree.logprobs.astype(np.float64)).tolist()
        rests: set[int] = set()
        for node in range(1, len(tokens)):
            path, above = [node], parents[node]
            last: tuple[int, list[int]] | None = None
            while above > 0 and len(path) < _MAX_JOINED:
                path.append(above)
                one = self._one(tuple(tokens[step] for step in reversed(path)))
                if one >= 0:
                    last = one, path[1:]
                above = parents[above]
            if last is not None:
                tokens[node], over = last
                parents[node] = parents[over[-1]]
                for step in over:
                    chances[step] -= chances[node]
                rests.update(over)
        if not rests:
            return tree
        worst = math.exp(float(tree.logprobs.min()))
        n_below = [0] * len(tokens)
        gone = set[int]()
        for node in range(len(tokens) - 1, 0, -1):
            if node in rests and not n_below[node] and chances[node] < worst:
                gone.add(node)
                continue
            n_below[parents[node]] += 1
            chances[node] = max(chances[node], worst)
            chances[parents[node]] = max(chances[parents[node]], chances[node])
        kept = [node for node in range(len(tokens)) if node not in gone]
        places = {-1: -1} | {node: place for place, node in enumerate(kept)}
        return TokenTree.build(
            [tokens[node] for node in kept],
            [places[parents[node]] for node in kept],
            np.log([chances[node] for node in kept]),
        ).merged()

    def _one(self, path: tuple[int, ...]) -> int:
        """The target's only token for the text of several; -1 if there is none."""
        found = self._joined.get(path)
        if found is None:
            data = b"".join(self._target.piece(token) for token in path)
            tokens = _tokenized(self._target, data)
            found = tokens[0] if tokens is not None and len(tokens) == 1 else -1
            if len(self._joined) > _MAX_KNOWN:
                self._joined.clear()
            self._joined[path] = found
        return found

    def _spelled(self, token: int) -> tuple[int, ...]:
        """The drafter's tokens that together have the bytes of one of the target's."""
        data = self._target.piece(token, control=True)
        tokens = _tokenized(self._vocabulary, data)
        if tokens is None:
            tokens = [self._bytes[byte] for byte in data if byte in self._bytes]
        return tuple(tokens) or (max(self._vocabulary.eos, 0),)  # nothing that it could read


def _by_bytes(vocabulary: Vocabulary) -> dict[bytes, int]:
    """The token of each text. Of several with one text the last is taken: the others are single bytes."""
    texts = {vocabulary.piece(token, control=True): token for token in range(vocabulary.n_tokens)}
    texts.pop(b"", None)
    return texts


def _tokenized(vocabulary: Vocabulary, data: bytes) -> list[int] | None:
    """The tokens of a part of a text; None if it begins or ends within a character, or gets other bytes."""
    try:
        tokens = vocabulary.tokenize(data.decode(), control=False)
    except UnicodeDecodeError:
        return None
    return tokens if b"".join(map(vocabulary.piece, tokens)) == data else None
