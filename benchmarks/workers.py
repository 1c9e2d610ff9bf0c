"""One model on this machine and two workers, on networks of several delays, with and without trees.

    python -m benchmarks.workers [--delays 0 2 20] [--megabits 1000] [--tokens 48] [--rounds 2]

The target is SmolLM2-135M-Instruct in Q4_0, widened: its tokens are those of the small model, its bytes and
arithmetic those of a larger one. The drafter is the small model with two layers dropped. Two workers hold
most of the layers, behind ports of the loopback that delay everything. The delay is that of a round trip, in
milliseconds. The prediction is that of 'edgespec plan' with the same workers: from passes of the whole model
on this machine, and what it measures of the workers and the way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import edgespec
from benchmarks.harness import parser_of, print_head
from benchmarks.slow_network import DelayedPort
from benchmarks.workload import PROMPTS, dropped, q4_0, widened
from edgespec.base.progress import no_progress
from edgespec.config import Config
from edgespec.costs.planner import Prediction
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from edgespec.models.gguf.footprint import USUAL_NODES, cells_for
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.devices.assignment import layer_sizes
from edgespec.planning.memory.needs import ContextShape, PairSizes
from edgespec.planning.report.model_report import plan_for

_CONTEXT = 1024


def main() -> None:
    options = _parse()
    with contextlib.ExitStack() as stack:
        addresses = stack.enter_context(_workers(options.threads, _lent(options.model)))
        if not options.learned:
            _learn(options)
        print_head("round trip, ms", "trees", "tokens/s", "from", "to", "predicted", "off", "tokens a pass")
        for delay in options.delays:
            with _behind(addresses, delay / 1e3, options.megabits) as reached:
                _row(delay, "none", reached, options)
                _row(delay, str(options.draft), reached, options)


def _row(delay: float, draft: str, workers: Sequence[str], options: argparse.Namespace) -> None:
    trees = draft != "none"
    memory = _tight(options.model) + (_tight_drafter(options.draft) if trees else 0)
    nodes = options.nodes if trees else 1
    plan = plan_for(
        Config.of(
            model=options.model,
            draft=draft,
            memory=memory,
            context=_CONTEXT,
            threads=options.threads,
            workers=workers,
        ),
        no_progress,
    )
    with _load(options, draft, workers, memory, nodes) as engine:
        print(*[note for note in engine.notes if note.startswith("Layers")], file=sys.stderr)
        answers: list[Generation] = []
        for _ in range(options.rounds):
            engine.forget_texts()
            answers += _answers(engine, options)
    speeds = [answer.tokens_per_second for answer in answers]
    speed = statistics.median(speeds)
    predicted = _with_drafter(plan.sizes, options.draft, nodes) if trees else plan.plain
    a_pass = statistics.mean(answer.tokens_per_pass for answer in answers)
    print(
        f"| {delay:g} | {f'{nodes} nodes' if trees else 'no'} | {speed:.2f} "
        f"| {min(speeds):.2f} | {max(speeds):.2f} | {predicted.tokens_per_second:.2f} "
        f"| {predicted.tokens_per_second / speed - 1:+.0%} | {a_pass:.2f} |",
        flush=True,
    )


def _with_drafter(sizes: Sequence[Prediction], draft: Path, nodes: int) -> Prediction:
    """Trees of this size from the drafter that is loaded; the plan may think that another way is faster."""
    (found,) = [size for size in sizes if (size.drafter, size.nodes) == (draft.name, nodes)]
    return found


def _learn(options: argparse.Namespace) -> None:
    """Inputs of plans: passes on this machine alone, draft steps, and the yield of the pair's trees."""
    command = [sys.executable, "-m", "edgespec", "profile", str(options.model), "--draft", str(options.draft)]
    command += ["--context", str(_CONTEXT), "--threads", str(options.threads), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _load(
    options: argparse.Namespace, draft: str, workers: Sequence[str], memory: int, nodes: int
) -> edgespec.Engine:
    return edgespec.load(
        options.model,
        draft=draft,
        context=_CONTEXT,
        threads=options.threads,
        memory=memory,
        workers=workers,
        tree_budget=nodes,
        exact=False,
    )


def _answers(engine: edgespec.Engine, options: argparse.Namespace) -> list[Generation]:
    config = GenerationConfig(max_tokens=options.tokens)
    return [engine.generate(prompt, config) for prompt in PROMPTS[: options.prompts]]


def _tight(model: Path) -> int:
    """Memory for everything and a quarter of the layers."""
    files = ModelFiles.of(read_header(model))
    sizes = PairSizes(files, None, ContextShape(cells_for(_CONTEXT)), measured=False)
    return sizes.at(USUAL_NODES).total - sum(layer_sizes(files)) * 3 // 4


def _tight_drafter(draft: Path) -> int:
    return read_header(draft).tensor_bytes + (96 << 20)


def _lent(model: Path) -> int:
    """Memory that each worker lends: for four ninths of the layers at most, with cells and buffers."""
    files = ModelFiles.of(read_header(model))
    return sum(layer_sizes(files)) * 4 // 9 + (64 << 20)


@contextlib.contextmanager
def _workers(threads: int, memory: int) -> Iterator[list[str]]:
    command = [sys.executable, "-m", "edgespec", "worker", "--quiet", "--json", "--listen", "127.0.0.1:0"]
    command += ["--threads", str(threads), "--memory", f"{memory >> 20}MiB"]
    addresses = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            assert process.stdout is not None
            addresses.append(json.loads(process.stdout.readline())["address"])
        yield addresses


@contextlib.contextmanager
def _behind(addresses: Sequence[str], round_trip_s: float, megabits: float | None) -> Iterator[list[str]]:
    """Put the workers behind a slow network."""
    rate = None if megabits is None else megabits * 1e6 / 8
    ports = [DelayedPort(address, round_trip_s, rate) for address in addresses]
    try:
        yield [port.address for port in ports]
    finally:
        for port in ports:
            port.close()


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--target-bytes", type=int, default=512 << 20)
    parser.add_argument("--draft", type=Path, default=dropped())
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 2.0, 20.0])
    parser.add_argument("--megabits", type=float, default=None)
    parser.add_argument("--learned", action="store_true", help="use what an earlier run measured")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=4, help="of each tree: 2, 4, 8 and so on")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    options.model = widened(q4_0(), options.target_bytes)
    return options


if __name__ == "__main__":
    main()
