"""A file that is replaced is the old one or the new one, never something between."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edgespec.bench.report.document import check_writable
from edgespec.errors import OutputError
from edgespec.files.sharing import replace
from edgespec.files.small_json import read_json, save_json
from edgespec.files.writing import (
    atomic_large_write,
    atomic_write,
    open_locked,
    remove_abandoned,
    termination_raises,
    writing_to,
)


def test_the_new_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    assert sys.platform == "win32" or path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_what_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def fail() -> None:
        with atomic_write(path) as file:
            file.write(b"half of wh")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    program = (
        "import os, signal, sys; from pathlib import Path; from edgespec.files.writing import atomic_write\n"
        "with atomic_write(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), getattr(signal, 'SIGKILL', 15))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert done.returncode in (-9, 15)
    assert path.read_bytes() == b"old"


def test_a_full_disk_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the system refuses what is written at the end."""
    pytest.importorskip("resource")
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    program = (
        "import resource, sys; from pathlib import Path; from edgespec.files.writing import atomic_write\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4, 4))\n"
        "try:\n"
        "    with atomic_write(Path(sys.argv[1])) as file: file.write(b'too much')\n"
        "except OSError: sys.exit(3)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert done.returncode == 3
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe of POSIX")
def test_no_file_takes_the_place_of_a_device_or_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "out"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"), atomic_write(path):
        pass
    with pytest.raises(OSError, match="regular file"), atomic_large_write(path, tmp_path / "out.partial"):
        pass
    with pytest.raises(OutputError, match="not a regular file"):
        check_writable(path)
    assert path.is_fifo()
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "none" / "a.json"):
        pass


def test_only_files_that_nobody_writes_are_abandoned(tmp_path: Path) -> None:
    stale, claimed, other = (tmp_path / name for name in ("a.partial", "b.partial", "c.gguf"))
    stale.write_bytes(bytes(10_000))
    other.write_bytes(bytes(10_000))
    with open_locked(claimed) as file:
        file.write(bytes(10_000))
        file.flush()
        assert remove_abandoned(tmp_path) >= 10_000
        assert sorted(tmp_path.iterdir()) == [claimed, other]
        file.write(b"more")
    assert claimed.stat().st_size == 10_004
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [other]
    assert remove_abandoned(tmp_path / "nowhere") == 0


ENDING = """
import signal, sys
from edgespec.files.writing import termination_raises

way, name = sys.argv[1:]
number = getattr(signal, name)
if way == "ignored":
    signal.signal(number, signal.SIG_IGN)
elif way == "handled":
    signal.signal(number, lambda *_: print("theirs"))
with termination_raises():
    try:
        signal.raise_signal(number)
        print("went on")
    finally:
        signal.raise_signal(number)  # an impatient second one
        print("cleaned up", flush=True)
print("end")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends Unix signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize(
    ("way", "said", "ends"),
    [
        ("usual", ["cleaned up"], True),
        ("ignored", ["went on", "cleaned up", "end"], False),
        ("handled", ["theirs", "went on", "theirs", "cleaned up", "end"], False),
    ],
)
def test_signals_that_end_the_program_clean_up_first(
    name: str, way: str, said: list[str], ends: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING, way, name], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == said
    assert done.stderr == ""
    assert done.returncode == (-getattr(signal, name) if ends else 0)


def test_other_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def work() -> None:
        with termination_raises():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
    with termination_raises():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) == before


def test_small_files_are_kept_and_read(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "a.json"
    save_json(path, {"rows": 3})
    assert read_json(path, lambda kept: int(kept["rows"])) == 3
    save_json(path / "below a file.json", {})  # impossible, and no error


@pytest.mark.parametrize(
    "damaged",
    [
        *(None, b"", b"{", b"\xff", b"[]", b"null", b'{"rows": []}', b"{}", b'{"rows": 1e999}'),
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_a_small_file_that_cannot_be_read_counts_as_missing(tmp_path: Path, damaged: bytes | None) -> None:
    path = tmp_path / "a.json"
    if damaged is not None:
        path.write_bytes(damaged)
    assert read_json(path, lambda kept: int(kept["rows"])) is None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "Free some space on that disk."),
        (errno.EDQUOT, "Free some space on that disk."),
        (errno.EACCES, "Give another name."),
    ],
)
def test_the_hint_fits_what_the_system_says(tmp_path: Path, code: int, said: str) -> None:
    path = tmp_path / "a.txt"
    with pytest.raises(OutputError) as raised, writing_to(path, "Give another name."):
        raise OSError(code, os.strerror(code))
    assert str(raised.value) == f"{path} cannot be written: {os.strerror(code)}. {said}"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "a.txt"
    with (
        pytest.raises(OutputError, match="there is no folder") as raised,
        writing_to(path, "Choose another."),
    ):
        path.write_text("text")
    assert f"{path.parent}. Create it first." in str(raised.value)


def test_a_file_that_is_being_read_is_replaced(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"old")
    other.write_bytes(b"new")
    reader = path.open("rb")
    threading.Timer(0.1, reader.close).start()  # Windows refuses until then
    replace(other, path)
    assert path.read_bytes() == b"new"
    assert not other.exists()


def test_what_is_missing_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        replace(tmp_path / "missing", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old"
