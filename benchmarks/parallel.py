"""Tokens per second of many texts in shared passes, against the same texts one after the other.

    python -m benchmarks.parallel [--texts 1 4 16] [--cap 1300] [--tokens 64]

Two targets: the widened SmolLM2-135M-Instruct of benchmarks.answers, streamed in a memory control group, and
the default model in memory. Each number of texts is generated in a process of its own, in exact decoding,
without a drafter, and for one text also with the drafter of benchmarks.answers. Every text is compared with
the one that the same prompt gave alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

import edgespec
from benchmarks.workload import PROMPTS, q4_0, smollm2
from edgespec.bench.rows.capped import run_capped
from edgespec.engine.requests import Request
from edgespec.generation.config import GenerationConfig
from edgespec.models.gguf.widen import widen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cap", type=int, default=1300, help="megabytes (10^6 bytes) of the control group")
    parser.add_argument("--target-bytes", type=int, default=1_840_000_000)
    parser.add_argument("--folder", type=Path, default=user_cache_path("edgespec") / "bench-models")
    parser.add_argument("--texts", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", choices=["streamed", "resident"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    target = options.folder / f"smollm2-q4_0-widened-{options.target_bytes}.gguf"
    if options.one:
        place, draft, texts = options.one.split(",")
        print(json.dumps(measure(target if place == "streamed" else smollm2(), draft, int(texts), options)))
        return
    if not target.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        widen(q4_0(), target, options.target_bytes)
    rows = []
    for place in [options.only] if options.only else ["streamed", "resident"]:
        if place == "streamed":
            row_of(place, "none", 1, options)  # packs the weights
        alone: dict[str, list[int]] = {}
        for draft, texts in [("none", n) for n in options.texts] + [("drafter", 1)]:
            row = row_of(place, draft, texts, options)
            answers = row.pop("answers")
            for prompt, tokens in answers.items():
                alone.setdefault(prompt, tokens)
            row["identical"] = sum(alone[prompt] == tokens for prompt, tokens in answers.items())
            rows.append(row)
            print(
                f"{place:>9}, {texts:3} texts, {draft:>7}: {row['tokens_per_second']:7.2f} tokens/s,"
                f" {row['pass_s']:6.3f} s a pass, {row['outside']:.1%} of it outside llama.cpp,"
                f" {row['identical']} of {len(answers)} texts as before",
                flush=True,
            )
    print(json.dumps(rows))


def row_of(place: str, draft: str, texts: int, options: argparse.Namespace) -> dict[str, Any]:
    """One setting in a process of its own."""
    which = f"{place},{draft},{texts}"
    command = [sys.executable, "-m", "benchmarks.parallel", *sys.argv[1:], "--one", which]
    done = run_capped(command, options.cap * 10**6 if place == "streamed" else None)
    if done.status:
        raise SystemExit(f"{which} ended with status {done.status}")
    return {"place": place, "draft": draft, "texts": texts, **json.loads(done.output.splitlines()[-1])}


def measure(target: Path, draft: str, texts: int, options: argparse.Namespace) -> dict[str, Any]:
    """Texts at once: tokens per second in all while decoding, and the median pass."""
    drafter = "none" if draft == "none" else str(q4_0() if target == smollm2() else smollm2())
    cap = int(0.93 * options.cap * 10**6) if target != smollm2() else None
    config = GenerationConfig(max_tokens=options.tokens)
    prompts = [PROMPTS[n % len(PROMPTS)] + " Please." * (n // len(PROMPTS)) for n in range(texts)]
    with edgespec.load(target, context=2048, exact=True, memory=cap, draft=drafter, learn=False) as engine:
        engine.generate(PROMPTS[0], config.with_(max_tokens=4))
        start = time.perf_counter()
        answers, records, outside = {}, {}, []
        for event in engine.stream_many(
            [Request(prompt, config, key=prompt) for prompt in prompts], parallel=texts
        ):
            assert event.chunk is not None
            if event.chunk.record is not None:
                record = event.chunk.record
                records[id(record)] = record
                outside.append((record.seconds - record.verify_s) / record.seconds)
            if event.chunk.generation is not None:
                answers[event.request.key] = event.chunk.generation.tokens
        seconds = time.perf_counter() - start
    return {
        "tokens_per_second": sum(map(len, answers.values())) / seconds,
        "pass_s": statistics.median(record.seconds for record in records.values()),
        "outside": statistics.median(outside),
        "answers": answers,
    }


if __name__ == "__main__":
    main()
