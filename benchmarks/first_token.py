"""Seconds to the first token of a streamed pair: prompts read with the first tree, and before it.

    python -m benchmarks.first_token --target big.gguf --drafter small.gguf --memory 4GB

Both ways in turn, in one process; medians. The models are loaded, and nothing of the prompt is known.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import edgespec
from edgespec import GenerationConfig
from edgespec.engine.target import Target

PROMPTS = (
    "Write a Python function that reverses a linked list.",
    "Why is the sky blue?",
    "Name three uses of a paper clip, one in a sentence each.",
)


def main() -> None:
    """Measure, and print one line for each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"before the first tree": [], "with the first tree": []}
    with edgespec.load(
        options.target, draft=options.drafter, memory=options.memory, offload="stream", learn=False
    ) as engine:
        for _ in range(options.rounds):
            for prompt in PROMPTS:
                for way in seconds:
                    with alone(way == "before the first tree"):
                        seconds[way].append(to_first_token(engine, prompt))
    for way, found in seconds.items():
        print(f"prompt read {way}: {statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f})")


def to_first_token(engine: edgespec.Engine, prompt: str) -> float:
    """Seconds from the question to the first token."""
    engine.target.rewind(0)
    start = time.perf_counter()
    chunks = engine.stream(prompt, GenerationConfig(max_tokens=4))
    try:
        next(chunk for chunk in chunks if chunk.tokens)
        return time.perf_counter() - start
    finally:
        chunks.close()


@contextmanager
def alone(apart: bool) -> Iterator[None]:
    """Read prompts in passes of their own within the block."""
    usual = Target.most_unread
    if apart:
        Target.most_unread = property(lambda _target: 0)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Target.most_unread = usual  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
