"""Memory of a batch of many lines: it must not grow with their number.

    python -m tests.constant_memory --lines 10000

Answers have a token or two, so that ten thousand take minutes. The process's memory is read while it works;
what counts is how much it grows from the time when a tenth is answered to the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from edgespec.models.hub.catalog import DEFAULT

LINE_BYTES = 2048  # of ids, keys and places, which are kept for every line
_RESULT_BYTES = 900  # of a result, about


def measure(folder: Path, *, lines: int, model: str = DEFAULT, parallel: int = 16) -> tuple[int, int]:
    """Bytes of memory when a tenth was answered, and the most after that.

    Raises:
        AssertionError: a line was not answered.
    """
    prompts, answers = folder / "in.jsonl", folder / "out.jsonl"
    with prompts.open("w") as file:
        for number in range(lines):
            file.write(json.dumps({"id": f"line {number}", "prompt": f"{number} and"}) + "\n")
    command = [sys.executable, "-m", "edgespec", "generate", model, "--raw", "--draft", "none", "--quiet"]
    command += ["--input", str(prompts), "--output", str(answers), "--parallel", str(parallel)]
    command += ["--max-tokens", "2", "--context", "128"]
    early = most = 0
    with subprocess.Popen(command) as program:
        process = psutil.Process(program.pid)
        while program.poll() is None:
            done = answers.stat().st_size if answers.exists() else 0
            try:
                held = process.memory_info().rss
            except psutil.NoSuchProcess:
                break
            if not early and done > lines // 10 * _RESULT_BYTES:
                early = held
            most = max(most, held) if early else 0
            time.sleep(0.05)
    assert program.wait() == 0
    with answers.open() as results:
        assert sum(1 for line in results if json.loads(line)["error"] is None) == lines
    return early, most


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--parallel", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        early, most = measure(
            Path(folder), lines=options.lines, model=options.model, parallel=options.parallel
        )
    grown = most - early
    print(
        f"{options.lines} lines: {early / 1e6:.1f} MB when a tenth was answered, {most / 1e6:.1f} MB at the "
        f"most, {max(grown, 0) / options.lines:.0f} bytes a line."
    )
    if grown > options.lines * LINE_BYTES:
        raise SystemExit("That grows with the number of lines.")


if __name__ == "__main__":
    main()
