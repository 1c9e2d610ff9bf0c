"""May this drafter serve this target?"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.errors import PairingError
from edgespec.models.vocabulary import Vocabulary

_SHOWN = 3


def check_pair(target: Vocabulary, drafter: Vocabulary, drafter_name: str) -> None:
    """Make sure that token ids mean the same to both.

    Vocabularies padded to different sizes are fine: what only one of them has is never drafted.

    Raises:
        PairingError: the vocabularies differ; names the first tokens that do.
    """
    shared = min(target.n_tokens, drafter.n_tokens)
    differing = [t for t in range(shared) if target.text(t) != drafter.text(t)]
    if not differing and target.kind == drafter.kind:
        return
    examples = "; ".join(
        f"token {t} is {_quoted(target, t)} for the target and {_quoted(drafter, t)} for the drafter"
        for t in differing[:_SHOWN]
    )
    raise PairingError(
        f"The drafter '{drafter_name}' does not fit the target: {len(differing)} of {shared} tokens differ"
        + (f" ({examples})." if examples else ", but they are of another kind of tokenizer."),
        "Choose a drafter of the same family, or make one: edgespec draft make TARGET.",
    )


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, and how it came out.

    Attributes:
        needed: whether tokens can only be drafted as they are if it passes.
    """

    name: str
    passed: bool
    needed: bool
    detail: str


def compare(target: Vocabulary, drafter: Vocabulary) -> list[Check]:
    """Everything about two vocabularies that matters to a pair, with the first differences."""
    shared = min(target.n_tokens, drafter.n_tokens)
    differing = [t for t in range(shared) if target.text(t) != drafter.text(t)]
    padded = abs(target.n_tokens - drafter.n_tokens)
    sizes = f"{target.n_tokens} and {drafter.n_tokens} tokens"
    bos = (target.bos, drafter.bos)
    eos = (target.eos, drafter.eos)
    ends = [{t for t in range(v.n_tokens) if v.is_end(t)} for v in (target, drafter)]
    return [
        Check("tokenizer", target.kind == drafter.kind, True, _same_or("the same kind", target, drafter)),
        Check(
            "size",
            True,
            False,
            sizes if padded else f"{target.n_tokens} tokens",
        ),
        Check(
            "tokens",
            not differing,
            True,
            f"{shared} are the same"
            if not differing
            else f"{len(differing)} of {shared} differ, first "
            + "; ".join(f"{t}: {_quoted(target, t)} and {_quoted(drafter, t)}" for t in differing[:_SHOWN]),
        ),
        Check("special tokens", bos == bos[::-1] and eos == eos[::-1], False, _specials(bos, eos)),
        Check(
            "end tokens",
            ends[0] == ends[1],
            False,
            f"{sorted(ends[0])[:8]}" + ("" if ends[0] == ends[1] else f" and {sorted(ends[1])[:8]}"),
        ),
    ]


def _same_or(same: str, target: Vocabulary, drafter: Vocabulary) -> str:
    return same if target.kind == drafter.kind else f"kinds {target.kind} and {drafter.kind}"


def _specials(bos: tuple[int, int], eos: tuple[int, int]) -> str:
    def one(name: str, pair: tuple[int, int]) -> str:
        return f"{name} {pair[0]}" if pair[0] == pair[1] else f"{name} {pair[0]} and {pair[1]}"

    return f"{one('begin', bos)}, {one('end', eos)}"


def _quoted(vocabulary: Vocabulary, token: int) -> str:
    return repr(vocabulary.text(token).decode("utf-8", "replace"))
