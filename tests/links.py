"""Files under other names: links where any user can make them, which is not so on Windows."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

needs_links = pytest.mark.skipif(sys.platform == "win32", reason="making a symbolic link takes a right there")


def put(file: Path, place: Path) -> None:
    """Make a file available at a place: by a link, or as a copy."""
    if sys.platform == "win32":
        shutil.copyfile(file, place)
    else:
        place.symlink_to(file)
