"""Damage a real header in thousands of ways: each file must be refused, or load, and nothing else.

    python -m tests.fuzz.campaign --files 20000
    python -m tests.fuzz.campaign --architecture qwen3moe    # damage another model's header
    python -m tests.fuzz.campaign --architecture all         # a tiny model of each that can be made
    python -m tests.fuzz.campaign --seeds 17 4711            # those again
    python -m tests.fuzz.campaign --seeds 17 --keep folder   # and keep the files

Prints what became of them. A file over which the fork that tries it out dies is one that EdgeSpec refuses;
a crash after that, a hang, or use of memory beyond reason is printed with its seed, and the run ends with
status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import architectures
from tests.fuzz.headers import Header, small_model, tiny_model
from tests.fuzz.mutations import mutate
from tests.tiny import ARCHITECTURES, MIXTURES

_PATIENCE_S = 300  # the system ends what computes for too long
_STAGES = ("start", "tried", "survived")
_KINDS = ("refused", "died", "error", "loaded")
_MEMORY_KIB = 64 << 10  # beyond the file's own size: buffers of llama.cpp's context


@dataclass
class Outcome:
    """What became of the files.

    Attributes:
        counts: "refused", "died" (in the trial, so it is refused), "error" and "loaded".
        failures: (seed, what) of crashes, hangs, and memory beyond reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)


class Loader:
    """The child process, started anew when it has died."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._peak = self._first_peak = 0
        self._unread = b""

    def load(self, path: Path) -> tuple[str, int]:
        """What becomes of a file, and KiB of memory that it took beyond what was taken before."""
        child = self._start()
        assert child.stdin is not None
        child.stdin.write(f"{path}\n")
        child.stdin.flush()
        stage = ""
        while (line := self._line(child)) is not None:
            size, _, said = line.partition(" ")
            if said in _STAGES:
                stage = said
                continue
            if said.startswith("died"):
                self._peak = self._first_peak  # of the next fork
                return said if stage == "tried" else f"crash after '{stage}': {said}", 0
            grown = max(int(size) - self._peak, 0)
            self._peak = max(self._peak, int(size))
            return said, grown
        hung = child.poll() is None and not self._dying(child)
        child.kill()
        self.close()
        if hung:
            return "hang", 0
        return f"crash by {_signal_name(child.returncode)}", 0

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.communicate(timeout=5)
            self._child = None

    def _start(self) -> subprocess.Popen[str]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.loader"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
                env={**os.environ, "GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1"},
            )
            self._unread = b""
            ready = self._line(self._child) or "0"  # after its imports, whose memory does not count
            self._peak = self._first_peak = int(ready.partition(" ")[0])
        return self._child

    def _line(self, child: subprocess.Popen[str]) -> str | None:
        """The child's next line; None if it has died, or says nothing for too long."""
        assert child.stdout is not None
        deadline = time.monotonic() + _PATIENCE_S
        while b"\n" not in self._unread:
            ready, _, _ = select.select([child.stdout], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(child.stdout.fileno(), 4096) if ready else b""
            if not data:
                return None
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode("utf-8", "replace")

    @staticmethod
    def _dying(child: subprocess.Popen[str]) -> bool:
        try:
            child.wait(2)
        except subprocess.TimeoutExpired:
            return False
        return True


def run(base: Header, seeds: Iterable[int], folder: Path, keep: Path | None = None) -> Outcome:
    """Load the files of these numbers; those that fail are kept in `keep`."""
    outcome = Outcome()
    loader = Loader()
    path = folder / "model.gguf"
    try:
        for seed in seeds:
            data = mutate(base, seed)
            path.write_bytes(data)
            what, grown = loader.load(path)
            kind = what.split()[0]
            if kind not in _KINDS:
                outcome.failures.append((seed, what))
                print(f"seed {seed}: {what}", file=sys.stderr, flush=True)
            elif grown > _MEMORY_KIB + len(data) // 1024:
                outcome.failures.append((seed, f"{grown} KiB of memory for {len(data)} bytes: {what}"))
                print(f"seed {seed}: {outcome.failures[-1][1]}", file=sys.stderr, flush=True)
            else:
                outcome.counts[kind] += 1
            outcome.reasons[re.sub(r"\d+|'[^']*'", "#", what)[:110]] += 1
            if keep is not None:
                (keep / f"{seed}.gguf").write_bytes(data)
    finally:
        loader.close()
    return outcome


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"status {code}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, nargs="+", help="these instead")
    parser.add_argument("--architecture", default="llama", help="another one than llama, or all")
    parser.add_argument("--keep", type=Path, help="keep the files here")
    parser.add_argument("--reasons", action="store_true", help="print what was said, and how often")
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    seeds = options.seeds or range(options.first, options.first + options.files)
    names = architectures.names() if options.architecture == "all" else [options.architecture]
    failed = False
    for name in names:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                base = _base(name, Path(folder))
            except architectures.NotMade as error:
                print(json.dumps({"architecture": name, "not made": str(error)}), flush=True)
                continue
            outcome = run(base, seeds, Path(folder), options.keep)
        if options.reasons:
            for reason, count in outcome.reasons.most_common():
                print(f"{count:6} {reason}", file=sys.stderr)
        failed |= bool(outcome.failures)
        figures = {"files": len(seeds), **outcome.counts, "failures": len(outcome.failures)}
        seconds = round(time.perf_counter() - start)
        print(json.dumps({"architecture": name, **figures, "seconds": seconds}), flush=True)
    return 1 if failed else 0


def _base(name: str, folder: Path) -> Header:
    """The model to damage.

    Raises:
        NotMade: there is none of this architecture.
    """
    from edgespec.models.hub import catalog

    if name == "llama":
        return small_model(catalog.find(None))
    if name in ARCHITECTURES | MIXTURES and name != "qwen3next":  # whose first attention is in layer 4
        return tiny_model(name, catalog.find(None), folder)
    return architectures.make(name, catalog.find(None))


if __name__ == "__main__":
    sys.exit(main())
