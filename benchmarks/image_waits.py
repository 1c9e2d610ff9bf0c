"""How long an answer stands still while another request's image is read, and while text of that length is.

One client's answer runs; a second request comes with an image, then one with as many tokens of text. The
image is turned into embeddings before: that happens in a child process, and other answers run meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import edgespec
from edgespec.engine.engine import Engine
from edgespec.engine.requests import Request, RequestQueue

_BEFORE, _AFTER = 6, 6  # tokens of the running answer before the second request, and after its first token
_WORDS = ("The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "near", "the", "river")


def waits(engine: Engine, question: object) -> tuple[list[float], int]:
    """Seconds between the tokens of a running answer while a question is read, and the question's tokens."""
    config = edgespec.GenerationConfig(max_tokens=4096, stop=())
    running = Request([{"role": "user", "content": "Count from one to ten thousand in words."}], config)
    second = Request(question, config.with_(max_tokens=1))  # type: ignore[arg-type]
    source = RequestQueue()
    source.put(running)
    times: list[float] = []
    asked_at, tokens, left = 0.0, 0, _AFTER
    for event in engine.stream_many(source):
        if event.error is not None:
            raise event.error
        assert event.chunk is not None
        if event.request is running:
            times.append(time.perf_counter())
            if len(times) == _BEFORE:
                source.put(second)
                source.close()
                asked_at = times[-1]
            if tokens:
                left -= 1
                running.cancelled = left <= 0
        elif event.chunk.generation is not None:
            tokens = event.chunk.generation.prompt_tokens
    found = [later - earlier for earlier, later in pairwise(times) if later > asked_at]
    return found, tokens


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for the image and one for the text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("image", type=Path)
    parser.add_argument("--memory")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with edgespec.load(
        options.model,
        draft="none",
        context=4096,
        parallel=2,
        memory=options.memory,
        exact=options.exact or None,
    ) as engine:
        reader = engine.encoder.images
        assert reader is not None
        size = len(reader.read(options.image.read_bytes(), "the image"))
        for turn in range(options.rounds):
            words = " ".join(_WORDS[(turn + n) % len(_WORDS)] for n in range(size))
            told = {"type": "text", "text": f"{turn} What is this?"}  # no prefix of an earlier turn
            content = [told, {"type": "image", "path": str(options.image)}]
            for kind, question in (("image", content), ("text", f"{turn} {words}")):
                found, tokens = waits(engine, [{"role": "user", "content": question}])
                print(
                    f"{kind}: {tokens} tokens, longest wait {max(found):.2f} s, median "
                    f"{statistics.median(found):.2f} s, in all {sum(found):.1f} s for {len(found)} tokens",
                    flush=True,
                )


if __name__ == "__main__":
    main()
