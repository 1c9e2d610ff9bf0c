"""Evidence of a source without a model for a candidate, as classes, and the likelihood of each class.

A class says how strong the evidence is: how many tokens matched and which share of the earlier occurrences
went on this way, or how likely the target found the candidate in an earlier pass. How often candidates of a
class are accepted is learned (`learning.acceptance`); the chances here are where learning begins.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

EvidenceArray = NDArray[np.int8]
FloatArray = NDArray[np.float32]


class CandidateSource(IntEnum):
    """The source of a candidate; the last axis of an array of evidence.

    Members:
        TEXT: earlier occurrences of the last tokens in the prompt and the conversation.
        RECYCLED: what the target found likely after the same tokens in an earlier pass.
        FILES: occurrences of the last tokens in a person's own files.
        ANSWERS: occurrences of the last tokens in other answers of the same owner.
    """

    TEXT = 0
    RECYCLED = 1
    FILES = 2
    ANSWERS = 3


class RecycledFrom(IntEnum):
    """The row of an earlier pass in which the target found a candidate likely.

    Members:
        TOKEN, PAIR: after the same token, or the same two.
        RIVAL: instead of the last token. What was likely in its place often comes next.
    """

    TOKEN = 0
    PAIR = 1
    RIVAL = 2


# Classes that every source has. Those of proposals come after them.
NOTHING = 0  # the source does not know the context
OTHERS = 1  # it knows the context, and proposes other candidates there
_FIRST = 2

_LENGTHS = (2, 3, 4, 6, 10, 18)  # tokens matched: limits of classes
_SHARES = np.array([1 / 3, 2 / 3, 1.0])  # of occurrences that went on this way: limits of classes
_SHARE_CLASSES = len(_SHARES) + 2  # those that always went on this way are told apart by how many there are
_RECYCLED = np.array([0.02, 0.05, 0.15, 0.35, 0.65, 0.9])  # the target's probability: limits of classes
CLASSES = _FIRST + (len(_LENGTHS) + 1) * _SHARE_CLASSES


def occurrence_class(length: int, count: int, total: int) -> int:
    """The class of a continuation that was found in a text.

    Args:
        length: tokens before the candidate that also preceded it there; at least 1.
        count: occurrences of these tokens that the candidate followed.
        total: occurrences of these tokens that anything followed.
    """
    share = (
        _SHARE_CLASSES - 1 - (total == 1)
        if count == total
        else int(3 * count >= total) + (3 * count >= 2 * total)
    )
    return _FIRST + bisect_right(_LENGTHS, length) * _SHARE_CLASSES + share


def recycled_classes(chances: FloatArray, found: RecycledFrom) -> EvidenceArray:
    """The classes of candidates that the target has ranked before; NOTHING where the chance is 0.

    Args:
        chances: the target's probability of each.
        found: where it found them so likely.
    """
    below = np.searchsorted(_RECYCLED, chances, side="right")
    return np.where(chances > 0, _FIRST + found * (len(_RECYCLED) + 1) + below, NOTHING).astype(np.int8)


def alone_logits(evidence: EvidenceArray) -> FloatArray:
    """(width, branching, sources) the logit of each source's chance where nothing else is known.

    It is -inf for a source that does not propose the candidate.
    """
    by_source = evidence.reshape(-1, len(CandidateSource)).T.astype(np.intp)
    logits: FloatArray = np.take_along_axis(_LOGITS, by_source, axis=1).T.reshape(evidence.shape)
    return logits


def _first_logits() -> FloatArray:
    """(sources, classes) the chances that learning begins with."""
    shares = np.array([0.2, 0.5, 0.75, 0.85, 1.0])
    chances = np.zeros((len(CandidateSource), CLASSES))
    elsewhere = [0.05, 0.12, 0.25, 0.4, 0.55, 0.7, 0.8]
    for source, by_length in (
        (CandidateSource.TEXT, [0.2, 0.4, 0.55, 0.7, 0.8, 0.88, 0.93]),
        (CandidateSource.FILES, elsewhere),
        (CandidateSource.ANSWERS, elsewhere),
    ):
        chances[source, _FIRST:] = np.outer(by_length, shares).ravel()
    within = np.array([0.01, 0.03, 0.09, 0.24, 0.5, 0.78, 0.95])
    recycled = np.outer([0.55, 0.75, 0.2], within).ravel()
    chances[CandidateSource.RECYCLED, _FIRST : _FIRST + len(recycled)] = recycled
    with np.errstate(divide="ignore"):
        logits: FloatArray = np.log(chances / (1 - chances)).astype(np.float32)
    return logits


_LOGITS = _first_logits()
