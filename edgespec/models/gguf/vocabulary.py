"""Comparing the vocabularies of two files without loading them."""

from __future__ import annotations

from pathlib import Path

from edgespec.models.gguf.types import ArrayInfo, GGUFHeader

_TOKENS = "tokenizer.ggml.tokens"
_TOKENIZER = "tokenizer.ggml.model"
_SPLITTING = "tokenizer.ggml.pre"
_PIECE = 1 << 20


def same_tokens(first: GGUFHeader, second: GGUFHeader) -> bool:
    """True if both files have the same kind of tokenizer and, byte for byte, the same list of tokens.

    False does not say that token ids mean something else: one list may only be padded.
    """
    kinds = [header.metadata.get(_TOKENIZER) for header in (first, second)]
    if kinds[0] != kinds[1] or kinds[0] in (None, "none", "no_vocab"):
        return False
    tokens, others = first.metadata.get(_TOKENS), second.metadata.get(_TOKENS)
    if not isinstance(tokens, ArrayInfo) or not isinstance(others, ArrayInfo):
        return False
    if (
        tokens != others or tokens.byte_range == (0, 0) or others.byte_range == (0, 0)
    ):  # of a model that is no file
        return False
    return _same_bytes((first.path, tokens.byte_range), (second.path, others.byte_range))


def another_vocabulary(first: GGUFHeader, second: GGUFHeader) -> bool:
    """True if tokens of both files mean something else, as far as headers tell: lists may only be padded."""
    ways = [[header.metadata.get(key) for key in (_TOKENIZER, _SPLITTING)] for header in (first, second)]
    return ways[0] != ways[1] and not same_tokens(first, second)


def _same_bytes(first: tuple[Path, tuple[int, int]], second: tuple[Path, tuple[int, int]]) -> bool:
    """Compare two ranges of files; False if one cannot be read."""
    (path, (start, end)), (other, (other_start, other_end)) = first, second
    left = end - start
    if left != other_end - other_start:
        return False
    try:
        with path.open("rb") as one, other.open("rb") as two:
            one.seek(start)
            two.seek(other_start)
            while left:
                piece = one.read(min(left, _PIECE))
                if not piece or piece != two.read(len(piece)):
                    return False
                left -= len(piece)
    except OSError:
        return False
    return True
