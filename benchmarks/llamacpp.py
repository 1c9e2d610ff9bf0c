"""What llama.cpp's own programs do with a model: plain, speculating with a drafter, and in batches.

    python -m benchmarks.llamacpp big.gguf [--drafter small.gguf] --programs DIR [--cap 4GB] [--drafts 4 8 16]
        [--batches 4 16] [--workload FILE] [--prompts 2] [--tokens 32] [--repetitions 1] [--seconds 400]

Prints a row for each way, with the speeds that the programs print (`llama-completion`,
`llama-speculative-simple`, `llama-batched-bench`): the median over the answers, the least and the most. The
questions are those of `edgespec bench`, in the model's chat template. With `--cap`, every run has so much
memory, page cache included (see benchmarks.capped), and the model is dropped from the page cache before it:
pages that an earlier group has read would cost the next one nothing. A model that does not fit the cap runs
with `--no-repack`: llama.cpp would copy its weights to rearrange them, and be killed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import edgespec
from benchmarks.capped import CappedResult, cap_kind, run_capped
from benchmarks.harness import parser_of, print_head
from edgespec.base.units import parse_size
from edgespec.bench.rows.preparation import balanced, context_for, own_questions, read_questions
from edgespec.machine.cores import default_threads
from edgespec.measure.throughput import forget_cached
from edgespec.offload.layout import round_up

# "eval time = ... ( 12.34 ms per token, 81.05 tokens per second)", which is not the prompt's line.
_EVAL_SPEED = re.compile(r"(?<!prompt )eval time =.*?,\s+([\d.]+) tokens per second")
_DECODED_SPEED = re.compile(r"decoded.*speed:\s+([\d.]+) t/s")
_TOKEN_BYTES = 3.5  # of a usual text
_CELLS = 256  # llama.cpp gives each text a multiple of these
_FITS = 0.8  # of a cap: what a model may take


def main() -> None:
    options = _parse()
    questions = read_questions(options.workload) if options.workload else own_questions()
    asked = [question.text for question in balanced(questions, options.prompts)]
    context = options.context or context_for(asked, options.tokens)
    with edgespec.load(options.model, draft="none", offload="mmap", context=context) as engine:
        vocabulary, prompts = engine.target.model.vocabulary, []
        for text in asked:
            tokens = engine.encoder.encode(text)
            if vocabulary.adds_bos and tokens[:1] == [vocabulary.bos]:
                tokens = tokens[1:]  # the programs add it
            prompts.append(
                b"".join(vocabulary.piece(t, control=True) for t in tokens).decode(errors="replace")
            )
    if options.cap and cap_kind() == "none":
        print("No control group can be made here: nothing is capped.", file=sys.stderr)
    common = ["-m", str(options.model), "-t", str(options.threads)]
    if options.cap and options.model.stat().st_size > _FITS * options.cap:
        common.append("--no-repack")
    answers = [*common, "-c", str(context), "-n", str(options.tokens), "--temp", "0"]
    print_head("way", "tokens/s", "least", "most", "runs")
    plain = [str(options.programs / "llama-completion"), *answers, "-no-cnv", "--no-warmup"]
    _row("plain", [[*plain, "--no-display-prompt", "-p", prompt] for prompt in prompts], _EVAL_SPEED, options)
    for length in options.drafts if options.drafter else ():
        command = [str(options.programs / "llama-speculative-simple"), *answers, "-md", str(options.drafter)]
        command += ["--spec-draft-n-max", str(length), "--spec-type", "draft-simple"]
        _row(f"draft {length}", [[*command, "-p", prompt] for prompt in prompts], _DECODED_SPEED, options)
    length = max(round(statistics.mean(len(prompt.encode()) for prompt in prompts) / _TOKEN_BYTES), 1)
    for texts in options.batches:
        cells = texts * round_up(length + options.tokens, _CELLS)
        numbers = ["-c", cells, "-npp", length, "-ntg", options.tokens, "-npl", texts]
        command = [str(options.programs / "llama-batched-bench"), *common, *map(str, numbers)]
        _row(f"{texts} texts", [[*command, "--output-format", "jsonl"]], None, options)


def _row(
    name: str,
    commands: Sequence[Sequence[str]],
    pattern: re.Pattern[str] | None,
    options: argparse.Namespace,
) -> None:
    """Print a row: each command in turn, while there is time; without a pattern, it prints JSON lines."""
    end = time.monotonic() + options.seconds
    speeds: list[float] = []
    for number in range(options.repetitions * len(commands)):
        if speeds and time.monotonic() > end:
            break
        forget_cached(options.model)
        ended = run_capped(commands[number % len(commands)], options.cap)
        speed = _batch_speed(ended) if pattern is None else _printed_speed(ended, pattern)
        if speed is None:
            print(f"| {name} | {_failure(ended)} | | | |")
            return
        speeds.append(speed)
    print(
        f"| {name} | {statistics.median(speeds):.2f} | {min(speeds):.2f} | {max(speeds):.2f} "
        f"| {len(speeds)} of {options.repetitions * len(commands)} |",
        flush=True,
    )


def _printed_speed(ended: CappedResult, pattern: re.Pattern[str]) -> float | None:
    found = pattern.findall(ended.output + ended.errors)
    return float(found[-1]) if found and not ended.status else None


def _batch_speed(ended: CappedResult) -> float | None:
    lines = [line for line in ended.output.splitlines() if line.startswith("{") and "speed_tg" in line]
    return float(json.loads(lines[-1])["speed_tg"]) if lines and not ended.status else None


def _failure(ended: CappedResult) -> str:
    if ended.killed:
        return "killed: out of memory"
    last = next((line for line in reversed(f"{ended.output}\n{ended.errors}".splitlines()) if line), "")
    return f"status {ended.status}: {last}" if ended.status else "it printed no speed"


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--programs", type=Path, required=True, help="the folder of llama.cpp's programs")
    parser.add_argument("--cap", type=parse_size, help="memory of each run, page cache included")
    parser.add_argument("--drafts", type=int, nargs="*", default=[4, 8, 16], help="most drafted tokens")
    parser.add_argument("--batches", type=int, nargs="*", default=[], help="numbers of texts at once")
    parser.add_argument("--workload", type=Path, help="questions, as for 'edgespec bench --workload'")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=400.0, help="most, for a row")
    return parser.parse_args()


if __name__ == "__main__":
    main()
