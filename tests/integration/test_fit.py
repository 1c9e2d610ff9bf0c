"""What fits is said as loading finds it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

import edgespec
from edgespec.errors import MemoryLimitError
from edgespec.models.footprint import readable
from edgespec.models.sight import look_at
from edgespec.offload.fit import how_it_fits

CONTEXT = 256


def test_the_verdict_is_that_of_loading(q4_drafter_path: Path) -> None:
    headers = look_at(str(q4_drafter_path)).headers
    memory = how_it_fits(headers, context=CONTEXT)
    least, needed = memory["least_bytes"], memory["needed_bytes"]
    assert memory["verdict"] == "fits"
    assert least < needed
    for budget, verdict in (
        (least - 1, "too large"),
        (least, "streams"),
        (needed - 1, "streams"),
        (needed, "fits"),
    ):
        said = how_it_fits(headers, budget=budget, context=CONTEXT)
        assert said["verdict"] == verdict
        assert (said["least_bytes"], said["needed_bytes"]) == (least, needed)
        if verdict == "too large":
            with pytest.raises(MemoryLimitError):
                edgespec.load(q4_drafter_path, memory=budget, context=CONTEXT, draft="none")
            continue
        with edgespec.load(q4_drafter_path, memory=budget, context=CONTEXT, draft="none") as engine:
            streamed = getattr(engine.target.model.weights, "streamed_bytes", 0)
        assert (streamed > 0) is (verdict == "streams")
        assert streamed == pytest.approx(said["streamed_bytes_per_pass"], rel=0.01)


def test_memory_that_is_not_there_is_named_when_less_is_taken(q4_drafter_path: Path) -> None:
    asked = psutil.virtual_memory().total * 2
    with edgespec.load(q4_drafter_path, memory=asked, context=CONTEXT, draft="none") as engine:
        (note,) = engine.warnings

    assert readable(asked) in note
    assert note.count("iB") == 2
    with edgespec.load(q4_drafter_path, memory=1 << 30, context=CONTEXT, draft="none") as engine:
        assert engine.warnings == []
