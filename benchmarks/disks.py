"""A streamed model read from one disk, and from several at once, by turns.

    python -m benchmarks.disks MODEL --memory 1GB --folder /mnt/first --folder /mnt/second

Every run is a process of its own. The packed layers are once in the first folder alone, and once in all of
them; each way has a cache folder of its own, in the first folder. What is made is removed at the end.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import parser_of, print_head

PROMPT = "Write a function that merges two sorted lists, and explain it."


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, action="append", required=True, help="on a disk of its own")
    parser.add_argument("--memory", required=True)
    parser.add_argument("--draft", default="none")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as stack:
        places = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))) for folder in options.folder
        ]
        ways = {1: places[:1], len(places): places}
        for disks in ways:  # packs
            run(options, disks, ways[disks], tokens=1)
            print(f"Packed for {disks}", file=sys.stderr)
        found: dict[int, list[dict[str, Any]]] = {disks: [] for disks in ways}
        for _ in range(options.rounds):
            for disks, folders in ways.items():
                found[disks].append(run(options, disks, folders, options.tokens))
    texts = {record["text"] for records in found.values() for record in records}
    print_head("disks", "tokens/s", "tokens/s of each run", "a pass reads")
    speeds = {
        disks: [record["timings"]["tokens_per_second"] for record in records]
        for disks, records in found.items()
    }
    for disks, of_runs in speeds.items():
        read = found[disks][0]["memory"]["streamed_bytes_per_pass"]
        each = " ".join(f"{speed:.2f}" for speed in of_runs)
        print(f"| {disks} | {statistics.median(of_runs):.2f} | {each} | {read / 1e6:.0f} MB |")
    few, many = (statistics.median(of_runs) for of_runs in speeds.values())
    print(f"\n{many / few:.2f} times as fast; {'the same text' if len(texts) == 1 else 'DIFFERENT TEXTS'}.")


def run(options: Any, disks: int, folders: list[Path], tokens: int) -> dict[str, Any]:
    """The record of an answer with packed layers in these folders."""
    cache = folders[0] / f"cache-{disks}"
    packs = [folder / f"packs-{disks}" for folder in folders]
    words = ["generate", str(options.model), "--prompt", PROMPT, "--max-tokens", str(tokens), "--json"]
    words += ["--memory", options.memory, "--offload", "stream", "--draft", options.draft, "--exact"]
    words += [word for pack in packs for word in ("--pack-dir", str(pack))]
    done = subprocess.run(
        [sys.executable, "-m", "edgespec", *words],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


if __name__ == "__main__":
    main()
