"""Kill a batch run again and again, and compare what it leaves with a run that nobody touched.

    python -m tests.kill_batch --kills 50 [--lines 24 --parallel 16]

Each run is ended by SIGKILL at a random moment: while it loads, reads a prompt, decodes or writes. It is
started again until the batch is done; then the results must be those of the undisturbed run, each once and in
order.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from edgespec.models.hub.catalog import DEFAULT

_STORY = "Once upon a time there was a small model that guessed what a large one would say. " * 6


def write_input(path: Path, lines: int) -> None:
    """Lines of every kind: shared beginnings, several answers, settings of their own, requests, bad ones."""
    with path.open("w") as file:
        for i in range(lines):
            line: dict[str, Any] = {"id": f"q{i}", "prompt": f"{_STORY} What did it say on day {i}?"}
            if i % 5 == 1:
                line = {"messages": [{"role": "user", "content": f"Count to {i}."}], "temperature": 0.8}
            if i % 5 == 2:
                line["n"] = 2
            if i % 5 == 3:
                line["temprature"] = 1
            if i % 5 == 4:
                body = {"messages": [{"role": "user", "content": f"Is {i} even?"}], "n": 2}
                line = {"custom_id": f"q{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def batch_command(model: str, prompts: Path, answers: Path, parallel: int | None = None) -> list[str]:
    """The batch run that is killed.

    Args:
        parallel: answers at once; None leaves it to the program.
    """
    files = ["--input", str(prompts), "--output", str(answers)]
    settings = ["--exact", "--max-tokens", "6", "--seed", "7", "--context", "1024", "--threads", "1"]
    # Trees of a fixed size: nothing is measured first, which would take most of a run.
    settings += ["--tree-budget", "8"]
    settings += ["--parallel", str(parallel)] if parallel else []
    return [sys.executable, "-m", "edgespec", "generate", model, *files, *settings, "--quiet"]


def results(path: Path) -> list[dict[str, Any]]:
    """The part that must agree: everything but the figures of time and memory."""
    lines = [json.loads(line) for line in path.read_text().split("\n") if line]
    return [_without_figures(result) for result in lines]


def _without_figures(result: dict[str, Any]) -> dict[str, Any]:
    if "custom_id" in result:
        del result["response"]["body"]["created"]
        return result
    names = ("id", "index", "text", "tokens", "finish_reason", "error")
    return {name: result.get(name) for name in names}


def kill_until_done(command: list[str], longest_s: float, kills: int, chance: random.Random) -> int:
    """Run until the batch is done, killing at most `kills` times; how often that was."""
    for killed in range(kills):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as program:
            try:
                program.wait(chance.uniform(0, longest_s))
            except subprocess.TimeoutExpired:
                program.kill()
            else:
                return killed
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    return kills


def check(
    folder: Path, *, kills: int, lines: int, seed: int = 0, model: str = DEFAULT, parallel: int | None = None
) -> int:
    """Compare killed runs with an undisturbed one until there were `kills`.

    Returns:
        How many batches that took.

    Raises:
        AssertionError: the results differ.
    """
    prompts, whole, answers = folder / "in.jsonl", folder / "whole.jsonl", folder / "killed.jsonl"
    write_input(prompts, lines)
    start = time.monotonic()
    subprocess.run(batch_command(model, prompts, whole, parallel), stderr=subprocess.DEVNULL, check=False)
    longest_s = 0.9 * (time.monotonic() - start)
    expected = results(whole)
    answered = [result for result in expected if result.get("finish_reason") != "error"]
    assert len(answered) > lines // 2
    chance = random.Random(seed)
    left, batches = kills, 0
    while left > 0:
        answers.unlink(missing_ok=True)
        command = batch_command(model, prompts, answers, parallel)
        left -= kill_until_done(command, longest_s, left, chance)
        assert results(answers) == expected
        batches += 1
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--lines", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int)
    parser.add_argument("--model", default=DEFAULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        batches = check(Path(folder), **vars(options))
    print(
        f"{options.kills} kills in {batches} batches of {options.lines} lines: every result as undisturbed."
    )


if __name__ == "__main__":
    main()
