"""The context of a server for which none was chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.models.gguf.footprint import cell_bytes
from edgespec.models.gguf.header import read_header
from edgespec.planning.serving_context import serving_context


@pytest.mark.parametrize(
    ("held", "context"),
    [(10**6, "trained"), (6000, 5120), (100, 4096)],
    ids=["all of it", "a part", "not even the usual"],
)
def test_a_tenth_of_the_memory_may_hold_the_cache(smol_path: Path, held: int, context: int | str) -> None:
    header = read_header(smol_path)
    assert header.context_length is not None
    assert header.context_length > 6000
    expected = header.context_length if context == "trained" else context
    assert serving_context(header, 4096, 10 * held * cell_bytes(header), "f16") == expected
