"""A file that is replaced is the old one or the new one, never something between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.files import written_whole


def test_the_new_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with written_whole(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_what_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def fail() -> None:
        with written_whole(path) as file:
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
        "import os, signal, sys; from pathlib import Path; from edgespec.files import written_whole\n"
        "with written_whole(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert done.returncode == -9
    assert path.read_bytes() == b"old"


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "none" / "a.json"):
        pass
