"""The wheels that scripts/wheel makes, in an environment whose PATH has no compiler.

They are made first, with kernels for two kinds of processor; EDGESPEC_WHEELS names a folder that has
complete ones.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.environments import installed, run
from tests.tiny_images import png, write_seeing

ROOT = Path(__file__).parents[2]
PROMPT = "Count to twenty: one, two, three, four, one, two, three, four, one, two,"
LIMIT_BYTES = 40 * 1000**2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="scripts/wheel compiles on Linux"),
]

# All of them take 17 minutes of processor time; the first is for any processor, the second for most.
VARIANTS = ["--variants", "x64", "haswell"] if platform.machine() in ("x86_64", "AMD64") else []

Answer = Callable[..., str]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The three wheels."""
    folder = os.environ.get("EDGESPEC_WHEELS")
    if folder is None:
        folder = str(tmp_path_factory.mktemp("wheels"))
        done = subprocess.run(
            [str(ROOT / "scripts" / "wheel"), "--into", folder, *VARIANTS],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    found = sorted(Path(folder).glob("*.whl"))
    assert [wheel.name.partition("-")[0] for wheel in found] == [
        "edgespec",
        "edgespec_llama",
        "llama_cpp_python",
    ]
    return found


@pytest.fixture(scope="module")
def programs(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheels, and without the llama.cpp of this one."""
    folder = tmp_path_factory.mktemp("installed")
    return installed(wheels, folder, without="edgespec|llama_cpp")


@pytest.fixture
def answer(programs: Path, tmp_path: Path) -> Answer:
    """Ask the demo model with nothing but the environment's programs on the PATH; returns the text."""
    assert not [
        name for name in ("cc", "c++", "gcc", "g++", "clang") if shutil.which(name, path=str(programs))
    ]

    def ask(*options: str, **variables: str) -> str:
        said = run_alone(programs, tmp_path, "generate", "--prompt", PROMPT, "--json", *options, **variables)
        text: str = record(said)["text"]
        return text

    return ask


def run_alone(programs: Path, folder: Path, *arguments: str, status: int = 0, **variables: str) -> str:
    cache = str(programs.parent / "cache")  # of an environment, whose tests find out the same
    places = {"XDG_CACHE_HOME": cache, "XDG_DATA_HOME": cache, "PATH": str(programs)}
    return run(str(programs / "edgespec"), *arguments, cwd=folder, status=status, **{**places, **variables})


def record(said: str) -> dict[str, Any]:
    """The JSON in what a program printed, beside its notes."""
    found: dict[str, Any]
    found, _end = json.JSONDecoder().raw_decode(said[said.index("{") :])
    return found


def test_images_are_read_without_a_compiler(programs: Path, tmp_path: Path, smol_path: Path) -> None:
    model = write_seeing(tmp_path, "idefics3", smol_path, damped=0.3)
    options = ["-p", "one two one two", "-n", "16", "--context", "512", "--threads", "1", "--exact", "--json"]

    def tokens(picture: Path, draft: str) -> list[int]:
        asked = ["generate", str(model), "--image", str(picture), "--draft", draft, *options]
        found: list[int] = record(run_alone(programs, tmp_path, *asked))["tokens"]
        return found

    pictures = [tmp_path / "first.png", tmp_path / "second.png"]
    for seed, picture in enumerate(pictures):
        picture.write_bytes(png(seed=seed))
    first, second = (tokens(picture, "none") for picture in pictures)
    assert first != second  # it sees
    assert tokens(pictures[0], str(model)) == first


def libraries(programs: Path) -> Path:
    [package] = programs.parent.glob("**/site-packages/edgespec_llama")
    return package / "lib"


def test_the_wheels_answer_without_a_compiler(programs: Path, answer: Answer) -> None:
    assert answer("-n", "8")
    assert not [*programs.parent.glob("**/native/compiled")], "own kernels are in the wheel"


def test_bindings_without_the_libraries_are_explained(wheels: list[Path], tmp_path: Path) -> None:
    """Nothing else was installed."""
    others = [wheel for wheel in wheels if not wheel.name.startswith("edgespec_llama")]
    alone = installed(others, tmp_path, without="edgespec|llama_cpp")
    said = run_alone(alone, tmp_path, "generate", "--prompt", PROMPT, status=1)
    assert "llama.cpp cannot be loaded" in said
    assert "Install the wheel edgespec-llama" in said
    assert "llama.cpp cannot be loaded" in run_alone(alone, tmp_path, "doctor", status=1)


def test_the_doctor_tells_which_libraries_and_kernels_are_used(programs: Path, tmp_path: Path) -> None:
    said = run_alone(programs, tmp_path, "doctor", "--json")
    facts = record(said)
    build = facts["build"]
    assert build["origin"] == "wheel"
    assert build["libraries"] == str(libraries(programs))
    assert (libraries(programs) / f"libggml-cpu-{build['variant']}.so").exists()
    assert {"name": "EDGESPEC", "used": True}.items() <= facts["kernels"]["layouts"][0].items()
    assert "edgespec-llama" in run_alone(programs, tmp_path, "doctor")


def test_the_text_is_the_models_own_with_the_kernels_of_each_processor(
    programs: Path, answer: Answer, tmp_path: Path
) -> None:
    """Trees, rows and layouts are found out anew for each variant that this processor can run."""
    tried = []
    for library in sorted(libraries(programs).glob("libggml-cpu-*.so")):
        folder = tmp_path / library.stem / "edgespec_llama" / "lib"
        folder.mkdir(parents=True)
        beside = libraries(programs).parents[1] / "edgespec_llama.libs"  # libgomp
        (tmp_path / library.stem / beside.name).symlink_to(beside)
        others = [path for path in libraries(programs).iterdir() if "ggml-cpu-" not in path.name]
        for path in [library, *others]:
            (folder / path.name).symlink_to(path)
        variables = {"LLAMA_CPP_LIB_PATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        code = "from edgespec.kernels.ggml.functions import cpu_variant; print(cpu_variant())"
        asked = subprocess.run(
            [str(programs / "python"), "-c", code],
            env={"PATH": str(programs), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode:
            assert "llama.cpp has no kernels for this processor" in asked.stderr
            continue
        tried.append(asked.stdout.strip())
        options = ("-n", "24", "--temperature", "0", "--exact")
        plain = answer(*options, "--draft", "none", **variables)
        assert answer(*options, "--draft", "lookup", **variables) == plain, library.name
    assert "x64" in tried or not os.uname().machine.startswith("x86")
    assert tried


def test_the_libraries_fit_old_systems_and_say_nothing_of_this_one(wheels: list[Path]) -> None:
    [wheel] = [path for path in wheels if path.name.startswith("edgespec_llama")]
    assert "-py3-none-manylinux_2_" in wheel.name
    assert wheel.stat().st_size < LIMIT_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert [name for name in names if "libgomp" in name], "minimal systems have none"
        assert [name for name in names if name.endswith("LICENSE-llama.cpp")]
        here = str(ROOT).encode()
        assert [name for name in names if here in archive.read(name)] == []
