"""The wheel of llama.cpp's libraries: when it is used, and what is said where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.base import prebuilt
from edgespec.base.installation import install_command
from edgespec.base.prebuilt import VARIABLE, Wheel
from tests.links import needs_links


@pytest.fixture(autouse=True)
def forget_the_misfit() -> Iterator[None]:
    yield
    prebuilt.misfit.cache_clear()


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Wheel:
    """A wheel that fits, as if it were installed."""
    fitting = Wheel(tmp_path / "lib", "0.1.0", prebuilt._version("llama-cpp-python").partition("+")[0])
    pretend(monkeypatch, fitting)
    return fitting


def pretend(monkeypatch: pytest.MonkeyPatch, wheel: Wheel | None) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that what is set from here on is undone, too
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(prebuilt, "installed_wheel", lambda: wheel)
    prebuilt.misfit.cache_clear()
    monkeypatch.setattr("edgespec.base.installation.installed_wheel", lambda: wheel)


def test_a_wheel_that_fits_is_used(wheel: Wheel) -> None:
    assert prebuilt.wheel_in_use() == wheel
    assert os.environ[VARIABLE] == str(wheel.folder)
    assert prebuilt.misfit() == ""


def test_a_folder_that_was_chosen_is_kept(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    assert prebuilt.wheel_in_use() is None
    assert os.environ[VARIABLE] == "/elsewhere"


def test_a_wheel_for_other_bindings_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, Wheel(tmp_path / "lib", "0.0.9", "0.3.1"))
    assert prebuilt.wheel_in_use() is None
    assert VARIABLE not in os.environ
    assert "edgespec-llama 0.0.9 is for llama-cpp-python 0.3.1" in prebuilt.misfit()


def test_what_compiles_llama_cpp_removes_the_wheel_first(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install_command(rebuild=True).startswith("pip uninstall -y edgespec-llama")
    pretend(monkeypatch, None)
    assert "uninstall" not in install_command(rebuild=True)


@needs_links
def test_the_libraries_of_an_installed_wheel_are_loaded(tmp_path: Path) -> None:
    """A package of that name, whose libraries are those that llama-cpp-python was installed with."""
    package = tmp_path / "edgespec_llama"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib.metadata, importlib.util, pathlib\n"
        "found = pathlib.Path(importlib.util.find_spec('llama_cpp').origin).parent / 'lib'\n"
        "LIBRARIES = pathlib.Path(__file__).parent / 'lib'\n"
        "LIBRARIES.exists() or LIBRARIES.symlink_to(found)\n"
        "LLAMA_CPP_PYTHON = importlib.metadata.version('llama-cpp-python').partition('+')[0]\n"
    )
    code = (
        "from edgespec.llama.build import current_build\n"
        "build = current_build()\n"
        "print(build.origin, build.libraries)"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    root = Path(__file__).parents[2]

    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    assert said == ["wheel", str(package / "lib")]
