"""The line at the start of a chat with a named model: its drafter, its memory, and the speed to expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.units import readable, readable_rate

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.generation.result import MemoryUse
    from edgespec.planning.report.loaded import ExpectedSpeed


def greeting(engine: Engine, temperature: float) -> str:
    """One line about a loaded model."""
    model, drafter = engine.target.model.path.stem, engine.drafter.name
    return greeting_line(model, drafter, engine.memory, expected(engine, temperature))


def expected(engine: Engine, temperature: float) -> ExpectedSpeed | None:
    """The speed to expect of a loaded model; None if it is not known."""
    if engine.keys is None:
        return None
    from edgespec.planning.report.loaded import expected_speed
    from edgespec.profiles.store import ProfileStore

    return expected_speed(engine.keys, engine.memory, temperature, ProfileStore())


def greeting_line(model: str, drafter: str, memory: MemoryUse, speed: ExpectedSpeed | None) -> str:
    """The line, from its facts.

    Args:
        drafter: "none" for plain decoding.
        speed: None if it is not known.
    """
    drafted = "without a drafter" if drafter == "none" else f"drafted by {drafter}"
    streamed = memory.streamed_bytes_per_pass
    if streamed:
        whole = memory.target_bytes
        held = f"{readable(streamed)} of {readable(whole)} ({streamed / whole:.0%}) streamed per pass"
    else:
        held = f"{readable(memory.resident_bytes)} in memory" if memory.resident_bytes else "all in memory"
    if memory.layers:
        held += f", {memory.layers}"
    figure = ""
    if speed is not None:
        figure = f"; about {readable_rate(speed.tokens_per_second, digits=2)}"
        if drafter != "none" and not speed.drafted:
            figure += " without drafts"
    advice = f" {speed.advice}" if speed is not None and speed.advice else ""
    return f"{model}, {drafted}, {held}{figure}.{advice}"
