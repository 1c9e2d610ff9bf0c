"""EdgeSpec's own answer with layers on a card: python -m tests.card.answers JSON

The JSON object has "model", "device" (ggml's name), "options" of `edgespec.load`, "tokens", and
"least_memory" if the model is to be streamed with as little memory as that takes. "take_first", "take_before"
and "take_after" are the bytes of the card's memory that another program leaves when it takes the rest: before
planning, between planning and loading, or between loading and answering. Prints the answer and what was said,
as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest.mock import patch

import edgespec
from edgespec import GenerationConfig
from edgespec.engine.engine import Engine
from edgespec.errors import EdgeSpecError, MemoryLimitError
from edgespec.llama.runtime.backend import log_lines
from edgespec.machine.contention import ContentionWatch
from edgespec.planning.devices.machine import MachineSnapshot
from tests.card.device import STAND_IN, FreeMemoryUnknown, card, take_all_but
from tests.card.stand_in import measure_stand_in

PROMPT = "Why is the sky blue?"
_LONG = 60  # of the prompt, for the answer after memory was taken
_LIKELIEST = 4
_BUFFERS = 12  # the last lines on them


def main() -> None:
    """Answer and print."""
    keep_measurements()
    order = json.loads(sys.argv[1])
    device = card(order["device"])
    if os.environ.get(STAND_IN):
        measure_stand_in(order["model"])
    options: dict[str, Any] = {"draft": "none", "context": 512, "learn": False} | order["options"]
    try:
        with log_lines() as log:
            found = answered(order, options, device)
        found["buffers"] = [line for line in log.info if "buffer size" in line][-_BUFFERS:]
    except EdgeSpecError as error:
        found = {"error": f"{error.what} {error.hint}"}
    except FreeMemoryUnknown as error:
        found = {"error": f"left out: {error}"}
    print(json.dumps(found), flush=True)
    os._exit(0)  # what was taken from the card need not be given back in order


def keep_measurements() -> None:
    """Keep what is measured beside other programs as well, or every child would measure it again.

    The profiles are those of this run's own folder.
    """
    ContentionWatch.disturbed = False  # type: ignore[assignment, method-assign]


def answered(order: dict[str, Any], options: dict[str, Any], device: Any) -> dict[str, Any]:
    """An answer, and how the model was loaded."""
    if "take_first" in order:
        take_all_but(device, order["take_first"])
    with opened(order, options, device) as engine:
        prompt = PROMPT
        if "take_after" in order:
            take_all_but(device, order["take_after"])
            prompt = PROMPT * _LONG
        answer = engine.generate(prompt, GenerationConfig(max_tokens=order["tokens"], logprobs=_LIKELIEST))
        return {
            "tokens": list(answer.tokens),
            "likeliest": [[[top.token, top.logprob] for top in each.top] for each in answer.logprobs or ()],
            "tokens_per_second": answer.tokens_per_second,
            "passes": len(answer.passes),
            "exact": answer.exact,
            "layers": answer.memory.layers,
            "device_bytes": answer.memory.device_bytes,
            "streamed": answer.memory.streamed_bytes_per_pass,
            "load_s": engine.load_s,
            "notes": engine.notes,
            "warnings": engine.warnings,
        }


def opened(order: dict[str, Any], options: dict[str, Any], device: Any) -> Engine:
    """The engine, in as little memory as it takes if that is wanted."""
    if order.get("least_memory"):
        options["memory"] = 1 << 20
    read = MachineSnapshot.read

    def read_and_take(*arguments: Any) -> MachineSnapshot:
        snapshot = read(*arguments)
        take_all_but(device, order["take_before"])
        return snapshot

    while True:
        try:
            if "take_before" not in order:
                return edgespec.load(order["model"], **options)
            with patch.object(MachineSnapshot, "read", read_and_take):
                return edgespec.load(order["model"], **options)
        except MemoryLimitError as error:
            if not order.get("least_memory") or not error.least or error.least <= options["memory"]:
                raise
            options["memory"] = error.least


if __name__ == "__main__":
    main()
