"""Many texts in shared passes: tokens per second of all, of each, and the wait for the first token.

    python -m benchmarks.parallel [--texts 1 4 16 48] [--cap 1300] [--tokens 64] [--rounds 3]

Two targets: the widened SmolLM2-135M-Instruct of benchmarks.answers, streamed in a memory control group, and
the default model in memory, beside llama.cpp's own batched decoding of as many rows. Each number of texts has
a process of its own, in exact decoding, without a drafter and with that of benchmarks.answers. Speeds are
medians over the rounds, of the passes that extend all texts. Every text is compared with the one that its
prompt gave before, which for the first ones is the text alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp

import edgespec
from benchmarks.harness import measured_apart, parser_of
from benchmarks.workload import FOLDER, PROMPTS, q4_0, smollm2, widened
from edgespec.bench.rows.shared_rows import measure_texts, texts_of
from edgespec.generation.config import GenerationConfig
from edgespec.machine.cores import default_threads
from edgespec.profiles.stream_rate import StreamRate
from edgespec.progress import no_progress

_CONTEXT = 256  # most tokens of a prompt and its answer


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cap", type=int, default=1300, help="megabytes (10^6 bytes) of the control group")
    parser.add_argument("--target-bytes", type=int, default=1_840_000_000)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--texts", type=int, nargs="*", default=[1, 4, 16, 48])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", nargs="*", default=["none", "drafter"], choices=["none", "drafter"])
    parser.add_argument("--only", choices=["streamed", "resident"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    target = widened(q4_0(), options.target_bytes, options.folder)
    if options.one:
        place, draft, texts = options.one.split(",")
        print(json.dumps(measure(target if place == "streamed" else smollm2(), draft, int(texts), options)))
        return
    rows: list[dict[str, Any]] = []
    for place in [options.only] if options.only else ["streamed", "resident"]:
        if place == "streamed":
            row_of(place, "none", 1, options)  # packs the weights
        known: dict[str, list[int]] = {}
        for texts in options.texts:
            for draft in options.drafts:
                rows.append(row_of(place, draft, texts, options))
                compare(rows[-1], known)
                show(rows[-1], rows)
            if place == "resident":
                rows.append(row_of_llama_cpp(texts, options))
                show(rows[-1], rows)
    print(json.dumps(rows))


def compare(row: dict[str, Any], known: dict[str, list[int]]) -> None:
    """Count the texts that are what their prompt gave before."""
    answers = row.pop("answers")
    again = {prompt: tokens for prompt, tokens in answers.items() if prompt in known}
    row["identical"] = f"{sum(known[p] == tokens for p, tokens in again.items())} of {len(again)}"
    known.update((prompt, tokens) for prompt, tokens in answers.items() if prompt not in known)


def show(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print a row, and how it compares with a single text drafted for in the same way."""
    one = next(r for r in rows if (r["place"], r["draft"]) == (row["place"], row["draft"]))
    gain = row["tokens_per_second"] / one["tokens_per_second"]
    print(
        f"{row['place']:>9}, {row['texts']:3} texts, {row['draft']:>9}:"
        f" {row['tokens_per_second']:7.2f} tokens/s ({gain:.1f}),"
        f" first token after {row['first_token_s']:6.2f} s",
        *(
            f"{name} {value if isinstance(value, str) else format(value, '.3f')}"
            for name in (
                "tokens_per_pass",
                "nodes_per_pass",
                "pass_s",
                "cpu_s",
                "bound",
                "outside",
                "identical",
            )
            if (value := row.get(name)) is not None
        ),
        sep=", ",
        flush=True,
    )


def row_of(place: str, draft: str, texts: int, options: argparse.Namespace) -> dict[str, Any]:
    """One setting in a process of its own."""
    which = f"{place},{draft},{texts}"
    cap = options.cap * 10**6 if place == "streamed" else None
    found = measured_apart("benchmarks.parallel", [*sys.argv[1:], "--one", which], cap)
    return {"place": place, "draft": draft, "texts": texts, **found}


def row_of_llama_cpp(texts: int, options: argparse.Namespace) -> dict[str, Any]:
    """llama.cpp's own batched decoding of as many rows of the model in memory."""
    sizes = {"prompt": 40, "tokens": options.tokens, "texts": texts, "threads": default_threads()}
    arguments = [f"--model={smollm2()}", *(f"--{name}={n}" for name, n in sizes.items())]
    program = "edgespec.llama.plain_batches"
    runs = [measured_apart(program, arguments) for _ in range(options.rounds)]
    middle = sorted(runs, key=lambda run: float(run["speed_tg"]))[len(runs) // 2]
    return {
        "place": "resident",
        "draft": "llama.cpp",
        "texts": texts,
        "tokens_per_second": middle["speed_tg"],
        "first_token_s": middle["t_pp"] + middle["t_tg"] / options.tokens,
        "pass_s": middle["t_tg"] / options.tokens,
        "cpu_s": middle["cpu_tg"] / options.tokens,
    }


def measure(target: Path, draft: str, texts: int, options: argparse.Namespace) -> dict[str, Any]:
    """So many texts at once; and the share of the time that is spent outside of llama_decode."""
    drafter = "none" if draft == "none" else str(q4_0() if target == smollm2() else smollm2())
    memory = int(0.93 * options.cap * 10**6) if target != smollm2() else None
    config = GenerationConfig(max_tokens=options.tokens)
    prompts = texts_of([f"{prompt} Please." for prompt in PROMPTS], texts)
    with edgespec.load(
        target,
        context=_CONTEXT,
        exact=True,
        memory=memory,
        draft=drafter,
        parallel=texts,
        text_tokens=options.tokens + 60,
        learn=False,
    ) as engine:
        engine.generate(PROMPTS[0], config.with_(max_tokens=4))
        rate = StreamRate(engine.target.model.weights)
        with decode_costs() as decodes:
            start = time.perf_counter()
            row = measure_texts(
                engine, config, prompts, texts, repetitions=options.rounds, seconds=1e6, report=no_progress
            )
            seconds = time.perf_counter() - start
        if "error" in row:
            raise SystemExit(str(row["error"]))
        read_s = row["streamed_bytes_per_pass"] / rate.rate if rate.rate else 0.0
    names = ("first_token_s", "tokens_per_pass", "nodes_per_pass", "pass_s", "draft_s", "wait_s", "samples")
    return {
        "tokens_per_second": sorted(row["samples"])[len(row["samples"]) // 2],
        **{name: row[name] for name in names},
        # How much longer a pass takes than the longer of its two parts.
        "bound": row["pass_s"] / max(read_s, row["pass_s"] - row["wait_s"]),
        # Processor time of a pass that extends all texts: the commonest, as long as answers do not end.
        "cpu_s": statistics.median(
            cpu for n, _, cpu in decodes if n == max(row["rows"], key=row["rows"].get)
        ),
        "outside": 1 - sum(wall for _, wall, _ in decodes) / seconds,
        "answers": dict(zip(prompts, row["answers"], strict=True)),
    }


@contextmanager
def decode_costs() -> Iterator[list[tuple[int, float, float]]]:
    """Rows, seconds and processor seconds of every llama_decode."""
    costs: list[tuple[int, float, float]] = []
    decode = llama_cpp.llama_decode

    def timed(context: Any, batch: Any) -> int:
        start, busy = time.perf_counter(), time.process_time()
        code: int = decode(context, batch)
        costs.append((batch.n_tokens, time.perf_counter() - start, time.process_time() - busy))
        return code

    llama_cpp.llama_decode = timed
    try:
        yield costs
    finally:
        llama_cpp.llama_decode = decode


if __name__ == "__main__":
    main()
