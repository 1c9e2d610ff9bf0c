"""The greeting of a chat with a named model."""

from __future__ import annotations

from edgespec.cli.conversation.welcome import greeting_line
from edgespec.generation.result import MemoryUse

GIB = 1 << 30


def test_the_line_names_drafter_and_memory() -> None:
    held = MemoryUse(resident_bytes=GIB)
    assert greeting_line("big", "small", held) == "big, drafted by small, 1.0 GiB in memory."
    # The drafter is in memory too, and is not part of what is streamed.
    streamed = MemoryUse(resident_bytes=2 * GIB, streamed_bytes_per_pass=3 * GIB, target_bytes=4 * GIB)
    assert greeting_line("big", "none", streamed) == (
        "big, without a drafter, 3.0 GiB of 4.0 GiB (75%) streamed per pass."
    )
