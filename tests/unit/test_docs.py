"""The documentation builds, and its reference is that of the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_command_line_reference_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "reference" / "library" / "index.html").read_text()
    assert "One target and one drafter, generating one answer at a time." in page
