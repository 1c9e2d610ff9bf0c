"""Check a real pair of models: the largest GGUF file of a folder, and the smallest as its drafter.

    python -m tests.real FOLDER [--memory 1500] [--only exactness tools]

Every check runs with as much memory as there is, and then within `--memory` MiB, which streams part of the
target. Prints a line for each and ends with status 1 if one fails.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.real import answers, served
from tests.real.pair import CheckFailed, Pair


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--memory", type=int, default=1500, help="of the second round, in MiB")
    parser.add_argument("--only", nargs="+", help="the names of checks")
    options = parser.parse_args()
    pair = Pair.found_in(options.folder)
    print(f"{pair.target.name}, drafted for by {pair.drafter.name}", flush=True)
    expected = answers.tokens_of(pair, draft="none") if _wanted("exactness", options.only) else []
    checks: dict[str, Callable[[Pair], str]] = {
        "chat": answers.chat,
        "json schema": answers.json_schema,
        "exactness": lambda pair: answers.exactness(pair, expected),
        "batch": answers.batch,
        "tools": served.tools,
        "8 clients": served.clients,
    }
    wanted = {name: check for name, check in checks.items() if _wanted(name, options.only)}
    rounds = [pair, replace(pair, memory=options.memory)]
    outcomes = [_passes(name, check, one) for one in rounds for name, check in wanted.items()]
    return 0 if all(outcomes) else 1


def _wanted(name: str, only: list[str] | None) -> bool:
    return only is None or name in only


def _passes(name: str, check: Callable[[Pair], str], pair: Pair) -> bool:
    """Run a check and print its outcome."""
    start = time.perf_counter()
    try:
        outcome, passed = check(pair), True
    except CheckFailed as failure:
        outcome, passed = str(failure), False
    except Exception as error:  # the other checks still run
        traceback.print_exc()
        outcome, passed = f"{type(error).__name__}: {error}", False
    outcome = " ".join(outcome.split())
    place = "in memory" if pair.memory is None else f"{pair.memory} MiB"
    seconds = time.perf_counter() - start
    print(f"{'ok  ' if passed else 'FAIL'} {place:9} {name:11} {seconds:4.0f} s  {outcome}", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
