"""Times of passes through a model that is made on the spot, for each placement."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec.base.units import readable
from edgespec.machine.cores import default_threads
from tests.card.cases import ALL_ROWS, Case, cases_of, sizes_within
from tests.card.runner import Runner
from tests.card.synthetic import write_model
from tests.card.table import difference
from tests.card.texts import answer

GIB = 1 << 30
_LIMITS = {"8B": 3.5, "27B": 10.0}  # GiB of the card's memory
_SECONDS = 1.0  # for each number of rows
_FEW_ROWS = (1, 8, 32)
_SLOW_ROWS, _SLOW_SECONDS = (1, 8, 64), 10.0
_TOKENS = 12


def time_passes(
    runner: Runner,
    shape: str,
    device: str,
    folder: Path,
    limit_gib: float | None,
    only: list[str],
    *,
    slow: bool = False,
) -> None:
    """Make a model, and time passes through it.

    Args:
        limit_gib: of the card's memory; None for a usual one. A tiny model is placed as if there were less
            room than it needs, but no memory is taken from the card.
        only: words of the cases that are wanted; all if there are none.
        slow: the device computes on the processor.
    """
    begun = time.perf_counter()
    model = write_model(folder / f"random-{shape}.gguf", shape)
    size = model.stat().st_size
    tiny = shape not in _LIMITS
    limit = size * 2 // 3 if tiny else int((limit_gib or _LIMITS[shape]) * GIB)
    runner.say(f"{shape}: {readable(size)} made in {time.perf_counter() - begun:.0f} s")
    entry: dict[str, Any] = {
        "title": f"{shape}: {readable(size)} of weights; {readable(limit)} free on the card",
        "sizes": asdict(sizes_within(model, limit)),
        "cases": [],
        "differences": [],
    }
    runner.results.setdefault("models", {})[shape] = entry
    cases = cases_of(
        model,
        device,
        limit,
        threads=1 if tiny else default_threads(),
        seconds=_SLOW_SECONDS if slow else _SECONDS / 10 if tiny else _SECONDS,
        rows=_SLOW_ROWS if slow else _FEW_ROWS if tiny else ALL_ROWS,
    )
    wanted = [case for case in cases if not only or any(word in case.label for word in only)]
    limited = [case for case in wanted if case.limited or tiny]
    holder = None
    if not tiny:
        holder, entry["free"] = runner.hold(device, limit)
    try:
        for layers, label in (("auto", "as EdgeSpec places it"), ("attention", "attention first")):
            if not only or any(word in label for word in only):
                answer(runner, f"{shape}, {label}", model, device, {"gpu_layers": layers}, tokens=_TOKENS)
        expected = [_run(runner, shape, case, entry) for case in limited]
    finally:
        runner.end(holder)
    expected += [_run(runner, shape, case, entry) for case in wanted if case not in limited]
    _compare(entry, expected)
    runner.save()


def _run(runner: Runner, shape: str, case: Case, entry: dict[str, Any]) -> tuple[Case, Any]:
    if not runner.has_time(case.label):
        return case, None
    extra = {"GGML_OP_OFFLOAD_MIN_BATCH": str(case.bound)} if case.bound else {}
    found = runner.child("tests.card.passes", json.dumps(asdict(case.placement)), extra=extra)
    entry["cases"].append({"label": case.label, **found})
    runner.save()
    runner.say(f"{shape}, {case.label}: {found.get('error') or json.dumps(found['passes'])}")
    return case, found.get("logits")


def _compare(entry: dict[str, Any], found: list[tuple[Case, Any]]) -> None:
    """Compare logits with those of the processor, which computes with the weights as they are."""
    plain = (case for case, _ in found if not case.placement.device and not case.placement.rearranged)
    reference = next(plain, None)
    own = next((logits for case, logits in found if case == reference), None)
    for case, logits in found:
        if own and logits and case != reference and case.placement.depth == 0:
            share = f"{difference(own, logits):.1%} of their spread"
            entry["differences"].append(f"{case.label}: logits differ from the processor's by {share}")
