"""How good are drafters that were picked by hand, and the one that `draft make` finds?

    edgespec draft make smollm2-135m --pass-seconds 0.7
    python -m benchmarks.drafters made=PATH

Agreement on text that the target wrote (prompts that no drafter was chosen by), size, and the time of a step,
in alternating rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import edgespec
from benchmarks.workload import drafter, q4_0, smollm2
from edgespec.drafting.agreement import PROMPTS, Reader, write_texts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafters", nargs="*", metavar="NAME=PATH", help="further drafters")
    parser.add_argument("--target", type=Path, help="default: the model that comes along, and drafters of it")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    target = options.target or smollm2()
    paths = {"target itself": target}
    if options.target is None:
        paths |= {"q4_0": q4_0(), "less 20": drafter("drop-20", "keep", (20,))}
        paths |= {"less 18, 21": drafter("drop-18-21", "keep", (18, 21))}
    for pair in options.drafters:
        name, _, path = pair.partition("=")
        paths[name] = Path(path)
    with edgespec.load(target, draft="lookup", context=1024) as engine:
        texts = write_texts(engine, PROMPTS[1::2], options.tokens).texts
    rows = []
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
        reader.close()
        print(rows[-1], file=sys.stderr)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
