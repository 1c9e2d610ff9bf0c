"""May this drafter serve this target?"""

from __future__ import annotations

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
        "Choose a drafter of the same family, or --draft auto, which needs none.",
    )


def _quoted(vocabulary: Vocabulary, token: int) -> str:
    return repr(vocabulary.text(token).decode("utf-8", "replace"))
