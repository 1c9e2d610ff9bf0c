"""EdgeSpec's texts with a model's parts in all places, compared with the processor's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.pruning import write_pruned
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices.assignment import layer_sizes
from tests.card.runner import Runner
from tests.card.table import same_text
from tests.tiny import write_tiny
from tests.tiny_adapters import write_adapter
from tests.tiny_heads import write_pair

_TOKENS = 24
_RESERVED = 256 << 20  # of a card's memory, which EdgeSpec leaves to others
_STREAMED = {"offload": "stream"}


def compare_texts(runner: Runner, device: str, model: Path, folder: Path) -> None:
    """All places of a real model's layers, and tiny models with its vocabulary for what else there is."""
    pair = write_pair(folder, model)
    mixture = write_tiny(folder / "mixture.gguf", "qwen3moe", model)
    adapter = str(write_adapter(folder / "adapter.gguf"))
    drafter = {"draft": str(model), "draft_device": device, "tree_budget": 8}
    head = {"draft": str(pair.head), "drafter": "model", "tree_budget": 12}
    layers = len(layer_sizes(ModelFiles.of(read_header(model))))
    half, third = layers // 2, layers // 3
    attention = {"gpu_layers": "attention", "take_first": _RESERVED + model.stat().st_size}
    groups: list[tuple[Path, dict[str, dict[str, Any]]]] = [
        (
            model,
            {
                "processor": {"gpu_layers": 0},
                "all on the card": {"gpu_layers": "all"},
                "half of the layers": {"gpu_layers": half},
                "auto": {"gpu_layers": "auto"},
                "half of the layers, exact, trees": {
                    "gpu_layers": half,
                    "exact": True,
                    "draft": str(model),
                    "tree_budget": 8,
                },
                "all, exact, trees": {
                    "gpu_layers": "all",
                    "exact": True,
                    "draft": str(model),
                    "tree_budget": 8,
                },
                "attention, little memory": attention,
                "attention, little memory, streamed": {**attention, **_STREAMED},
                "drafter there": {"gpu_layers": 0, **drafter},
                "a third of the layers, the rest streamed": {"gpu_layers": third, **_STREAMED},
                "a third of the layers, the rest streamed, exact": {
                    "gpu_layers": third,
                    "exact": True,
                    **_STREAMED,
                },
                "memory taken before loading": {"gpu_layers": "all", "take_before": 96 << 20},
                "memory taken after loading": {"gpu_layers": "all", "take_after": 0},
            },
        ),
        (
            mixture,
            {
                "processor": {"gpu_layers": 0},
                "2 layers, experts streamed": {"gpu_layers": 2, **_STREAMED},
                "attention, experts streamed": {"gpu_layers": "attention", **_STREAMED},
            },
        ),
        (
            pair.target,
            {
                "processor": {"gpu_layers": 0},
                "3 layers and a head": {"gpu_layers": 3, **head},
                "the same, streamed": {"gpu_layers": 3, **head, **_STREAMED},
            },
        ),
        (
            pair.target,
            {
                "processor and an adapter": {"gpu_layers": 0, "lora": [adapter]},
                "3 layers and an adapter": {"gpu_layers": 3, "lora": [adapter]},
            },
        ),
    ]
    for path, cases in groups:
        first: dict[str, Any] = {}
        for label, options in cases.items():
            found = answer(runner, f"{path.name}, {label}", path, device, options, first)
            first = first or found


def without_middle(model: Path, folder: Path) -> Path:
    """The first three layers of a model and its last one, for devices that take minutes for all of them."""
    short = folder / f"short-{model.name}"
    if not short.exists():
        layers = len(layer_sizes(ModelFiles.of(read_header(model))))
        partial = short.with_suffix(".partial")
        write_pruned(model, partial, range(3, layers - 1))
        partial.replace(short)
    return short


def answer(
    runner: Runner,
    label: str,
    model: Path,
    device: str,
    options: dict[str, Any],
    first: dict[str, Any] | None = None,
    *,
    tokens: int = _TOKENS,
) -> dict[str, Any]:
    """An answer, compared with the first one; empty if there is none."""
    if not runner.has_time(label):
        return {}
    order = {"model": str(model), "device": device, "tokens": tokens}
    order |= {
        name: options.pop(name) for name in ("take_first", "take_before", "take_after") if name in options
    }
    order |= {"options": options, "least_memory": options.get("offload") == "stream"}
    found = runner.child("tests.card.answers", json.dumps(order))
    failed = "error" in found
    if not failed:
        alone = "take_after" in order  # its prompt is another one
        found["same"] = same_text(found if alone or not first else first, found)
        runner.faults += "NO near-tie" in found["same"]
    runner.results.setdefault("answers", []).append({"label": label, **found})
    runner.save()
    said = found["error"] if failed else f"{found['same']}; {found['layers'] or 'all here'}"
    runner.say(f"{label}: {said}")
    return {} if failed else found
