"""Number of threads: physical cores, unless more were measured to be faster."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.machine import cores
from edgespec.machine.cores import default_threads, physical_cores, thread_counts
from edgespec.measure import threads as threads_module
from edgespec.measure.threads import fastest, known_threads
from edgespec.profiles.store import ProfileStore


def machine(
    root: Path, monkeypatch: pytest.MonkeyPatch, siblings: dict[int, str], quota: str = "max 100000"
) -> None:
    """A system with these hardware threads, each with the list of those on its core."""
    for number, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/x\n")
    group = root / "sys/fs/cgroup/x"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(quota)
    monkeypatch.setattr(cores, "allowed_numbers", lambda: set(siblings))


def test_hardware_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch, {0: "0,4", 1: "1,5", 2: "2-3", 3: "2-3", 4: "0,4", 5: "1,5"})
    assert physical_cores(tmp_path) == 3
    assert thread_counts(tmp_path) == (3, 6)
    assert default_threads(tmp_path) == 3


def test_a_container_with_less_time_starts_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, quota="200000 100000")
    assert thread_counts(tmp_path) == (2,)


def test_without_siblings_there_is_nothing_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, monkeypatch, {0: "0", 1: "1"})
    assert thread_counts(tmp_path) == (2,)


def test_where_the_system_tells_nothing_every_thread_is_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "allowed_numbers", lambda: {0, 1, 2})
    assert physical_cores(tmp_path) == 3


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({4: {1: 0.1, 32: 0.5}, 8: {1: 0.12, 32: 0.6}}, 4),
        ({4: {1: 0.1, 32: 0.5}, 8: {1: 0.08, 32: 0.4}}, 8),
        ({4: {1: 0.1, 32: 0.5}, 8: {1: 0.099, 32: 0.499}}, 4),  # about as fast: the fewer
        ({4: {1: 0.1, 32: 0.5}, 8: {1: 0.14, 32: 0.3}}, 8),  # slower for one row, faster by more for trees
        ({2: {1: 0.0}}, 2),
    ],
)
def test_the_fastest_count_is_taken(seconds: dict[int, dict[int, float]], expected: int) -> None:
    assert fastest(seconds) == expected


def test_there_must_be_a_count() -> None:
    with pytest.raises(ValueError, match="nothing to choose from"):
        fastest({})


def test_what_was_the_fastest_is_known_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "thread_counts", lambda: (2, 4))
    monkeypatch.setattr(threads_module, "default_threads", lambda: 2)
    store = ProfileStore(tmp_path)
    assert known_threads("model", store) == 2
    store.put_threads(threads_module._key("model"), 4, {2: {1: 0.2}, 4: {1: 0.1}})
    assert known_threads("model", store) == 4
    assert known_threads("another", store) == 2
    monkeypatch.setattr(threads_module, "thread_counts", lambda: (2,))
    assert known_threads("model", store) == 2, "this process may use fewer now"
