"""Layers on a graphics card: the same text wherever they are, and what the planner expects of larger cards.

    python -m benchmarks.devices                        # on the first device that llama.cpp finds
    python -m benchmarks.devices --device Vulkan0
    python -m benchmarks.devices --on-paper        # computed: a 27B and a 70B on cards that are not here

Texts are compared with that of the processor. Kernels round differently, so they may part at near-ties; it is
said after how many tokens they do.

--on-paper needs no device and no model: files get the headers of a dense 27B, a 70B and a drafter in Q4_K and
Q6_K, and no weights. The speeds of cards, links, processor and disk are given here, and the drafter agrees as
often as is usual; the planner computes the rest, as `edgespec plan` does. Nothing is measured.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import edgespec
from benchmarks.harness import parser_of, print_head, write_hollow
from benchmarks.workload import q4_0
from edgespec import GenerationConfig
from edgespec.base.progress import no_progress
from edgespec.base.units import readable
from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.errors import MemoryLimitError
from edgespec.machine.cores import default_threads
from edgespec.measure.derived_passes import DerivedPasses
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.gguf.weightless import ModelShape
from edgespec.models.hub import catalog
from edgespec.models.hub.inspection import inspect_model
from edgespec.planning import host_products
from edgespec.planning.devices import assignment
from edgespec.planning.devices.assignment import usual_type
from edgespec.planning.devices.cards import Card, Cards
from edgespec.planning.devices.finding import find_devices
from edgespec.planning.report.model_report import plan_for
from edgespec.profiles.figures import DeviceProfile
from edgespec.profiles.store import DiskProfile, PassProfile, ProfileStore, disk_key, machine_identity

PROMPT = "Why is the sky blue?"
CONTEXT = 512

# On paper: bytes of memory, and per second: bytes from it, and operations.
PAPER = {
    "8 GB": (8e9, 270e9, 20e12),
    "12 GB": (12e9, 360e9, 25e12),
    "16 GB": (16e9, 450e9, 45e12),
    "24 GB": (24e9, 900e9, 70e12),
}
LINKS = (12e9, 24e9)  # bytes per second
DENSE_27B = ModelShape("llama", 64, 5120, 19_456, 40, 8, vocabulary=151_936)
DRAFTER = "llama3.2-1b"
PROCESSOR = (60e9, 1.5e12)  # bytes from memory and operations per second, with rearranged weights
_PLAIN = (1.3, 3.7, 2.7)  # times as long with weights as in files, by _ROWS: measured beside the H200
DISK = 3.5e9  # bytes per second
_USABLE = 0.93  # of a card's memory, beside what the system and its screen take
_EFFICIENCY = 0.6  # of the memory's and the arithmetic's speed that products reach
_OPERATIONS = 4  # for a byte of weights of about four bits and a row
_ROWS = (1, 8, 32)
_SHOWN_ROWS = (1, 8, 32, 60)


def main() -> None:
    """Compare texts, or plan on paper."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="default: the bundled demo model")
    parser.add_argument("--draft", help="for the rows with a drafter; default: the small model in Q4_0")
    parser.add_argument("--device", help="default: the first one")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--on-paper", action="store_true", help="plan for cards that are not here")
    parser.add_argument("--memory", type=float, default=64.0, help="GiB beside the cards on paper")
    parser.add_argument("--context", type=int, default=4096, help="tokens, on paper")
    options = parser.parse_args()
    if options.on_paper:
        plan_on_paper(int(options.memory * (1 << 30)), options.context)
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


def plan_on_paper(memory: int, context: int) -> None:
    """Predict speeds of two models without a card, and with each of those on paper behind each link."""
    entries = catalog.entries()
    large, small = entries["llama3.3-70b"].shape, entries[DRAFTER].shape
    assert large is not None
    assert small is not None
    own = seconds_on_paper(*PROCESSOR)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for module in (assignment, host_products):
            stack.enter_context(patch.object(module, "measured_products", lambda _type: ((1.0,) * 3, _PLAIN)))
        stack.enter_context(
            patch.object(DerivedPasses, "curve", lambda _, headers: paper_curve(headers, own))
        )
        store = ProfileStore(folder / "profiles")
        drafter = write_hollow(folder / f"{DRAFTER}-q4_k_m.gguf", small)
        for name, shape in {"27b": DENSE_27B, "70b": large}.items():
            model = write_hollow(folder / f"dense-{name}-q4_k_m.gguf", shape)
            files = remember_passes(model, own, store)
            print(f"\n{name}: {readable(files.tensor_bytes)} of weights, {readable(memory)} of memory\n")
            rows = [f"{rows} row{'s' * (rows > 1)}" for rows in _SHOWN_ROWS]
            print_head("card, link", "on the card", "weights here", *rows, "tokens/s", "with trees", "nodes")
            for label in ("none", *PAPER):
                for link in LINKS if label != "none" else (0.0,):
                    cards = None if label == "none" else on_paper(label, link, files, own)
                    print_plan(
                        f"{label}, {link / 1e9:.0f} GB/s" if cards else label,
                        model,
                        drafter,
                        memory,
                        context,
                        cards,
                        store,
                    )


