"""Damage a real header in thousands of ways: each file must be refused, or load, and nothing else.

    python -m tests.fuzz.campaign --files 20000
    python -m tests.fuzz.campaign --architecture qwen3moe    # damage another model's header
    python -m tests.fuzz.campaign --architecture adapter     # or a LoRA adapter's
    python -m tests.fuzz.campaign --seeds 17 4711            # those again
    python -m tests.fuzz.campaign --seeds 17 --keep folder   # and keep the files

Prints what became of the files. A file over which the fork that tries it out dies is one EdgeSpec refuses;
a crash after that, a hang, or use of memory beyond reason is printed with its seed, and the run ends with
status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgespec.processes.exit_status import signal_name
from tests.fuzz import architectures
from tests.fuzz.headers import Header, parse, small_model, tiny_model
from tests.fuzz.mutations import mutate
from tests.tiny import ARCHITECTURES, MIXTURES, write_tiny
from tests.tiny_adapters import write_adapter

_PATIENCE_S = 300  # the system ends what computes for too long
_KINDS = ("refused", "died", "error", "loaded", "repeated")
_MEMORY_KIB = 64 << 10  # beyond the file's own size: buffers of llama.cpp's context


@dataclass
class Outcome:
    """Outcomes of the files.

    Attributes:
        counts: "refused", "died" (in the trial, so it is refused), "error", "loaded" and "repeated".
        failures: (seed, what) of crashes, hangs, and memory beyond reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)


class Loader:
    """The child process, started anew when it has died or hangs."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._first_peak = 0
        self._unread = b""

    def outcomes(
        self, base: Path, seeds: Sequence[int], path: Path, beside: Path | None = None
    ) -> Iterator[tuple[int, str, int]]:
        """The outcome of each file, and KiB of memory that it took beyond what was taken before.

        Args:
            base: a pickled header.
            path: where the files are written, one after another.
            beside: the model that they are LoRA adapters for.
        """
        left = list(seeds)
        while left:
            child = self._start()
            peak = self._first_peak
            order = {"base": str(base), "seeds": left, "path": str(path), "beside": str(beside or "")}
            assert child.stdin is not None
            child.stdin.write(json.dumps(order).encode() + b"\n")
            child.stdin.flush()
            while left and (line := self._line(child)) is not None:
                seed, size, what = line.split(" ", 2)
                assert int(seed) == left.pop(0)
                fork_died = what.startswith(("died", "crash"))
                yield int(seed), what, 0 if fork_died else max(int(size) - peak, 0)
                peak = self._first_peak if fork_died else max(peak, int(size))
            if left:
                yield left.pop(0), self._ended(child), 0

    def close(self) -> None:
        """End the child, and the fork of it that may be at work."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.communicate()
            self._child = None

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.loader"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={**os.environ, "GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            self._unread = b""
            ready = self._line(self._child) or "0"  # after its imports, whose memory does not count
            self._first_peak = int(ready.partition(" ")[0])
        return self._child

    def _ended(self, child: subprocess.Popen[bytes]) -> str:
        """The reason why the child stopped answering; it is ended."""
        try:
            child.wait(2)
        except subprocess.TimeoutExpired:
            return "hang"
        finally:
            self.close()
        return f"crash by {signal_name(child.returncode) or f'status {child.returncode}'}"

    def _line(self, child: subprocess.Popen[bytes]) -> str | None:
        """The child's next line; None if it has died, or says nothing for too long."""
        assert child.stdout is not None
        start = time.monotonic()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([child.stdout], [], [], 0.2)
            data = os.read(child.stdout.fileno(), 1 << 16) if ready else b""
            if not data and (ready or time.monotonic() > start + _PATIENCE_S):
                return None
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode("utf-8", "replace")


def run(
    base: Header,
    seeds: Sequence[int],
    folder: Path,
    keep: Path | None = None,
    loader: Loader | None = None,
    beside: Path | None = None,
) -> Outcome:
    """Load the files of these numbers, and keep them in `keep`.

    Args:
        beside: the model that they are LoRA adapters for.
    """
    outcome = Outcome()
    own = Loader() if loader is None else loader
    pickled = folder / "base.pickle"
    if not pickled.exists():
        pickled.write_bytes(pickle.dumps(base))
    try:
        for seed, what, grown in own.outcomes(pickled, seeds, folder / "model.gguf", beside):
            kind = what.split()[0]
            if kind not in _KINDS:
                outcome.failures.append((seed, what))
            elif grown > _MEMORY_KIB and grown > _MEMORY_KIB + len(mutate(base, seed)) // 1024:
                outcome.failures.append((seed, f"{grown} KiB of memory: {what}"))
            else:
                outcome.counts[kind] += 1
            outcome.reasons[re.sub(r"\d+|'[^']*'", "#", what)[:110]] += 1
            if keep is not None:
                (keep / f"{seed}.gguf").write_bytes(mutate(base, seed))
    finally:
        if loader is None:
            own.close()
    for seed, what in outcome.failures:
        print(f"seed {seed}: {what}", file=sys.stderr, flush=True)
    return outcome


def base_of(name: str, folder: Path) -> Header:
    """The model to damage.

    Raises:
        NotMade: there is none of this architecture.
    """
    from edgespec.models.hub import catalog

    if name == "llama":
        return small_model(catalog.find(None))
    try:
        return architectures.make(name, catalog.find(None))
    except architectures.NotMade:
        if name in ARCHITECTURES | MIXTURES and name != "qwen3next":  # whose first attention is in layer 4
            return tiny_model(name, catalog.find(None), folder)
        raise


def adapter_base(folder: Path) -> tuple[Header, Path]:
    """A LoRA adapter to damage, and the model that it is for."""
    from edgespec.models.hub import catalog

    model = write_tiny(folder / "tiny.gguf", "llama", catalog.find(None))
    return parse(write_adapter(folder / "adapter.gguf").read_bytes()), model


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, nargs="+", help="these instead")
    parser.add_argument("--architecture", default="llama", help="another one than llama, or adapter")
    parser.add_argument("--keep", type=Path, help="keep the files here")
    parser.add_argument("--reasons", action="store_true", help="print what was said, and how often")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made_in:
        folder = Path(made_in)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
        seeds = options.seeds or range(options.first, options.first + options.files)
        start = time.perf_counter()
        if options.architecture == "adapter":
            base, beside = adapter_base(folder)
            outcome = run(base, seeds, folder, options.keep, beside=beside)
        else:
            outcome = run(base_of(options.architecture, folder), seeds, folder, options.keep)
    if options.reasons:
        for reason, count in outcome.reasons.most_common():
            print(f"{count:6} {reason}", file=sys.stderr)
    figures = {"files": len(seeds), **outcome.counts, "failures": len(outcome.failures)}
    seconds = round(time.perf_counter() - start)
    print(json.dumps({"architecture": options.architecture, **figures, "seconds": seconds}), flush=True)
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
