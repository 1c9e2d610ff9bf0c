"""Compare drafters that were picked by hand with the one that `draft make` finds, untuned and tuned?

    edgespec draft make smollm2-135m --pass-seconds 0.7
    python -m benchmarks.drafters made=PATH [--target MODEL.gguf] [--widened-bytes 2147483648]
    python -m benchmarks.drafters --made --drop 18,21 14,17,20,23 --tune-minutes 20 --workload FILE
    python -m benchmarks.drafters --target LLAMA.gguf --drop --heads h=HEAD.gguf --widened-bytes 2147483648

Agreement on text that the target wrote (prompts that no drafter was chosen by), size, and the time of a step,
in alternating rounds. With --workload also the tokens a pass that trees of --budgets nodes yield along the
target's answers to questions in Spec-Bench's format, at all --temperatures and by category: these are counts,
which no other work on the machine changes. With --widened-bytes also tokens per second end to end: the
target, widened to that size and streamed within --memory, is drafted for by each, at the --temperatures.

With --made, `draft make` adds the drafter that it finds. With --tune-minutes each of these drafters has a
second row, tuned for so long with the built-in prompts; --tune-steps counts steps instead, which other
work on the machine does not change. An interrupted run resumes that tuning. Heads (--heads) read the
target's hidden states and say nothing alone, so they have end-to-end rows only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import edgespec
from benchmarks.along_texts import Yield, tables, write_answers, yields_along
from benchmarks.harness import parser_of
from benchmarks.pruning import write_pruned
from benchmarks.workload import FOLDER, smollm2, widened
from benchmarks.workload import PROMPTS as OTHER_PROMPTS
from edgespec.drafting.agreement import PROMPTS, AgreementMeter, write_sample_answers
from edgespec.drafting.make import MakeOptions, make_for
from edgespec.drafting.tuning.options import TuneOptions
from edgespec.drafting.tuning.tune import tune
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import PassRecord
from edgespec.llama.quantize import make_drafter

_PASS_S = 0.7  # of the target, by which drafters are compared while they are made


def main() -> None:
    options = _parse()
    target = options.target or smollm2()
    starts = {"Q4_0": _picked(target, "q4_0")}
    starts |= {f"less {layers}": _less(target, layers) for layers in options.drop}
    if options.made:
        starts["made"] = _made(target)
    picked: dict[str, Path] = {}
    for name, path in starts.items():
        picked[name] = path
        if options.tune_minutes or options.tune_steps:
            picked[f"{name}, tuned"] = _tuned(target, path, options)
    picked |= {name: Path(path) for name, _, path in (pair.partition("=") for pair in options.drafters)}
    rows = _agreement(target, picked, options)
    if options.workload:
        _print_yields(target, picked, options)
    if options.widened_bytes:
        wide = widened(target, options.widened_bytes)
        heads = {name: Path(path) for name, _, path in (pair.partition("=") for pair in options.heads)}
        rows += [{"drafter": name, "bytes": path.stat().st_size} for name, path in heads.items()]
        for temperature in options.temperatures:
            _add_speeds(rows, wide, picked | heads, temperature, options)
    print(json.dumps(rows))


def _print_yields(target: Path, drafters: dict[str, Path], options: argparse.Namespace) -> None:
    """Tokens a pass along the target's answers to the workload, as tables."""
    texts = write_answers(
        target, options.workload, options.questions, options.temperatures, options.answer_tokens
    )
    found: dict[str, list[Yield]] = {}
    for name, path in drafters.items():
        found[name] = yields_along(path, texts, options.budgets)
        for one in found[name]:
            print(name, one.temperature, one.nodes, one.overall, file=sys.stderr)
    print("\n".join(tables(found, options.category_nodes)))


def _add_speeds(
    rows: list[dict[str, object]],
    target: Path,
    drafters: dict[str, Path],
    temperature: float,
    options: argparse.Namespace,
) -> None:
    """Measure all drafters end to end, in alternating rounds."""
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in drafters}
    for _ in range(options.answer_rounds):
        for name, path in drafters.items():
            speeds[name].append(_end_to_end(target, path, temperature, options))
            print(name, temperature, speeds[name][-1], file=sys.stderr)
    for row in rows:
        if found := speeds.get(str(row["drafter"])):
            at = f" at {temperature:g}" if temperature else ""
            row[f"tokens_per_second{at}"] = round(statistics.median(speed for speed, _ in found), 2)
            row[f"tokens_per_pass{at}"] = round(statistics.median(per_pass for _, per_pass in found), 2)


