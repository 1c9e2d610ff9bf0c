"""Check that a drafter's token ids mean the same to its target."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.llama.tokenizer.vocabulary import Vocabulary

_SHOWN = 3
_KINDS = {  # llama_vocab_type
    0: "none",
    1: "SentencePiece",
    2: "byte-pair encoding",
    3: "WordPiece",
    4: "Unigram",
    5: "RWKV",
    6: "PLaMo-2",
}


def differs(target: Vocabulary, drafter: Vocabulary) -> str:
    """The difference between two vocabularies, for messages; empty if token ids mean the same in both.

    Vocabularies padded to different sizes are compatible: a token that only one of them has is never drafted.
    So is that of a drafter loaded without texts, which is only done where its file lists the target's tokens.
    """
    if not drafter.kind:
        return ""
    failed = [check for check in _needed(target, drafter) if not check.passed]
    return f"{failed[-1].name}: {failed[-1].detail}" if failed else ""


@dataclass(frozen=True)
class CompatibilityCheck:
    """One comparison, and its outcome."""

    name: str
    passed: bool
    needed: bool  # whether drafting by token ids is possible only if this passes
    detail: str


def compare(target: Vocabulary, drafter: Vocabulary) -> list[CompatibilityCheck]:
    """Compare two vocabularies in all that matters to a pair, with the first differences."""
    pair = (target, drafter)
    sizes = (target.n_tokens, drafter.n_tokens)
    bos = (target.bos, drafter.bos)
    eos = (target.eos, drafter.eos)
    ends = [sorted(t for t in range(v.n_tokens) if v.is_end(t)) for v in (target, drafter)]
    tokenizer, tokens = _needed(target, drafter)
    return [
        tokenizer,
        CompatibilityCheck("size", sizes[0] == sizes[1], False, _both(sizes, "tokens")),
        tokens,
        CompatibilityCheck(
            "special tokens",
            bos[0] == bos[1] and eos[0] == eos[1],
            False,
            f"begin {_both(tuple(map(_name, pair, bos)))}, end {_both(tuple(map(_name, pair, eos)))}",
        ),
        CompatibilityCheck(
            "end tokens",
            ends[0] == ends[1],
            False,
            _both(tuple(" ".join(_name(v, t) for t in e[:8]) for v, e in zip(pair, ends, strict=True))),
        ),
    ]


def _needed(target: Vocabulary, drafter: Vocabulary) -> tuple[CompatibilityCheck, CompatibilityCheck]:
    """The checks that token ids depend on: the kind of tokenizer, and the tokens."""
    shared = min(target.n_tokens, drafter.n_tokens)
    differing = [t for t in range(shared) if target.text(t) != drafter.text(t)]
    first = "; ".join(
        f"token {t} is {_quoted(target, t)} and {_quoted(drafter, t)}" for t in differing[:_SHOWN]
    )
    detail = f"{len(differing)} of {shared} differ ({first})" if differing else f"{shared} are the same"
    kinds = (target.kind, drafter.kind)
    return (
        CompatibilityCheck(
            "tokenizer", kinds[0] == kinds[1], True, _both(tuple(_KINDS.get(k, f"kind {k}") for k in kinds))
        ),
        CompatibilityCheck("tokens", not differing, True, detail),
    )


def _both(pair: tuple[object, ...], unit: str = "") -> str:
    text = f"{pair[0]}" if pair[0] == pair[1] else f"{pair[0]} and {pair[1]}"
    return f"{text} {unit}".rstrip()


def _name(vocabulary: Vocabulary, token: int) -> str:
    """A token's text; "none" for a token that the vocabulary does not have."""
    text = vocabulary.text(token).decode("utf-8", "replace") if token >= 0 else "none"
    return text if text.isprintable() else repr(text)


def _quoted(vocabulary: Vocabulary, token: int) -> str:
    return repr(vocabulary.text(token).decode("utf-8", "replace"))
