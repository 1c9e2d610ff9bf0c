"""What `plan` predicts beside what is measured, for some budgets of memory and numbers of texts.

    python -m benchmarks.predictions --target big.gguf --draft small.gguf --memory 3GB 4GB 6GB
        [--texts 8 24] [--tokens 48] [--questions 4]

For each budget, one process answers questions of `bench` one after the other, without drafts and with trees
sized while running: the median speed of decoding counts. A process for each number of texts continues as
many passages of the same length at once, without drafts: their prompts count, as they do in a plan. Texts
have as many tokens of prompt as of answer. Predictions are made before the runs and after them, since passes
tell the plan how fast the disk is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import edgespec
from benchmarks.harness import measured_apart, parser_of, print_head
from edgespec.bench.rows.workload import own_questions
from edgespec.config import Config
from edgespec.costs.batches import TextLengths
from edgespec.engine.requests import Request
from edgespec.generation.config import GenerationConfig
from edgespec.planning.report.model_report import plan_for
from edgespec.progress import no_progress

_CONTEXT = 512  # of answers to questions
_PASSAGES = Path(__file__).resolve().parents[1] / "docs"
Speeds = dict[str, float]
"""Tokens per second by the way to run: plain, auto, or a number of texts."""


def main() -> None:
    options = _parse()
    if options.one:
        print(json.dumps(_measured(options)))
        return
    print_head("memory", "way", "predicted before", "predicted after", "measured", "after over measured")
    for memory in options.memory:
        before = _predicted(options, memory)
        found: Speeds = {}
        for way in ("alone", *map(str, options.texts)):
            arguments = [*sys.argv[1:], "--one", way, "--memory", memory]
            result = measured_apart("benchmarks.predictions", arguments)
            result.pop("peak_bytes")
            found |= result
        after = _predicted(options, memory)
        for way, measured in found.items():
            print(
                f"| {memory} | {way} | {before[way]:.3f} | {after[way]:.3f} | {measured:.3f} "
                f"| {after[way] / measured:.2f} |",
                flush=True,
            )


def _predicted(options: argparse.Namespace, memory: str) -> Speeds:
    """The speeds that `plan` expects."""
    asked = Config.of(model=options.target, draft=options.draft, memory=memory, context=_CONTEXT)
    report = plan_for(asked, no_progress)
    found = {"plain": report.plain.tokens_per_second, "auto": report.chosen.tokens_per_second}
    report = plan_for(asked.with_(context=2 * options.tokens), no_progress)
    assert report.batch.cells.tokens == 2 * options.tokens
    assert TextLengths.of(2 * options.tokens).answer == options.tokens
    sizes = {str(size.sequences): size.tokens_per_second for size in report.batch.sizes}
    return found | {str(texts): sizes[str(texts)] for texts in options.texts}


def _measured(options: argparse.Namespace) -> Speeds:
    if options.one == "alone":
        return {way: _answering(options, way) for way in ("plain", "auto")}
    return {options.one: _at_once(options, int(options.one))}


def _answering(options: argparse.Namespace, way: str) -> float:
    """The median speed of answers to questions."""
    config = GenerationConfig(max_tokens=options.tokens)
    with edgespec.load(
        options.target,
        draft=options.draft if way == "auto" else "none",
        memory=options.memory[0],
        context=_CONTEXT,
        learn=False,
    ) as engine:
        speeds = []
        for question in own_questions()[: options.questions]:
            engine.forget_texts()
            made = engine.generate(question.text, config)
            tokens = sum(one.accepted + 1 for one in made.passes)
            speeds.append(tokens / sum(one.seconds for one in made.passes))
    return statistics.median(speeds)


def _at_once(options: argparse.Namespace, texts: int) -> float:
    """Tokens per second of all answers, from the beginning of the first prompt to the last token."""
    with edgespec.load(
        options.target,
        draft="none",
        memory=options.memory[0],
        context=2 * options.tokens,
        parallel=texts,
        text_tokens=2 * options.tokens,
        learn=False,
    ) as engine:
        config = GenerationConfig(max_tokens=options.tokens)
        requests = [
            Request(passage, config, raw=True, key=number)
            for number, passage in enumerate(_passages(engine, texts, options.tokens))
        ]
        made = 0
        start = time.monotonic()
        with contextlib.closing(engine.stream_many(requests, parallel=texts)) as events:
            for event in events:
                if event.error is not None:
                    raise event.error
                if event.chunk is not None and event.chunk.generation is not None:
                    made += len(event.chunk.generation.tokens)
        return made / (time.monotonic() - start)


def _passages(engine: edgespec.Engine, count: int, tokens: int) -> list[list[int]]:
    """Different passages of the documentation, of so many tokens each."""
    words = " ".join(path.read_text("utf-8") for path in sorted(_PASSAGES.glob("*.md"))).split()
    texts = (" ".join(words[start : start + tokens]) for start in range(0, count * tokens, tokens))
    return [engine.encoder.encode(text, raw=True)[:tokens] for text in texts]


def _parse() -> Any:
    parser = parser_of(__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--memory", nargs="+", required=True, help="budgets, such as 4GB")
    parser.add_argument("--texts", type=int, nargs="*", default=[8, 24])
    parser.add_argument("--tokens", type=int, default=48, help="of each prompt and answer")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
