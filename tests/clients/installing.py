"""Programs from the npm registry, each in a folder of its own that is kept between runs."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.clients.programs import Program
from tests.clients.running import INSTALL_S, Failed, run


@dataclass(frozen=True)
class Installed:
    """A program that can be run."""

    binary: Path
    version: str


def install(program: Program, folder: Path) -> Installed:
    """Install a program, unless it is there.

    Args:
        folder: the program's own.

    Raises:
        Failed: it cannot be installed.
    """
    binary = folder / "node_modules" / ".bin" / program.binary
    about = folder / "node_modules" / program.package / "package.json"
    if not binary.exists():
        if shutil.which("npm") is None:
            raise Failed("not installed: there is no npm")
        shutil.rmtree(folder, ignore_errors=True)  # what another run left half installed
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true}\n')
        command = ["npm", "install", "--prefix", str(folder), "--no-fund", "--no-audit", program.package]
        done = run(command, folder, os.environ, INSTALL_S)
        if done.trouble or not binary.exists():
            shutil.rmtree(folder, ignore_errors=True)
            raise Failed(f"not installed: {done.trouble or 'the package has no such command'}")
    return Installed(binary, str(json.loads(about.read_text())["version"]))
