"""Streaming a model under stress: each answer must be that of an undisturbed run, or an error that says why.

    python -m tests.stress flips MODEL --memory 900 --times 40    # single bits of its packed file
    python -m tests.stress stops MODEL --memory 900 --times 20    # SIGSTOP and SIGCONT in passes
    python -m tests.stress budgets MODEL --budgets 700 900 1200   # within control groups of these sizes
    python -m tests.stress lowered MODEL --memory 1600            # a control group that shrinks meanwhile

MODEL is a GGUF file; sizes are in MiB. Control groups (version 1, under /sys/fs/cgroup/memory) need root.
Prints a line for each run, and ends with status 1 if one is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import edgespec
from edgespec.engine.engine import Engine
from edgespec.errors import EdgeSpecError
from edgespec.files.positioned import BLOCK
from edgespec.generation.config import GenerationConfig
from edgespec.offload.packing.pack import HEAD

_QUESTION = "Write a Python function that merges two sorted lists."
_GROUPS = Path("/sys/fs/cgroup/memory")
_MIB = 1 << 20


def flips(options: argparse.Namespace) -> bool:
    """Flip a bit of the packed file before an engine opens it, or while one streams from it."""
    chance = random.Random(options.seed)
    outcomes: Counter[str] = Counter()
    with _load(options) as engine:
        expected = _tokens(engine)
        assert engine.target.model.weights.streamed_bytes, "nothing is streamed within this budget"
    (pack,) = [path for path in _cache().glob("edgespec/packs/*") if path.stat().st_size > _MIB]
    intact = pack.with_name("intact")
    shutil.copyfile(pack, intact)
    for time_ in range(options.times):
        open_first = bool(time_ % 2)
        at, bit = chance.randrange(pack.stat().st_size), chance.randrange(8)
        outcome = _with_flip(options, pack, at, bit, expected, open_first=open_first)
        outcomes[outcome.partition(":")[0]] += 1
        print(f"byte {at}, bit {bit}, {'in use' if open_first else 'before'}: {outcome}", flush=True)
        shutil.copyfile(intact, pack)
    print(dict(outcomes))
    return not outcomes["WRONG"]


def _with_flip(
    options: argparse.Namespace, pack: Path, at: int, bit: int, expected: list[int], *, open_first: bool
) -> str:
    """Outcomes of answers when this bit is flipped."""

    def byte() -> int:
        with pack.open("rb") as file:
            file.seek(at)
            return file.read(1)[0]

    def flip() -> int:
        flipped = byte() ^ 1 << bit
        with pack.open("r+b") as file:
            file.seek(at)
            file.write(bytes([flipped]))
        return flipped

    try:
        flipped = None if open_first else flip()
        with _load(options) as engine:
            if open_first:
                _tokens(engine)
                flipped = flip()
            same = _tokens(engine) == expected
    except EdgeSpecError as error:
        return f"refused: {error.what}"
    if not same:
        return "WRONG: another text"
    if byte() != flipped:  # a layer that stays in memory is read while loading
        return "packed again: the same text"
    unread = HEAD.size <= at < BLOCK
    return "not read: the same text" if unread else "WRONG: not noticed"


def stops(options: argparse.Namespace) -> bool:
    """Stop the program at random moments, for up to two seconds each, and let it continue."""
    expected = json.loads(_run(options)[1])["text"]
    chance = random.Random(options.seed)
    stopped = 0

    def disturb(program: subprocess.Popen[str]) -> None:
        nonlocal stopped
        while program.poll() is None and stopped < options.times:
            time.sleep(chance.uniform(0.05, 1.0))
            program.send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.05, 2.0))
            program.send_signal(signal.SIGCONT)
            stopped += program.poll() is None

    code, out, errors = _run(options, disturb=disturb)
    same = code == 0 and json.loads(out)["text"] == expected
    print(f"stopped {stopped} times: {'the same text' if same else f'WRONG: {code} {out} {errors}'}")
    return same


def budgets(options: argparse.Namespace) -> bool:
    """Within control groups, told nothing; and within --memory alone, whose peak is looked at."""
    expected, fine = "", True
    for size in options.budgets:
        for grouped in (True, False):
            options.memory = None if grouped else size
            group = _group(size) if grouped else None
            code, out, errors, peak = _measured(options, group)
            text = json.loads(out)["text"] if code == 0 else ""
            expected = expected or text
            refused = code == 1 and errors.startswith("Error: ")
            within = peak <= size * _MIB
            right = (text == expected and within) or refused
            fine &= right
            what = (
                "refused: " + errors.splitlines()[0]
                if refused
                else "the same text"
                if text == expected
                else ""
            )
            print(
                f"{'control group' if grouped else '--memory'} {size} MiB: status {code}, "
                f"peak {peak / _MIB:.0f} MiB, {what or 'WRONG ' + out + errors}",
                flush=True,
            )
    return fine


def lowered(options: argparse.Namespace) -> bool:
    """Shrink the control group of a running answer step by step, as far as the system lets it shrink."""
    size = options.memory
    options.memory = None
    expected = json.loads(_run(options, group=_group(size))[1])["text"]
    least = size

    def disturb(program: subprocess.Popen[str]) -> None:
        nonlocal least
        limit = _group(size, new=False) / "memory.limit_in_bytes"
        while program.poll() is None:
            time.sleep(0.5)
            try:
                limit.write_text(str((least - 50) * _MIB))
            except OSError:  # what the program holds cannot be reclaimed
                continue
            least -= 50

    code, out, errors = _run(options, group=_group(size), disturb=disturb)
    same = code == 0 and json.loads(out)["text"] == expected
    print(f"from {size} to {least} MiB: {'the same text' if same else f'WRONG: {code} {out} {errors}'}")
    return same


def _load(options: argparse.Namespace) -> Engine:
    return edgespec.load(
        options.model,
        memory=options.memory * _MIB,
        draft="none",
        exact=True,
        context=1024,
        offload="stream",
        pack="always",
    )


def _tokens(engine: Engine) -> list[int]:
    engine.forget_texts()
    return engine.generate(_QUESTION, GenerationConfig(max_tokens=6)).tokens


def _run(
    options: argparse.Namespace,
    *,
    group: Path | None = None,
    disturb: Callable[[subprocess.Popen[str]], Any] = lambda program: None,
) -> tuple[int, str, str]:
    """Status, output and errors of the program, in a control group if one is given."""
    command = [sys.executable, "-m", "edgespec", "generate", str(options.model), "-p", _QUESTION]
    command += [
        "--max-tokens",
        str(options.tokens),
        "--draft",
        "none",
        "--exact",
        "--context",
        "1024",
        "--json",
    ]
    command += [] if options.memory is None else ["--memory", f"{options.memory}MiB"]
    if group is not None:
        join = f'echo $$ > "{group}/cgroup.procs"; exec "$@"'
        command = ["sh", "-c", join, "sh", *command]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as program,
    ):
        disturb(program)
        out = program.communicate()[0]
        errors.seek(0)
        return program.returncode, out, errors.read()


def _measured(options: argparse.Namespace, group: Path | None) -> tuple[int, str, str, int]:
    """As `_run`, and the most memory that the program held itself, mapped files left out."""
    peak = 0

    def watch(program: subprocess.Popen[str]) -> None:
        nonlocal peak
        process = psutil.Process(program.pid)
        while program.poll() is None:
            try:
                held = process.memory_info()
            except psutil.NoSuchProcess:
                break
            peak = max(peak, held.rss - held.shared)
            time.sleep(0.02)

    return (*_run(options, group=group, disturb=watch), peak)


def _group(size: int, *, new: bool = True) -> Path:
    """A control group with a limit of so many MiB."""
    group = _GROUPS / f"edgespec-stress-{os.getpid()}-{size}"
    if new:
        group.mkdir(exist_ok=True)
        (group / "memory.force_empty").write_text("0")
        (group / "memory.limit_in_bytes").write_text(str(size * _MIB))
    return group


def _cache() -> Path:
    return Path(os.environ["XDG_CACHE_HOME"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds: dict[str, Callable[[argparse.Namespace], bool]] = {
        "flips": flips,
        "stops": stops,
        "budgets": budgets,
        "lowered": lowered,
    }
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", type=int, default=900)
    parser.add_argument("--budgets", type=int, nargs="+", default=[700, 900, 1200, 1600])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        try:
            return 0 if kinds[options.kind](options) else 1
        finally:
            for group in _GROUPS.glob(f"edgespec-stress-{os.getpid()}-*"):
                group.rmdir()


if __name__ == "__main__":
    sys.exit(main())