def _tuned(target: Path, start: Path, options: argparse.Namespace) -> Path:
    """Tune a drafter on the built-in prompts; keep it, and resume if interrupted."""
    steps, minutes = options.tune_steps, options.tune_minutes
    how = f"{steps}-steps-{options.tune_answers}" if steps else f"{minutes:g}"
    path = start.with_name(f"{start.stem}-tuned-{how}.gguf")
    if not path.exists():
        found = TuneOptions(start=str(start), output=path, pass_s=_PASS_S, answers=options.tune_answers)
        found = replace(found, steps=steps) if steps else replace(found, minutes=minutes)
        for line in tune(str(target), found).description:
            print(line, file=sys.stderr)
    return path


def _agreement(
    target: Path, drafters: dict[str, Path], options: argparse.Namespace
) -> list[dict[str, object]]:
    paths = {"target itself": target} | drafters
    with edgespec.load(target, draft="lookup", context=1024) as engine:
        texts = write_sample_answers(engine, PROMPTS[1::2], options.tokens).samples
    rows: list[dict[str, object]] = []
    readers = {name: AgreementMeter(path, texts) for name, path in paths.items()}
    steps: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(options.rounds):
        for name, reader in readers.items():
            steps[name].append(reader.step_s())
    for name, reader in readers.items():
        found = reader.agreement(texts)
        rows.append(
            {
                "drafter": name,
                "top1": round(found.top1, 3),
                "top4": round(found.top4, 3),
                "tokens": found.tokens,
                "bytes": paths[name].stat().st_size,
                "step_ms": round(1000 * statistics.median(steps[name]), 2),
            }
        )
        reader.close()
        print(rows[-1], file=sys.stderr)
    return rows


def _end_to_end(
    target: Path, drafter: Path, temperature: float, options: argparse.Namespace
) -> tuple[float, float]:
    """Tokens per second and per pass of a streamed target."""
    records: list[PassRecord] = []
    with edgespec.load(
        target,
        draft=drafter,
        drafter="model",
        memory=options.memory,
        context=512,
        tree_budget=options.tree_budget,
    ) as engine:
        engine.generate(OTHER_PROMPTS[-1], GenerationConfig(max_tokens=8))
        engine.forget_texts()  # what other runs learned is no merit of this drafter
        for prompt in OTHER_PROMPTS[: options.prompts]:
            config = GenerationConfig(max_tokens=48, temperature=temperature, seed=1)
            records += engine.generate(prompt, config).passes[1:]
    tokens = sum(record.accepted + 1 for record in records)
    return tokens / sum(record.seconds for record in records), tokens / len(records)


def _made(target: Path) -> Path:
    """The drafter that `draft make` finds for a target whose passes take a while."""
    path = FOLDER / f"{target.stem}-made.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        make_for(str(target), MakeOptions(output=path, pass_s=_PASS_S))
    return path


def _less(target: Path, layers: str) -> Path:
    path = FOLDER / f"{target.stem}-drop-{layers.replace(',', '-')}.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        write_pruned(target, path, map(int, layers.split(",")))
    return path


def _picked(target: Path, quantization: str) -> Path:
    path = FOLDER / f"{target.stem}-{quantization}.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        make_drafter(target, path, quantization=quantization)
    return path


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("drafters", nargs="*", metavar="NAME=PATH", help="further drafters")
    parser.add_argument("--target", type=Path, help="default: the bundled demo model")
    parser.add_argument("--drop", nargs="*", default=["20", "18,21"], help="layers left out by hand")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--made", action="store_true", help="add what `draft make` finds")
    parser.add_argument("--workload", type=Path, help="questions in Spec-Bench's format")
    parser.add_argument("--questions", type=int, default=26, help="of the workload")
    parser.add_argument("--answer-tokens", type=int, default=96, help="of each answer to them")
    parser.add_argument("--budgets", type=int, nargs="*", default=[8, 16, 32], help="nodes of trees there")
    parser.add_argument("--category-nodes", type=int, default=16, help="that of these shown by category")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--widened-bytes", type=int, help="of the streamed target; none without this")
    parser.add_argument("--memory", type=int, default=1_200_000_000, help="bytes for everything")
    parser.add_argument("--tree-budget", type=int, help="of these trees; sized by cost without this")
    parser.add_argument("--prompts", type=int, default=4, help="of answers end to end")
    parser.add_argument("--tune-minutes", type=float, default=0.0, help="a tuned row beside each")
    parser.add_argument("--tune-steps", type=int, help="in place of minutes")
    parser.add_argument("--tune-answers", type=int, help="to learn from; as many as time allows without this")
    parser.add_argument("--heads", nargs="*", default=[], metavar="NAME=PATH", help="end to end only")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--answer-rounds", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
