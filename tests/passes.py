"""Passes of an engine over a sequence that a test holds itself."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.engine.engine import Engine
from edgespec.engine.sequence import Batch, Sizer, TextSequence
from edgespec.generation.result import PassRecord
from edgespec.speculation.methods import DecodingMethod


def passes(
    engine: Engine, tokens: list[int], method: DecodingMethod, max_tokens: int, sizer: Sizer | None = None
) -> Iterator[PassRecord]:
    """Append up to `max_tokens` to the tokens, all of which but the last are read first."""
    sequence = TextSequence(tokens, method, len(tokens) + max_tokens, sizer or engine.speculator.sizer)
    engine.target.prefill(sequence)
    while not sequence.is_full:
        (record,) = engine.decoder.step(Batch([sequence]))
        if sequence.error is not None:
            raise sequence.error
        yield record
