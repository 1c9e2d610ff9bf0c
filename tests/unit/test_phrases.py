"""What the program prints reads as an engineer would write it: no phrases that sound translated."""

from __future__ import annotations

import re
from pathlib import Path

import edgespec
from tests.printed import strings

CALQUES = (
    r"from now on",
    r"(is|are|was|were) (there|here) already",
    r"(put|puts) back",
    r"(take|takes|taken|took) back",
    r"of the wrong kind",
    r"of the kind",
    r"(is|are) none of",
    r"\bbut for\b",
    r"\bof which\b",
    r"\bwhat (was|is|were) (said|measured|needed|there|written|typed)",
    r"\b(go|goes|going) on (with|without|where)",
    r"\b(is|are) not here\b",
    r"as it goes\b",
    r"(made|begins?|began) with something else",
    r"cannot be (listened on|looked at|asked)",
    r"(written|write) over\b",
    r"\bas far as\b",
    r"\bis to be\b",
    r"(?<![Tt]here )\bis no (?!longer|more)",
    r"gave an answer that",
    r"\bends? by\b",
    r"\bwhat (loading|it|that) (takes|has)\b",
    r"\bIs there room\b",
    r"\bMake room\b",
    r"\bkeys and values as\b",
    r"so they may be",
    r"\basked for,? and\b",
    r"\bby itself\b",
    r"\bby themselves\b",
    r"\bIt must be\b",
    r"\b(must be|is not|not) a text\b(?! file)",
    r"\bone after the other\b",
    r"\bany more\b",
    r"\bleave \S+ out\b",
    r"\bgive it (with|to|another)\b",
    r"\bAsk for (a|more|fewer|--)\b",
)


def test_nothing_that_is_printed_reads_as_translated() -> None:
    """In all strings of the sources, most of which somebody reads."""
    calque = re.compile("|".join(CALQUES))
    found = [
        f"{path.name}: {text}"
        for path in Path(edgespec.__file__).parent.rglob("*.py")
        for text in strings(path)
        if " " in text and calque.search(text)
    ]
    assert found == []
