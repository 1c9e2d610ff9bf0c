"""How good are drafters that were picked by hand, and the one that `draft make` finds?

    edgespec draft make smollm2-135m --pass-seconds 0.7
    edgespec draft tune smollm2-135m --from UNTUNED --minutes 10 --output TUNED
    python -m benchmarks.drafters made=PATH [--target MODEL.gguf] [--widened-bytes 2147483648]
    python -m benchmarks.drafters untuned=UNTUNED tuned=TUNED --drop --budgets 8 16 32 --workload FILE

Agreement on text that the target wrote (prompts that no drafter was chosen by), size, and the time of a step,
in alternating rounds. With --workload the prompts are questions in Spec-Bench's format, in turn over their
categories, and the agreement is also given by category. With --budgets also the tokens a pass that greedy
trees of so many nodes yield along this text. With --widened-bytes also tokens per second end to end: the
target, widened to that size and streamed within --memory, is drafted for by each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from platformdirs import user_cache_path

import edgespec
from benchmarks.trees import questions_of
from benchmarks.workload import PROMPTS as OTHER_PROMPTS
from benchmarks.workload import smollm2
from edgespec.drafting.agreement import PROMPTS, Reader, write_texts
from edgespec.drafting.tuning.judging import tokens_per_pass
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import PassRecord
from edgespec.models.gguf.widen import widen
from edgespec.models.llama.quantize import make_drafter

_LONGEST_QUESTION = 1500  # characters
FOLDER = user_cache_path("edgespec") / "bench-models"


def main() -> None:
    options = _parse()
    target = options.target or smollm2()
    picked = {"q4_0": _picked(target, "q4_0")}
    for layers in options.drop:
        picked[f"less {layers}"] = _picked(target, "keep", tuple(map(int, layers.split(","))))
    for pair in options.drafters:
        name, _, path = pair.partition("=")
        picked[name] = Path(path)
    rows = _agreement(target, picked, options)
    if options.widened_bytes:
        wide = FOLDER / f"{target.stem}-widened-{options.widened_bytes}.gguf"
        if not wide.exists():
            widen(target, wide, options.widened_bytes)
        speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in picked}
        for _ in range(options.answer_rounds):
            for name, path in picked.items():
                speeds[name].append(_end_to_end(wide, path, options))
                print(name, speeds[name][-1], file=sys.stderr)
        for row in rows:
            if row["drafter"] in speeds:
                found = speeds[str(row["drafter"])]
                row["tokens_per_second"] = round(statistics.median(speed for speed, _ in found), 2)
                row["tokens_per_pass"] = round(statistics.median(per_pass for _, per_pass in found), 2)
    print(json.dumps(rows))


def _agreement(
    target: Path, drafters: dict[str, Path], options: argparse.Namespace
) -> list[dict[str, object]]:
    paths = {"target itself": target} | drafters
    categories, prompts = [""] * len(PROMPTS[1::2]), list(PROMPTS[1::2])
    if options.workload:
        questions = [q for q in questions_of(options.workload) if len(q.prompt) < _LONGEST_QUESTION]
        categories = [question.category for question in questions[: options.questions]]
        prompts = [question.prompt for question in questions[: options.questions]]
    with edgespec.load(target, draft="lookup", context=1024) as engine:
        texts = write_texts(engine, prompts, options.tokens).texts
    rows: list[dict[str, object]] = []
    readers = {name: Reader(path, texts, repack=True) for name, path in paths.items()}
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
        for category in sorted(set(categories) - {""}):
            of = [text for text, its in zip(texts, categories, strict=True) if its == category]
            rows[-1][f"top1 {category}"] = round(reader.agreement(of).top1, 3)
        reader.close()
        if options.budgets:
            yields = tokens_per_pass(paths[name], texts, options.budgets, all_of_it=True)
            rows[-1] |= {f"tokens a pass at {nodes}": round(found, 2) for nodes, found in yields.items()}
        print(rows[-1], file=sys.stderr)
    return rows


def _end_to_end(target: Path, drafter: Path, options: argparse.Namespace) -> tuple[float, float]:
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
            records += engine.generate(prompt, GenerationConfig(max_tokens=48)).passes[1:]
    tokens = sum(record.accepted + 1 for record in records)
    return tokens / sum(record.seconds for record in records), tokens / len(records)


def _picked(target: Path, quantization: str, drop_layers: tuple[int, ...] = ()) -> Path:
    dropped = "-".join(map(str, drop_layers))
    path = FOLDER / f"{target.stem}-{quantization}{'-drop-' * bool(dropped)}{dropped}.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        make_drafter(target, path, quantization=quantization, drop_layers=drop_layers)
    return path


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafters", nargs="*", metavar="NAME=PATH", help="further drafters")
    parser.add_argument("--target", type=Path, help="default: the model that comes along")
    parser.add_argument("--drop", nargs="*", default=["20", "18,21"], help="layers left out by hand")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--workload", type=Path, help="questions in Spec-Bench's format")
    parser.add_argument("--questions", type=int, default=24, help="of the workload")
    parser.add_argument("--budgets", type=int, nargs="*", default=[], help="nodes of trees along the text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--widened-bytes", type=int, help="of the streamed target; none without this")
    parser.add_argument("--memory", type=int, default=1_200_000_000, help="bytes for everything")
    parser.add_argument("--tree-budget", type=int, help="of these trees; sized by cost without this")
    parser.add_argument("--prompts", type=int, default=4, help="of answers end to end")
    parser.add_argument("--answer-rounds", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
