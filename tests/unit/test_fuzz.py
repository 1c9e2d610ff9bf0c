"""A short run of the fuzz campaign; `python -m tests.fuzz.campaign` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.models.gguf.header import read_header
from tests.fuzz.campaign import Loader, run
from tests.fuzz.headers import STRING, Entry, parse, small_model
from tests.fuzz.mutations import mutate

# Files that crashed llama.cpp, made it hang, or made it take memory without end, before they were refused.
SEEDS = (
    *(44, 134, 140, 227, 498, 587, 719, 869),  # experts, layers, epsilons, types of matrices
    *(1306, 1901, 5791, 6798, 13251),  # tokens twice, types of vectors, bytes without tokens, alignment
)


def test_headers_are_put_together_as_they_were(smol_path: Path, tmp_path: Path) -> None:
    with smol_path.open("rb") as file:
        start = file.read(4 << 20)
    header = parse(start)
    header.data_bytes = 0
    data = header.to_bytes()
    assert start.startswith(data[: read_header(smol_path).data_offset - 64])


def test_the_same_number_gives_the_same_file(smol_path: Path) -> None:
    base = small_model(smol_path)
    files = [mutate(base, seed) for seed in range(50)]
    assert files == [mutate(base, seed) for seed in range(50)]
    assert len(set(files)) > 45


def test_damaged_files_are_refused_or_load(smol_path: Path, tmp_path: Path) -> None:
    outcome = run(small_model(smol_path), [*SEEDS, *range(1_000_000, 1_000_240)], tmp_path)
    assert outcome.failures == []
    # Damage of every depth: refused by the reader, by llama.cpp, and by neither.
    assert min(outcome.counts[kind] for kind in ("refused", "error", "loaded")) > 20


@pytest.mark.parametrize("architecture", ["falcon", "mamba2", "olmoe"])
def test_damaged_files_of_other_architectures_are_refused_or_load(architecture: str) -> None:
    campaign = [sys.executable, "-m", "tests.fuzz.campaign", "--architecture", architecture]
    done = subprocess.run([*campaign, "--files", "25"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["loaded"]
    assert counts["refused"]
    assert not counts["failures"]


def test_a_crash_that_a_child_process_meets_first_is_a_refusal(smol_path: Path, tmp_path: Path) -> None:
    header = small_model(smol_path)
    header.entries.append(Entry(b"llama.rope.scaling.type", STRING, b"silu"))
    path = tmp_path / "model.gguf"
    path.write_bytes(header.to_bytes())
    loader = Loader()
    try:
        assert [loader.load(path)[0] for _ in range(2)] == ["died SIGABRT"] * 2
        path.write_bytes(small_model(smol_path).to_bytes())
        assert loader.load(path)[0] == "loaded"
    finally:
        loader.close()


def test_a_crash_would_be_noticed(smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import edgespec.models.gguf.header as g, os\n"
        "read = g.read_header\n"
        "g.read_header = lambda path: os.abort() if path.stat().st_size % 2 else read(path)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    base = small_model(smol_path)
    odd = next(seed for seed in range(1000) if len(mutate(base, seed)) % 2)
    even = next(seed for seed in range(1000) if len(mutate(base, seed)) % 2 == 0)
    outcome = run(base, [even, odd, even], tmp_path)
    assert outcome.failures == [(odd, "crash after 'start': died SIGABRT")]
    assert outcome.counts.total() == 2
