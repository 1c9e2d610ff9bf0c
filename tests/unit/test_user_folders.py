"""Users without a home folder, as in containers that run with any user id."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.files.user_folders import cache_folder, expanded, in_home

_NOBODY = 54321  # a user id without a name
_COMMANDS = """
from edgespec.cli.main import main
from edgespec.errors import UsageError
from edgespec.files.user_folders import in_home
print(*(main(command.split()) for command in ("sessions list", "models list", "plan", "chat --help")))
try:
    print(in_home("~/.cache/huggingface"))  # the cache of the Hub
except UsageError:
    print("unknown")
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may take any user id")
@pytest.mark.parametrize(("home", "last"), [(None, "unknown"), ("", "/.cache/huggingface")])
def test_commands_of_a_user_without_a_home(tmp_path: Path, home: str | None, last: str) -> None:
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", _COMMANDS],
        env=environment if home is None else environment | {"HOME": home},
        preexec_fn=lambda: os.setreuid(_NOBODY, -1),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-2:] == ["2 2 2 0", last], done.stderr
    assert done.stderr.count("Error: The home folder is unknown: ") == 3
    assert done.stderr.count("Set HOME to a folder that you can write to.") == 3
    assert not list(tmp_path.iterdir()), "no folder is named ~"


def test_paths_of_unknown_users_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    assert expanded("~/a") == in_home("~/a") == tmp_path / "a"
    assert expanded("~no-such-user/a") == in_home("~no-such-user/a") == Path("~no-such-user/a")
    assert expanded("~no\0user") == Path("~no\0user"), "nobody has such a name"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("WIN_PD_OVERRIDE_LOCAL_APPDATA", str(tmp_path))
    assert cache_folder() in (tmp_path / "cache" / "edgespec", tmp_path / "edgespec" / "Cache")
