"""The secret that hides what learned tables are of: made once, and apart from them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgespec.files.secret import forget_secret, user_secret
from edgespec.files.user_folders import cache_folder, data_folder


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for kind in ("cache", "data"):
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path / kind))
    monkeypatch.setenv("WIN_PD_OVERRIDE_LOCAL_APPDATA", str(tmp_path))
    return data_folder()


def test_it_is_made_once_and_not_in_the_cache(data: Path) -> None:
    secret = user_secret()
    assert secret is not None
    assert user_secret() == secret
    (path,) = (path for path in data.rglob("*") if path.is_file())
    assert not path.is_relative_to(cache_folder())
    assert sys.platform == "win32" or path.stat().st_mode & 0o077 == 0, "only its owner can read it"


def test_a_new_one_has_nothing_to_do_with_the_one_before() -> None:
    secret = user_secret()
    forget_secret()
    forget_secret()  # there is nothing left to delete, which is no error
    assert user_secret() not in (secret, None)


def test_a_damaged_one_is_made_anew(data: Path) -> None:
    user_secret()
    (path,) = (path for path in data.rglob("*") if path.is_file())
    path.write_bytes(b"short")
    assert len(user_secret() or b"") == 16


def test_where_none_can_be_kept_there_is_none(data: Path) -> None:
    data.parent.mkdir(exist_ok=True)
    data.write_text("no folder")
    assert user_secret() is None
