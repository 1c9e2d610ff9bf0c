"""The import contracts of pyproject.toml hold, and an import that breaks one is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter")
ROOT = Path(__file__).parents[2]

# contract -> a module, and the import that it must not have
BREACHES = {
    "layers": ("costs/curves.py", "from edgespec.engine import answer"),
    "no cycles among the packages of a layer": (
        "speculation/growth.py",
        "from edgespec.speculation.learning import acceptance",
    ),
    "families of heads are independent": (
        "heads/mtp.py",
        "from edgespec.heads import eagle",
    ),
    "speculation and costs are arithmetic": ("speculation/tree.py", "from edgespec.files import state"),
    "llama.cpp is called in two places": ("engine/engine.py", "import llama_cpp"),
    "only the server needs serving": ("cli/batch/run.py", "from edgespec.serving import metrics"),
    "only tuning needs torch": ("drafting/make.py", "import torch"),
    "only batches on clusters need ray": ("cli/batch/run.py", "import ray"),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "edgespec", tmp_path / "edgespec", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_contracts_hold(copy: Path) -> None:
    code, broken, output = lint(copy)
    assert (code, broken) == (0, set()), output


@pytest.mark.parametrize("contract", BREACHES)
def test_a_breach_is_found(copy: Path, contract: str) -> None:
    module, statement = BREACHES[contract]
    with (copy / "edgespec" / module).open("a") as file:
        file.write(f"\n{statement}\n")
    code, broken, output = lint(copy)
    assert code == 1, output
    assert contract in broken, output


def lint(folder: Path) -> tuple[int, set[str], str]:
    """The exit status of lint-imports, the contracts that it calls broken, and what it prints."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    lines = [line.strip() for line in output.splitlines()]
    return done.returncode, {name for name in BREACHES if f"{name} BROKEN" in lines}, output
