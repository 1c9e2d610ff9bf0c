"""Layers on a graphics card: the same text wherever they are, and what the planner expects of larger cards.

    python -m benchmarks.devices                        # on the first device that llama.cpp finds
    python -m benchmarks.devices --device Vulkan0
    python -m benchmarks.devices --on-paper llama3.3-70b   # computed: cards that are not here

Texts are compared with that of the processor. Different kernels round differently, so they may part at near-ties;
it is said after how many tokens they do. --on-paper needs no device: a card's speed is that of its memory, which
is given here, and the rest is computed by the planner as `edgespec plan` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import edgespec
from edgespec import GenerationConfig
from edgespec.costs.curves import Curve
from edgespec.errors import BackendError, MemoryLimitError
from edgespec.kernels.device_speed import measure_speeds
from edgespec.loading.cards import Card, Cards
from edgespec.loading.devices import find_devices
from edgespec.loading.spreading import usual_type
from edgespec.machine.cores import default_threads
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.models.hub.inspection import inspect_model
from edgespec.plans.model_plan import plan_for
from edgespec.plans.plan import PlanRequest
from edgespec.profiles.device_profile import DeviceProfile
from edgespec.progress import no_progress
from edgespec.units import readable

PROMPT = "Why is the sky blue?"
CONTEXT = 512

# Cards on paper: memory, bytes per second that it delivers, operations per second, and the link's bytes per second.
PAPER = {
    "8 GB card": (8e9, 270e9, 20e12, 12e9),
    "24 GB card": (24e9, 900e9, 70e12, 24e9),
}
_USABLE = 0.93  # of a card's memory, beside what the system and its screen take
_EFFICIENCY = 0.6  # of the memory's and the arithmetic's speed that products reach
_OPERATIONS = 4  # for a byte of weights of about four bits and a row


def main() -> None:
    """Compare texts, or plan on paper."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", help="default: the small model that comes along")
    parser.add_argument("--draft", default="smollm2-135m", help="for the rows with a drafter")
    parser.add_argument("--device", help="default: the first one")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--on-paper", metavar="MODEL", help="plan this model for cards that are not here")
    parser.add_argument("--memory", type=float, default=32.0, help="GiB beside the cards on paper")
    options = parser.parse_args()
    if options.on_paper:
        plan_on_paper(options.on_paper, int(options.memory * (1 << 30)))
    else:
        compare(options.model, options.draft, options.device, options.tokens)


def compare(model: str | None, draft: str, name: str | None, n_tokens: int) -> None:
    """Answers with layers and the drafter in all places."""
    device = find_devices([name] if name else [])[0]
    print(f"{device.name}: {device.description}, {readable(device.free)} free of {readable(device.total)}")
    card: dict[str, Any] = {"device": device.name, "draft_device": "none"}
    path = catalog.find(model)
    layers = inspect_model(str(path), no_progress).headers[0].block_count or 0
    half, third = layers // 2, layers // 3
    tree = {"draft": draft, "tree_budget": 16}
    streamed = {"offload": "stream", "gpu_layers": third}
    rows: list[tuple[str, dict[str, Any]]] = [
        ("processor", {"gpu_layers": 0}),
        ("auto", {**card, "gpu_layers": "auto"}),
        ("all layers", {**card, "gpu_layers": "all"}),
        ("half of them", {**card, "gpu_layers": half}),
        ("half, and trees", {**card, "gpu_layers": half, **tree}),
        ("drafter", {"gpu_layers": 0, "draft_device": device.name, **tree}),
        ("a third, the rest streamed", {**card, **streamed}),
        ("the same, and trees", {**card, **streamed, **tree}),
    ]
    first: Sequence[int] = ()
    print(f"{'':28}{'tokens/s':>9}{'passes':>8}  exact  text")
    for label, more in rows:
        answer, notes = answered(path, n_tokens, more)
        first = first or answer.tokens
        said = same_text(first, answer.tokens)
        speed = answer.timings.tokens_per_second
        print(f"{label:28}{speed:9.2f}{len(answer.passes):8}  {'yes' if answer.exact else 'no':5}  {said}")
        for note in notes:
            print(f"{'':30}{note}")


def answered(path: Any, n_tokens: int, more: dict[str, Any]) -> tuple[edgespec.Generation, list[str]]:
    """An answer, and what is said of layers; where weights are streamed, in as little memory as that needs."""
    options: dict[str, Any] = {"draft": "none", "context": CONTEXT} | more
    if options.get("offload") == "stream":
        options["memory"] = 1 << 20
    while True:
        try:
            engine = edgespec.load(path, **options)
            break
        except MemoryLimitError as error:
            if not options.get("memory") or not error.least or error.least <= options["memory"]:
                raise
            options["memory"] = error.least
    with engine:
        answer = engine.generate(PROMPT, GenerationConfig(max_tokens=n_tokens))
        words = ("Layers:", "The drafter is on", "No row rule")
        notes = [note for note in engine.notes if note.startswith(words) or "streamed" in note]
        return answer, notes + engine.warnings


def same_text(expected: Sequence[int], found: Sequence[int]) -> str:
    """Whether two answers are the same, or after how many tokens they part."""
    if list(expected) == list(found):
        return "the same"
    pairs = zip(expected, found, strict=False)
    return f"the same for {next((at for at, (a, b) in enumerate(pairs) if a != b), len(found))} tokens"


def plan_on_paper(model: str, memory: int) -> None:
    """What the planner expects, without a card and with each of those on paper."""
    files = ModelFiles(inspect_model(model, no_progress).headers)
    own = own_seconds(usual_type(files))
    print(f"COMPUTED, not measured: {model}, {readable(files.tensor_bytes)}, {readable(memory)} of memory")
    for label, cards in [("no card", None), *((name, on_paper(name, files, own)) for name in PAPER)]:
        layers: int | str = 0 if cards is None else "auto"
        request = PlanRequest(model, "lookup", memory, gpu_layers=layers)
        try:
            plan = plan_for(request, no_progress, cards=cards)
        except MemoryLimitError as error:
            print(f"{label}: {error.what}")
            continue
        where = next((note for note in plan.notes if note.startswith("Layers:")), "Layers: all here.")
        chosen = plan.plain
        print(
            f"{label}: {where} {readable(chosen.holding.streamed_bytes)} streamed; a pass of one row "
            f"{chosen.pass_s:.2f} s, {plan.sizes[-1].nodes} rows {plan.sizes[-1].pass_s:.2f} s; bound by the "
            f"{chosen.bound}"
        )


def on_paper(name: str, files: ModelFiles, own: tuple[float, ...]) -> Cards:
    """A card that is not here, as fast as its memory and its arithmetic allow."""
    memory, rate, operations, link = PAPER[name]
    seconds = tuple(max(1 / rate, rows * _OPERATIONS / operations) / _EFFICIENCY for rows in (1, 8, 32))
    way = Curve.through((n_bytes, 40e-6 + 2 * n_bytes / link) for n_bytes in (1 << 14, 1 << 20, 1 << 24))
    free = int(memory * _USABLE)
    card = Card(name, "on paper", free, int(memory), False, DeviceProfile(seconds, own, way))
    return Cards.of([card], usual_type(files))


def own_seconds(type_id: int) -> tuple[float, ...]:
    """What this machine's processor takes for a byte of weights, measured."""
    found = measure_speeds(type_id, default_threads())
    if not found:
        raise BackendError("Nothing was measured.")
    return found[0].seconds


if __name__ == "__main__":
    main()
