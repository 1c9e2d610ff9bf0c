"""The speed of a batch on Ray clusters of one node and of two, beside that without Ray.

    python -m benchmarks.clusters MODEL.gguf [--lines 64] [--tokens 48] [--parallel 8] [--rounds 3]

The nodes are of this machine, each with an engine of one thread. Without Ray, one engine has one thread or
two. The settings take turns, and every run has a cluster of its own. A run's speed is that of the answers
after the first quarter, so neither the start of Ray nor loading counts; the seconds to the first answer do
contain them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import parser_of, print_head

_NODES = "--nodes"
_LOOK_S = 0.02  # between two looks at the results
_SETTINGS = (
    ("no Ray, one thread", 0, 1),
    ("one node", 1, 1),
    ("two nodes", 2, 1),
    ("no Ray, two threads", 0, 2),
)


class Run(NamedTuple):
    """Seconds to the first answer, and tokens per second after a quarter of them."""

    first_s: float
    rate: float


def main() -> None:
    options = parse_arguments()
    if options.nodes:
        serve_cluster(options.nodes)
        return
    runs: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        prompts = [
            f"Write a short story about {number} sailors and a storm." for number in range(options.lines)
        ]
        lines.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        for number in range(options.rounds):
            for name, nodes, threads in _SETTINGS:
                output = Path(folder) / f"{number} {name}.jsonl"
                with cluster(nodes) as address:
                    ray = ["--ray", address] if address else []
                    runs.setdefault(name, []).append(measured(options, lines, output, threads, ray))
                print(f"round {number + 1}, {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    print_head("setting", "to the first answer, s", "tokens/s", "of each run")
    for name, found in runs.items():
        rates = [run.rate for run in found]
        first_s = statistics.median(run.first_s for run in found)
        each = ", ".join(f"{rate:.1f}" for rate in rates)
        print(f"| {name} | {first_s:.1f} | {statistics.median(rates):.1f} | {each} |")


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file")
    parser.add_argument("--lines", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--parallel", type=int, default=8, help="answers at once in an engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(_NODES, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.nodes and not options.model:
        parser.error("Name a model.")
    return options


def measured(options: argparse.Namespace, lines: Path, output: Path, threads: int, ray: list[str]) -> Run:
    """Run a batch and watch its results come."""
    begun = time.perf_counter()
    files = ["--input", str(lines), "--output", str(output)]
    settings = ["--max-tokens", str(options.tokens), "--parallel", str(options.parallel), "--draft", "none"]
    settings += ["--threads", str(threads), "--context", str(options.parallel * (options.tokens + 128))]
    command = [sys.executable, "-m", "edgespec", "generate", options.model, *files, *settings, *ray]
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    first_s = quarter_s = 0.0
    early = 0
    while program.poll() is None:
        answers = answers_in(output)
        now_s = time.perf_counter() - begun
        if answers and not first_s:
            first_s = now_s
        if len(answers) >= options.lines / 4 and not quarter_s:
            quarter_s, early = now_s, sum(answers)
        time.sleep(_LOOK_S)
    if program.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {program.returncode}")
    end_s = output.stat().st_mtime - time.time() + time.perf_counter() - begun
    return Run(first_s, (sum(answers_in(output)) - early) / (end_s - quarter_s))


def answers_in(output: Path) -> list[int]:
    """The tokens of each answer so far."""
    if not output.exists():
        return []
    whole = [line for line in output.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line)["usage"]["completion_tokens"] for line in whole]


@contextmanager
def cluster(nodes: int) -> Iterator[str]:
    """The address of a cluster of this many nodes; empty for none."""
    if not nodes:
        yield ""
        return
    program = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, _NODES, str(nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ray gives other programs precedence over its own, which those without Ray do not.
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"},
        text=True,
    )
    try:
        assert program.stdout is not None
        yield program.stdout.readline().strip()
    finally:
        program.communicate()


def serve_cluster(nodes: int) -> None:
    """Run a cluster until standard input ends."""
    from ray.cluster_utils import Cluster

    size: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20}
    made: Any = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **size})
    for _ in range(nodes - 1):
        made.add_node(**size)
    print(made.address, flush=True)
    sys.stdin.read()
    made.shutdown()


if __name__ == "__main__":
    main()
