"""Values of options that are more than a word or a number: tree budgets and layers."""

from __future__ import annotations

import re

from edgespec.errors import UsageError


def parse_tree_budget(text: str) -> int | None:
    """A number of nodes; None for auto.

    Raises:
        UsageError: it is neither.
    """
    if text.strip().lower() == "auto":
        return None
    if not re.fullmatch(r"\d{1,9}", text.strip(), re.ASCII):
        raise UsageError(f"The tree budget is '{text}'.", "It must be a number of nodes, or auto.")
    return int(text)


def parse_gpu_layers(text: str) -> int | str:
    """A number of layers, "auto" or "all", for which other programs write -1.

    Raises:
        UsageError: it is none of these.
    """
    word = text.strip().lower()
    if word in ("auto", "all"):
        return word
    if word == "-1":
        return "all"
    if not re.fullmatch(r"\d{1,6}", word, re.ASCII):
        raise UsageError(f"The gpu layers are '{text}'.", "They must be a number, auto or all.")
    return int(word)
