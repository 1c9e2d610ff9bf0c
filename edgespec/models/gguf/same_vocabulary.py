"""Compare the vocabularies of two files without loading them."""

from __future__ import annotations

from edgespec.models.gguf.types import ArrayInfo, GGUFHeader

_KINDS = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
_TOKENS = "tokenizer.ggml.tokens"
_PADDING = 0.02  # of a vocabulary: models of one family pad theirs to different sizes


def same_vocabulary(one: GGUFHeader, other: GGUFHeader) -> bool:
    """True if two files on this machine have the same tokenizer and the same tokens, padding aside."""
    if any(one.metadata.get(key) != other.metadata.get(key) for key in _KINDS):
        return False
    sizes = sorted((one.n_vocab, other.n_vocab))
    if not sizes[0] or sizes[0] < (1 - _PADDING) * sizes[1]:
        return False
    try:
        tokens = [_tokens(header) for header in (one, other)]
    except OSError:
        return False
    shared = min(map(len, tokens))
    return shared > 0 and tokens[0][:shared] == tokens[1][:shared]


def _tokens(header: GGUFHeader) -> bytes:
    """The tokens as they are in the file, each with its length before it.

    Raises:
        OSError: the file cannot be read.
    """
    tokens = header.metadata[_TOKENS]
    assert isinstance(tokens, ArrayInfo)
    start, end = tokens.place
    with header.path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)
