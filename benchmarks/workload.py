"""Prompts of our own, varied in kind, and the small models that the figures are made with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from benchmarks.pruning import write_pruned
from benchmarks.widen import widen
from edgespec.llama.quantize import make_drafter
from edgespec.models.hub import catalog

FOLDER = Path(os.environ.get("EDGESPEC_BENCH_MODELS", user_cache_path("edgespec") / "bench-models"))
"""Where models that are made for measuring are kept."""

PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a fox and a crow who share a house.",
    "Explain recursion to a ten year old.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate into French: The train to the coast leaves at seven in the morning.",
    "List five ways to save water at home.",
    "Summarise: Bees visit flowers for nectar. Pollen sticks to them, and so plants are fertilised.",
    "If a shirt costs 20 dollars and is reduced by 15 percent, what does it cost?",
    "Write a polite letter to a neighbour about noise at night.",
    "What are the differences between a lake and a sea?",
    "Compose a poem about the first snow.",
    "How does a bicycle stay upright?",
    "Write SQL that lists the ten customers with the most orders.",
    "Give me a recipe for lentil soup.",
    "Who was Ada Lovelace, and what is she known for?",
    "Describe a market square in the early morning.",
    "Explain how a refrigerator works.",
    "Write a dialogue between a teacher and a late pupil.",
    "What should I pack for three days of hiking?",
    "Name three causes of the French Revolution and explain one.",
    "Correct the grammar: He don't has no time to went there.",
    "Write a C program that reverses a string.",
    "Plan a week of meals for a vegetarian.",
    "What is the meaning of 'a stitch in time saves nine'?",
)


def smollm2() -> Path:
    """The default model."""
    return catalog.find(None)


def drafter(name: str, make: Callable[[Path, Path], object]) -> Path:
    """A drafter made from the default model, kept in the cache folder."""
    path = FOLDER / f"smollm2-{name}.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        make(smollm2(), path)
    return path


def q4_0() -> Path:
    """Requantized to Q4_0: agrees with the target on about 0.73 of greedy tokens."""
    return drafter("q4_0", partial(make_drafter, quantization="q4_0"))


def dropped() -> Path:
    """Layers 18 and 21 dropped: agrees on about 0.63."""
    return drafter("drop-18-21", partial(write_pruned, layers=(18, 21)))


def dropped_four() -> Path:
    """Layers 14, 17, 20 and 23 dropped: agrees on about 0.5."""
    return drafter("drop-14-17-20-23", partial(write_pruned, layers=(14, 17, 20, 23)))


def widened(source: Path, target_bytes: int, folder: Path = FOLDER) -> Path:
    """A model of about `target_bytes` with the tokens of `source`, made once and kept in the folder."""
    path = folder / f"{source.stem}-widened-{target_bytes}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        widen(source, path, target_bytes)
    return path


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; none if there is no file, and no half line at its end."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                print(f"{path}: a line is not JSON and is left out.", file=sys.stderr)
