"""A short run of the fuzz campaign; `python -m tests.fuzz.campaign` is the long one."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("resource")

from edgespec.models.gguf.header import read_header
from tests.fuzz import campaign
from tests.fuzz.campaign import Loader, adapter_base, run
from tests.fuzz.headers import STRING, Entry, parse, small_model
from tests.fuzz.loader import UNDAMAGED
from tests.fuzz.mutations import mutate, mutated
from tests.tiers import slow_except
from tests.waiting import wait_until

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


@pytest.mark.parametrize("architecture", slow_except(["olmoe"], ["falcon", "mamba2", "olmoe"]))
def test_damaged_files_of_other_architectures_are_refused_or_load(architecture: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz.campaign", "--architecture", architecture]
    done = subprocess.run([*command, "--files", "25"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["loaded"]
    assert counts["refused"]
    assert not counts["failures"]


def test_damaged_adapters_are_refused_or_load(tmp_path: Path) -> None:
    base, model = adapter_base(tmp_path)
    outcome = run(base, range(100), tmp_path, beside=model)
    assert outcome.failures == []
    assert min(outcome.counts[kind] for kind in ("refused", "died", "loaded")) > 2


def test_zeros_at_the_end_are_part_of_the_file(smol_path: Path) -> None:
    base = small_model(smol_path)
    for seed in range(100):
        head, zeros = mutated(base, seed)
        assert mutate(base, seed) == head + bytes(zeros)


def test_a_file_that_repeats_an_earlier_one_is_not_tried_again(smol_path: Path, tmp_path: Path) -> None:
    outcome = run(small_model(smol_path), [0, 1, 2, 1, 0, 2, 3], tmp_path)
    assert outcome.counts["repeated"] == 3
    assert outcome.counts.total() == 7


def test_a_crash_that_a_child_process_meets_first_is_a_refusal(smol_path: Path, tmp_path: Path) -> None:
    header = small_model(smol_path)
    header.entries.append(Entry(b"llama.rope.scaling.type", STRING, b"silu"))
    crashing, sound = tmp_path / "crashing.pickle", tmp_path / "sound.pickle"
    crashing.write_bytes(pickle.dumps(header))
    sound.write_bytes(pickle.dumps(small_model(smol_path)))
    loader = Loader()
    try:
        for base, expected in ((crashing, "died SIGABRT"), (sound, "loaded")):
            found = [what for _, what, _ in loader.outcomes(base, [UNDAMAGED] * 2, tmp_path / "model.gguf")]
            assert found == [expected] * 2
    finally:
        loader.close()


def test_a_fork_that_hangs_is_noticed_and_ended(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "hanging"
    _replace_read_header(tmp_path, monkeypatch, f"(open({str(hanging)!r}, 'w').close(), time.sleep(1e6))")
    with ThreadPoolExecutor() as pool:
        outcome = pool.submit(run, small_model(smol_path), [0], tmp_path)
        wait_until(hanging.exists)
        monkeypatch.setattr(campaign, "_PATIENCE_S", 0)
        assert outcome.result().failures == [(0, "hang")]


def test_a_crash_would_be_noticed(smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_read_header(tmp_path, monkeypatch, "os.abort() if path.stat().st_size % 2 else read(path)")
    base = small_model(smol_path)
    odd = next(seed for seed in range(1000) if len(mutate(base, seed)) % 2)
    even, other = [seed for seed in range(1000) if len(mutate(base, seed)) % 2 == 0][:2]
    outcome = run(base, [even, odd, other], tmp_path)
    assert outcome.failures == [(odd, "crash after 'start': died SIGABRT")]
    assert outcome.counts.total() == 2


def _replace_read_header(folder: Path, monkeypatch: pytest.MonkeyPatch, instead: str) -> None:
    """Let the child process do something else when it reads a header."""
    (folder / "sitecustomize.py").write_text(
        "import edgespec.models.gguf.header as g, os, time\n"
        f"read = g.read_header\ng.read_header = lambda path: {instead}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2]}")