def remember_passes(model: Path, own: Sequence[float], store: ProfileStore) -> ModelFiles:
    """Store what passes of a model take on the processor on paper, and its disk."""
    files = ModelFiles.of_headers(inspect_model(str(model), no_progress).headers)
    key = machine_identity() | {"threads": str(default_threads()), "model": files.headers[0].fingerprint}
    store.put(key, PassProfile(paper_curve(files.headers, own)))
    store.put(disk_key(model), DiskProfile(DISK, DISK, 1 << 20, 4))
    return files


def paper_curve(headers: Sequence[GGUFHeader], own: Sequence[float]) -> Curve:
    """Seconds of passes on the processor on paper."""
    n_bytes = ModelFiles.of_headers(headers).tensor_bytes
    return Curve.through((rows, s * n_bytes) for rows, s in zip(_ROWS, own, strict=True))


def print_plan(
    label: str,
    model: Path,
    drafter: Path,
    memory: int,
    context: int,
    cards: Cards | None,
    store: ProfileStore,
) -> None:
    """Print a row of the table."""
    request = Config.of(
        model=model,
        draft=drafter,
        memory=memory,
        context=context,
        threads=default_threads(),
        gpu_layers=0 if cards is None else "auto",
    )
    plan = plan_for(request, no_progress, store, cards, estimated=True)
    where = next((note[8:-1] for note in plan.notes if note.startswith("Layers: ")), "nothing")
    if cards is not None:
        name = cards.devices[0].name
        where = re.sub("^0 here, [0-9]+", "all", where.replace(f" on {name}", "")).replace(
            "the feed-forward weights", "FFN"
        )
        where += ", drafter" if f"The drafter is on {name}." in plan.notes else ""
    sent = next((note for note in plan.notes if note.startswith("Weights in memory")), "")
    here = "streamed" if plan.plain.holding.streamed_bytes else "rearranged"
    if sent:
        here = (
            re.sub("[^0-9]*([0-9]+).*", r"sent from \1 rows", sent) if "passes of" in sent else "sent always"
        )
    again = re.search("passes of ([0-9]+) rows or more, they are read", " ".join(plan.notes))
    here += f", read again from {again[1]} rows" if again else ""
    passes = {size.nodes: size.pass_s for size in plan.sizes}
    times = " | ".join(f"{passes[rows]:.2f} s" if rows in passes else "" for rows in _SHOWN_ROWS)
    speeds = f"{plan.plain.tokens_per_second:.1f} | {plan.chosen.tokens_per_second:.1f} | {plan.chosen.nodes}"
    print(f"| {label} | {where} | {here} | {times} | {speeds} |", flush=True)


def on_paper(name: str, link: float, files: ModelFiles, own: tuple[float, ...]) -> Cards:
    """A card that is not here, as fast as its memory and its arithmetic allow."""
    memory, rate, operations = PAPER[name]
    seconds = seconds_on_paper(rate, operations)
    plain = tuple(s * slowness for s, slowness in zip(own, _PLAIN, strict=True))
    way = Curve.through((n_bytes, 40e-6 + 2 * n_bytes / link) for n_bytes in (1 << 14, 1 << 20, 1 << 24))
    free = int(memory * _USABLE)
    card = Card(f"{name} card", "on paper", free, int(memory), False, DeviceProfile(seconds, plain, way))
    return Cards.of([card], usual_type(files))


def seconds_on_paper(rate: float, operations: float) -> tuple[float, ...]:
    """For a byte of weights, by rows."""
    return tuple(max(1 / rate, rows * _OPERATIONS / operations) / _EFFICIENCY for rows in _ROWS)


if __name__ == "__main__":
    main()
