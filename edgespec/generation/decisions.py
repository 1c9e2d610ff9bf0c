"""Decisions that measured costs take while an engine decodes, and how each of them is forced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decisions:
    """Decisions by measured costs unless forced: True for always, False for never, None by cost.

    None of these can change the text. They decide how fast it comes, so tests and benchmarks force both
    sides; see `Speculator.decisions`. What is decided while loading has an option of `edgespec.load` each.
    """

    # trees are drafted. By cost, their size follows from what nodes and draft steps take, and drafting pauses
    # where it does not pay. Forced, every tree may be as large as the limits allow.
    drafting: bool | None = None
    observing: bool | None = None  # the drafter is shown passes while it rests
