"""Layers on a graphics card: the same text wherever they are, and what the planner expects of larger cards.

    python -m benchmarks.devices                        # on the first device that llama.cpp finds
    python -m benchmarks.devices --device Vulkan0
    python -m benchmarks.devices --on-paper        # computed: a 70B model on cards that are not here

Texts are compared with that of the processor. Kernels round differently, so they may part at near-ties; it is
said after how many tokens they do.

--on-paper needs no device and no model: a file gets the header of a 70B model in Q4_K and Q6_K, and no
weights. The speeds of cards, processor and disk are given here; the planner computes the rest, as `edgespec
plan` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import edgespec
from benchmarks.harness import parser_of, print_head, write_hollow
from benchmarks.workload import q4_0
from edgespec import GenerationConfig
from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.errors import MemoryLimitError
from edgespec.machine.cores import default_threads
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.models.hub.inspection import inspect_model
from edgespec.planning.devices.assignment import layer_seconds, layer_sizes, usual_type
from edgespec.planning.devices.cards import Card, Cards
from edgespec.planning.devices.finding import find_devices
from edgespec.planning.report.model_report import plan_for
from edgespec.profiles.figures import DeviceProfile
from edgespec.profiles.store import DiskProfile, PassProfile, ProfileStore, disk_key, machine_identity
from edgespec.progress import no_progress
from edgespec.units import readable

PROMPT = "Why is the sky blue?"
CONTEXT = 512

# On paper: bytes of memory, and per second: bytes from it, operations, and bytes over the link.
PAPER = {
    "8 GB card": (8e9, 270e9, 20e12, 12e9),
    "24 GB card": (24e9, 900e9, 70e12, 24e9),
}
PROCESSOR = (60e9, 1.5e12)  # bytes from memory and operations per second
DISK = 3.5e9  # bytes per second
_USABLE = 0.93  # of a card's memory, beside what the system and its screen take
_EFFICIENCY = 0.6  # of the memory's and the arithmetic's speed that products reach
_OPERATIONS = 4  # for a byte of weights of about four bits and a row
_ROWS = (1, 8, 32)


def main() -> None:
    """Compare texts, or plan on paper."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="default: the bundled demo model")
    parser.add_argument("--draft", help="for the rows with a drafter; default: the small model in Q4_0")
    parser.add_argument("--device", help="default: the first one")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--on-paper", action="store_true", help="plan for cards that are not here")
    parser.add_argument("--memory", type=float, default=32.0, help="GiB beside the cards on paper")
    options = parser.parse_args()
    if options.on_paper:
        with tempfile.TemporaryDirectory() as folder:
            shape = catalog.entries()["llama3.3-70b"].shape
            assert shape is not None
            model = write_hollow(Path(folder) / "llama-70b-q4_k_m.gguf", shape)
            plan_on_paper(model, int(options.memory * (1 << 30)))
    else:
        compare(options.model, options.draft or str(q4_0()), options.device, options.tokens)


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
        speed = answer.tokens_per_second
        print(f"{label:28}{speed:9.2f}{len(answer.passes):8}  {'yes' if answer.exact else 'no':5}  {said}")
        for note in notes:
            print(f"{'':30}{note}")


def answered(path: Any, n_tokens: int, more: dict[str, Any]) -> tuple[edgespec.Generation, list[str]]:
    """An answer, and what is said of layers. Streamed weights get as little memory as they need."""
    options: dict[str, Any] = {"draft": "none", "context": CONTEXT, "learn": False} | more
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
    """Compare two answers: equal, or the number of tokens after which they part."""
    if list(expected) == list(found):
        return "the same"
    pairs = zip(expected, found, strict=False)
    return f"the same for {next((at for at, (a, b) in enumerate(pairs) if a != b), len(found))} tokens"


def plan_on_paper(model: Path, memory: int) -> None:
    """Predict speeds without a card, and with each of those on paper."""
    files = ModelFiles.of_headers(inspect_model(str(model), no_progress).headers)
    own = seconds_on_paper(*PROCESSOR)
    store = ProfileStore(model.parent / "profiles")
    key = machine_identity() | {"threads": str(default_threads()), "model": files.headers[0].fingerprint}
    curve = Curve.through((rows, s * files.tensor_bytes) for rows, s in zip(_ROWS, own, strict=True))
    store.put(key, PassProfile(curve))
    store.put(disk_key(model), DiskProfile(DISK, DISK, 1 << 20, 4))
    print(f"COMPUTED, not measured: {readable(files.tensor_bytes)} of weights, {readable(memory)} of memory")
    print_head("card", "layers", "streamed a pass", "pass, 1 row", "8 rows", "32 rows", "bound by")
    for label in ("none", *PAPER):
        cards = None if label == "none" else on_paper(label, files, own)
        request = Config.of(
            model=model,
            draft="lookup",
            memory=memory,
            threads=default_threads(),
            gpu_layers=0 if cards is None else "auto",
        )
        plan = plan_for(request, no_progress, store, cards)
        where = [note[8:-1] for note in plan.notes if note.startswith("Layers: ")] or ["all here"]
        passes = {size.nodes: size.pass_s for size in plan.sizes}
        row = (f"{passes[nodes]:.2f} s" for nodes in (1, 8, 32))
        streamed = readable(plan.plain.holding.streamed_bytes)
        limit = plan.comparison.bottleneck.resource
        print(f"| {label} | {where[0]} | {streamed} | {' | '.join(row)} | {limit} |")


def on_paper(name: str, files: ModelFiles, own: tuple[float, ...]) -> Cards:
    """A card that is not here, as fast as its memory and its arithmetic allow."""
    memory, rate, operations, link = PAPER[name]
    seconds = seconds_on_paper(rate, operations)
    way = Curve.through((n_bytes, 40e-6 + 2 * n_bytes / link) for n_bytes in (1 << 14, 1 << 20, 1 << 24))
    free = int(memory * _USABLE)
    card = Card(name, "on paper", free, int(memory), False, DeviceProfile(seconds, own, way))
    cards = Cards.of([card], usual_type(files))
    # The processor's figures are those of rearranged weights; cards know those of weights as in files.
    layer = sum(layer_sizes(files)) / len(layer_sizes(files))
    shares = [layer_seconds(cards, files, rows)[0] / (s * layer) for rows, s in zip(_ROWS, own, strict=True)]
    plain = tuple(s / share for s, share in zip(own, shares, strict=True))
    return replace(cards, own_seconds=plain)


def seconds_on_paper(rate: float, operations: float) -> tuple[float, ...]:
    """For a byte of weights, by rows."""
    return tuple(max(1 / rate, rows * _OPERATIONS / operations) / _EFFICIENCY for rows in _ROWS)


if __name__ == "__main__":
    main()
