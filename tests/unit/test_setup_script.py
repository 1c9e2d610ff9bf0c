"""The checks and choices of scripts/setup.py; nothing is downloaded or compiled."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from edgespec.base.prebuilt import PACKAGE
from tests.scripts import SCRIPTS, loaded_script, part
from tests.waiting import PATIENCE_S, wait_until, wait_until_ended

SCRIPT = SCRIPTS / "setup.py"


@pytest.fixture(scope="module")
def setup_module() -> Iterator[ModuleType]:
    with loaded_script("setup") as module:
        yield module


@pytest.fixture
def setup(setup_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script on a processor that needs no fixes, whatever this one needs."""
    monkeypatch.setattr(part("build_fixes"), "are_needed", lambda: False)
    return setup_module


def run(*arguments: str | Path, path: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the script as a person would, with nothing but PATH in its environment."""
    keep = {name: os.environ[name] for name in ("SYSTEMROOT", "HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env={**keep, "PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def logged(log: Path, pattern: str) -> re.Match[str] | None:
    """Find the pattern in a log that may not have been begun yet."""
    return re.search(pattern, log.read_text()) if log.exists() else None


@pytest.mark.skipif(sys.platform == "win32", reason="compilers are not found by PATH there")
@pytest.mark.parametrize("programs", [[], ["gcc"]], ids=["none", "no C++"])
def test_no_compiler(programs: list[str], setup: ModuleType, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for program in programs:
        (tools / program).touch(mode=0o755)
    done = run("--venv", tmp_path / "venv", path=tools)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "setup: llama.cpp is compiled on your machine, and there is no C and C++ compiler here.\n"
        f"{setup.compiler_advice(sys.platform)}\n"
    )
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="compilers are not found by PATH there")
def test_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    tools, folder = tmp_path / "tools", tmp_path / "precious"
    tools.mkdir()
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    for program in ("cc", "c++"):
        (tools / program).touch(mode=0o755)
    done = run("--venv", folder, path=tools)
    assert done.returncode == 1
    assert done.stderr == (
        f"setup: {folder} is there and is no virtual environment.\nChoose another place: --venv PATH\n"
    )
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_too_little_disk(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ensurepip")
    monkeypatch.setattr(setup, "has_nvidia", lambda: False)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))
    environment = setup.Environment(tmp_path / "sub" / "venv")
    with pytest.raises(setup.SetupError) as caught:
        setup.check_machine(environment, {"llama-cpp-python": "1"}, {"llama-cpp-python": "1"})
    assert str(caught.value) == (
        f"1.0 GiB are free at {tmp_path}; the installation needs about 3 GiB.\n"
        "Free some space, or choose another place: --venv PATH"
    )


def test_advice_names_the_command_to_type(setup: ModuleType) -> None:
    assert "sudo apt install build-essential" in setup.compiler_advice("linux")
    assert "sudo dnf install gcc-c++" in setup.compiler_advice("linux")
    assert "xcode-select --install" in setup.compiler_advice("darwin")
    assert "Visual Studio Build Tools" in setup.compiler_advice("win32")


def test_old_python(setup: ModuleType) -> None:
    assert setup.python_problem((3, 10)) == (
        "This is Python 3.10; EdgeSpec needs 3.11 or later.\n"
        "Run this script with a newer one, for example: python3.11 scripts/setup.py"
    )
    assert setup.python_problem((3, 11)) == setup.python_problem((3, 14)) == ""


def test_every_version_it_installs_is_pinned(setup: ModuleType) -> None:
    pins = setup.read_pins(SCRIPT.parents[1] / "constraints.txt")
    by_name = ["torch", "llama-cpp-python", "pip", "uv", *setup.MODELS, *setup.TEST_MODELS]
    assert [name for name in by_name if name not in pins] == []
    assert pins["torch"] == "2.13.0"


def test_pins_skip_what_depends_on_the_python(setup: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text('# a==1\nTyping_Extensions==4.16.0\nnumpy==2.4.6; python_version >= "3.11"\n')
    assert setup.read_pins(file) == {"typing-extensions": "4.16.0"}


@pytest.mark.parametrize(
    ("installed", "dev", "current"),
    [
        ({"torch": "2.13.0", "rich": "15.0.0"}, False, True),
        ({"torch": "2.13.0", "rich": "15.0.0", "extra": "1"}, False, True),
        ({"torch": "2.13.0", "rich": "14.0.0"}, False, False),
        ({"torch": "2.13.0"}, False, False),
        ({"torch": "2.13.0", "rich": "15.0.0"}, True, False),
    ],
    ids=["same", "more", "other version", "removed", "dev asked for"],
)
def test_second_run_notices_what_changed(
    installed: dict[str, str], dev: bool, current: bool, setup: ModuleType, tmp_path: Path
) -> None:
    environment = setup.Environment(tmp_path)
    mark = (
        f'{{"inputs": "{part("environment").inputs_digest()}", "dev": false, "cmake_args": "", '
        '"packages": {"torch": "2.13.0", "rich": "15.0.0"}}'
    )
    (tmp_path / "setup.json").write_text(mark)
    assert environment.is_current(installed, dev=dev) is current


def test_other_cmake_arguments_ask_for_a_new_build(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = setup.Environment(tmp_path)
    (tmp_path / "setup.json").write_text('{"cmake_args": "-DGGML_CUDA=on"}')
    for arguments, built in [("", True), ("-DGGML_CUDA=on", True), ("-DGGML_VULKAN=on", False)]:
        environment.cmake_args = arguments
        assert environment.has_build() is built


def test_some_processors_need_a_build_with_fixes(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = setup.Environment(tmp_path)
    environment.mark_current(dev=False, compiled=False)  # a build of unknown origin
    assert environment.has_build()
    monkeypatch.setattr(part("build_fixes"), "are_needed", lambda: True)
    assert not environment.has_build()
    environment.mark_current(dev=False, compiled=True)
    assert environment.has_build()
    environment.mark_current(dev=False, compiled=False)  # another package was added
    assert environment.has_build()
    monkeypatch.setattr(part("build_fixes"), "digest", lambda: "better fixes")
    assert not environment.has_build()


def test_a_build_without_images_is_compiled_again(setup: ModuleType, tmp_path: Path) -> None:
    environment = setup.Environment(tmp_path)
    libraries = tmp_path / "lib" / "python3.11" / "site-packages" / "llama_cpp" / "lib"
    libraries.mkdir(parents=True)
    (libraries / "libllama.so").touch()
    assert not environment.has_build()
    (libraries / "libmtmd.so").touch()
    assert environment.has_build()


def test_it_ends_by_trying_the_kernels(
    setup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = setup.Environment(tmp_path)
    environment.python = Path(sys.executable)
    setup.try_kernels(environment)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "llama.cpp: trying its kernels"
    assert all(line.startswith("  ") for line in lines)
    assert lines


@pytest.mark.skipif(sys.platform == "win32", reason="a script in the shell's language")
def test_a_build_that_does_not_work_ends_in_an_error(setup: ModuleType, tmp_path: Path) -> None:
    environment = setup.Environment(tmp_path)
    environment.python = tmp_path / "python"
    environment.python.write_text("#!/bin/sh\necho llama.cpp does not work on this processor\nexit 1\n")
    environment.python.chmod(0o755)
    with pytest.raises(setup.SetupError, match="does not work on this processor"):
        setup.try_kernels(environment)


def test_failure_shows_the_end_of_the_log(setup: ModuleType, tmp_path: Path) -> None:
    environment = setup.Environment(tmp_path)
    environment.python = Path(sys.executable)
    environment.log.write_text("".join(f"line {n}\n" for n in range(100)))
    assert environment.run("no_such_module") is False
    lines = str(environment.failure("Try again.")).splitlines()
    assert lines[0] == "this failed:"
    assert len(lines) == 1 + part("environment").LOG_TAIL + 2
    assert lines[-3].endswith("No module named no_such_module")
    assert lines[-2:] == ["Try again.", f"The whole output is in {environment.log}"]


@pytest.mark.skipif(sys.platform == "win32", reason="programs are found by other names there")
@pytest.mark.parametrize(
    ("programs", "devices", "found"),
    [
        ([], [], None),
        (["nvidia-smi"], [], None),
        (["nvidia-smi", "nvcc"], ["dri/renderD128"], "cuda"),
        (["hipcc"], [], None),
        (["hipcc"], ["kfd"], "rocm"),
        (["glslc"], [], None),
        (["glslc"], ["dri/renderD128"], "vulkan"),
        (["nvcc"], ["dri/renderD128"], None),
    ],
)
def test_a_backend_is_taken_if_its_card_and_its_tools_are_there(
    programs: list[str],
    devices: list[str],
    found: str | None,
    setup: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in programs:
        (tmp_path / name).touch(mode=0o755)
    for name in [*devices, "include/vulkan/vulkan_core.h"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("#define VK_EXT_layer_settings 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VULKAN_SDK", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    assert part("backends").found("linux", tmp_path) == found
    assert part("backends").found("darwin", tmp_path) is None


@pytest.mark.skipif(sys.platform == "win32", reason="programs are found by other names there")
def test_headers_that_are_too_old_for_vulkan(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "glslc").touch(mode=0o755)
    header = tmp_path / "include" / "vulkan" / "vulkan_core.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define VK_HEADER_VERSION 239")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VULKAN_SDK", str(tmp_path))
    assert f"{header} is older" in part("backends").missing("vulkan", "linux")


@pytest.mark.skipif(sys.platform == "win32", reason="programs are found by other names there")
@pytest.mark.parametrize(
    ("said", "wanted"),
    [("8.9\\n8.9\\n", "-DCMAKE_CUDA_ARCHITECTURES=89-real"), ("8.6\\n12.0\\n", ""), ("[N/A]\\n", "")],
)
def test_cuda_is_compiled_for_the_cards_that_are_here(
    setup: ModuleType, said: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert part("backends").arguments("cuda").removeprefix("-DGGML_CUDA=ON").strip() == wanted
    assert "ARCHITECTURES" not in part("backends").arguments("vulkan")


@pytest.mark.parametrize("backend", ["cuda", "rocm", "vulkan", "metal"])
def test_a_backend_that_cannot_be_compiled(backend: str, tmp_path: Path) -> None:
    done = run("--venv", tmp_path / "venv", "--backend", backend, path=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("setup: For ") or "Metal is for Macs" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_what_the_readme_uses_is_installed(setup: ModuleType) -> None:
    readme = (SCRIPT.parents[1] / "README.md").read_text(encoding="utf-8")
    for used, extra in {"edgespec serve": "serve", "JSON schema": "grammar"}.items():
        assert used not in readme or extra in setup.extras(dev=False)


def test_what_llama_cpp_needs_is_installed(setup: ModuleType) -> None:
    """Its wheel is installed by itself, when all else is there."""
    needed = {re.split("[<>=!~ ;\\[]", line)[0] for line in metadata.requires("llama-cpp-python") or []}
    extra = {
        re.split("[<>=!~ ;\\[]", line)[0]
        for line in metadata.requires("llama-cpp-python") or []
        if "extra ==" in line
    }
    own = setup.dependencies(SCRIPT.parents[1] / "pyproject.toml", setup.extras(dev=False))
    names = {part("environment").normalized(re.split("[<>=!~ ;\\[]", line)[0]) for line in own}
    assert {part("environment").normalized(name) for name in needed - extra} <= names | {
        *setup.BESIDE_LLAMA_CPP,
        PACKAGE,  # which bindings of EdgeSpec's wheels ask for
    }


def test_the_wheel_that_was_compiled_is_installed_and_its_folders_go(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    environment = setup.Environment(tmp_path)
    monkeypatch.setattr(environment, "run", lambda *command: ran.append(command) or True)
    setup.install_llama_cpp(environment)
    assert ran == [], "there is none"
    for folder in (environment.wheels, environment.build):
        folder.mkdir()
    (environment.wheels / "llama_cpp_python-1.0-py3-none-any.whl").touch()
    setup.install_llama_cpp(environment)
    assert ran[0][-1].endswith("llama_cpp_python-1.0-py3-none-any.whl")
    assert not environment.wheels.exists()
    assert not environment.build.exists()


def test_compiling_and_installing_run_side_by_side(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = setup.Environment(tmp_path)
    compiling = threading.Event()
    installing = threading.Event()

    def build(*_: object, **__: object) -> bool:
        compiling.set()
        assert installing.wait(PATIENCE_S)
        return True

    def torch(*_: object) -> None:
        assert {"edgespec", "models", "packages"} <= {*steps}, "what an answer needs comes first"
        installing.set()
        assert compiling.wait(PATIENCE_S)

    def kernels(*_: object) -> bool:
        steps.append("kernels")
        return True

    def created() -> None:
        wait_until(lambda: "kernels" in steps)  # they are compiled meanwhile

    steps: list[str] = []
    monkeypatch.setattr(setup, "build_llama_cpp", build)
    monkeypatch.setattr(setup, "install_torch", torch)
    monkeypatch.setattr(environment, "create", created)
    monkeypatch.setattr(setup, "compile_kernels", kernels)
    monkeypatch.setattr(setup, "install_models", lambda *_: steps.append("models"))
    monkeypatch.setattr(setup, "install_dependencies", lambda *_, dev: steps.append("packages"))
    monkeypatch.setattr(setup, "install_edgespec", lambda _: steps.append("edgespec"))
    monkeypatch.setattr(setup, "install_llama_cpp", lambda _: steps.append("llama.cpp"))
    pins = setup.read_pins(SCRIPT.parents[1] / "constraints.txt")
    assert setup.install(environment, {}, pins, dev=False, rebuild=False)
    assert sorted(steps[:4]) == ["edgespec", "kernels", "models", "packages"]
    assert steps[4:] == ["llama.cpp"]


def test_dependencies_come_with_those_of_extras(setup: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(
        '[project]\nname = "it"\ndependencies = ["a>=1", "b"]\n'
        '[project.optional-dependencies]\nx = ["c"]\ny = ["d"]\nall = ["it[x,y]", "e"]\n'
    )
    assert setup.dependencies(file, []) == ["a>=1", "b"]
    assert setup.dependencies(file, ["all"]) == ["a>=1", "b", "c", "d", "e"]
    real = setup.dependencies(SCRIPT.parents[1] / "pyproject.toml", setup.extras(dev=True))
    assert any(line.startswith("pytest") for line in real)


def test_what_fails_ends_what_runs_beside_it(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long compilation does not delay the message that the network is away."""
    environment = setup.Environment(tmp_path)
    environment.python = Path(sys.executable)
    (tmp_path / "endless.py").write_text("import time; print('begun', flush=True); time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def build(*_: object, **__: object) -> bool:
        assert not environment.run("endless", log=environment.compiling_log)
        raise setup.SetupError("it was ended")

    def torch(*_: object, **__: object) -> None:
        wait_until(lambda: logged(environment.compiling_log, "begun"))
        raise setup.SetupError("the network is away")

    monkeypatch.setattr(environment, "create", lambda: None)
    monkeypatch.setattr(setup, "build_llama_cpp", build)
    monkeypatch.setattr(setup, "compile_kernels", lambda *_: True)
    monkeypatch.setattr(setup, "install_dependencies", torch)
    pins = setup.read_pins(SCRIPT.parents[1] / "constraints.txt")
    with pytest.raises(setup.SetupError, match="the network is away"):
        setup.install(environment, {}, pins, dev=False, rebuild=False)
    assert not environment.run("this")


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes any time by the clock of `progress`."""
    monkeypatch.setattr(part("progress"), "time", SimpleNamespace(monotonic=lambda: 100.0))


@pytest.mark.usefixtures("stopped_clock")
def test_it_says_how_far_a_compilation_is(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    assert part("progress").compiled_files(log) == (0, 0)
    log.write_text("[1/80] Building\n" + "x" * 50_000 + "\n  [20/80] Building CXX object\n")
    assert part("progress").compiled_files(log) == (20, 80)
    assert part("progress").Step("it", 98.0, log).state() == "20 of 80 files, about 6 s more"
    log.write_text("[2/80] Building\n")
    assert part("progress").Step("it", 98.0, log).state() == "2 of 80 files"
    log.write_text("[20/80] Building\n")
    monkeypatch.setattr(part("progress"), "REPORT_S", 0.01)
    said = []

    def action() -> bool:
        def reported() -> bool:
            said.extend(capsys.readouterr().out.splitlines())
            return any("20 of 80 files, about 0 s more" in line for line in said)

        return wait_until(reported)

    assert setup.Progress().during("llama.cpp", "compiling", action, log)
    assert said[0] == "llama.cpp: compiling"
    assert capsys.readouterr().out.splitlines()[-1] == "llama.cpp: done in 0 s"
    assert setup.Progress(quiet=True).during("llama.cpp", "compiling", lambda: True, log)
    assert capsys.readouterr().out == ""
    assert [part("progress").duration(seconds) for seconds in (0.4, 59.6, 61)] == [
        "0 s",
        "1 min 0 s",
        "1 min 1 s",
    ]


@pytest.mark.usefixtures("stopped_clock")
def test_a_terminal_shows_what_is_being_done_in_its_last_line(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(part("progress"), "_REFRESH_S", 0.01)
    log, output = tmp_path / "log", Terminal()
    log.write_text("[20/80] Building\n")
    progress = setup.Progress(output=output)

    def action() -> bool:
        wait_until(lambda: "llama.cpp (20 of 80 files, about " in output.getvalue())
        progress.say("torch: done")
        return True

    assert progress.during("llama.cpp", "compiling", action, log)
    assert "\r\x1b[Ktorch: done\n" in output.getvalue()
    assert output.getvalue().endswith("llama.cpp: done in 0 s\n")


class FakePip:
    """Stands in for the processes that download and compile: files appear as pip would leave them."""

    def __init__(self, environment: Any, *, compiles: bool = True) -> None:
        self.compiles = compiles
        self.ran: list[tuple[tuple[str, ...], dict[str, str]]] = []
        environment.python = Path(sys.executable)
        environment.run = self.run

    def run(self, *command: str, extra: dict[str, str] | None = None, log: Path | None = None) -> bool:
        assert log is not None
        log.parent.mkdir(exist_ok=True)
        log.touch()
        self.ran.append((command, extra or {}))
        if "download" in command:
            folder = Path(command[command.index("--dest") + 1])
            folder.mkdir()
            with tarfile.open(folder / "llama_cpp_python-1.0.tar.gz", "w:gz") as archive:
                archive.addfile(tarfile.TarInfo("llama_cpp_python-1.0/CMakeLists.txt"))
        if "wheel" in command and self.compiles:
            folder = Path(command[command.index("--wheel-dir") + 1])
            folder.mkdir()
            (folder / "llama_cpp_python-1.0-py3-none-any.whl").touch()
        return self.compiles or "wheel" not in command

    @property
    def steps(self) -> list[str]:
        return [" ".join(command[:2]) for command, _ in self.ran]


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch, setup: ModuleType, tmp_path: Path) -> None:
    """A machine without a graphics card, and with an empty cache of pip's."""
    monkeypatch.setattr(part("backends"), "found", lambda _platform: None)
    monkeypatch.setattr(part("llama_build"), "has_nvidia", lambda: False)
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))


@pytest.mark.usefixtures("no_card")
def test_llama_cpp_is_compiled_once_on_a_machine(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pip")  # which says where its cache is
    first = setup.Environment(tmp_path / "first")
    pip = FakePip(first)
    assert setup.build_llama_cpp(first, {}, "1.0")
    assert pip.steps == ["pip install", "pip download", "pip wheel"]
    arguments = pip.ran[-1][1]["CMAKE_ARGS"]
    assert "-DGGML_RPC=ON" in arguments
    assert "-DLLAVA_BUILD=ON" in arguments
    assert "llama_cpp.cmake" in arguments
    assert not setup.build_llama_cpp(first, {"llama-cpp-python": "1.0"}, "1.0"), "it is installed"

    second = setup.Environment(tmp_path / "second")
    pip = FakePip(second)
    assert setup.build_llama_cpp(second, {}, "1.0")
    assert pip.ran == []
    assert [path.name for path in second.wheels.iterdir()] == ["llama_cpp_python-1.0-py3-none-any.whl"]
    assert setup.build_llama_cpp(second, {"llama-cpp-python": "1.0"}, "1.0", rebuild=True)
    assert pip.steps == ["pip install", "pip download", "pip wheel"]

    for change in ("options", "fixes", "card"):
        third = setup.Environment(tmp_path / change, cmake_args="-DX=1" if change == "options" else "")
        if change == "fixes":
            monkeypatch.setattr(part("build_fixes"), "applies", lambda: True)
            monkeypatch.setattr(part("build_fixes"), "digest", lambda: "better fixes")
        if change == "card":
            monkeypatch.setattr(part("backends"), "found", lambda _platform: "vulkan")
        pip = FakePip(third)
        assert setup.build_llama_cpp(third, {}, "1.0")
        assert "pip wheel" in pip.steps, change
    assert "-DGGML_VULKAN=ON" in pip.ran[-1][1]["CMAKE_ARGS"]


@pytest.mark.usefixtures("no_card")
def test_an_interrupted_build_goes_on_where_it_was(setup: ModuleType, tmp_path: Path) -> None:
    environment = setup.Environment(tmp_path / "venv")
    pip = FakePip(environment, compiles=False)
    with pytest.raises(setup.SetupError, match="this failed"):
        setup.build_llama_cpp(environment, {}, "1.0")
    ((before, variables),) = pip.ran[-1:]
    pip = FakePip(environment)
    assert setup.build_llama_cpp(environment, {}, "1.0")
    ((command, again),) = pip.ran
    assert command == before, "the same sources"
    assert again["SKBUILD_BUILD_DIR"] == variables["SKBUILD_BUILD_DIR"]
    (Path(command[-1]) / "CMakeLists.txt").unlink()
    pip = FakePip(environment)
    assert setup.build_llama_cpp(environment, {}, "1.0", rebuild=True)
    assert pip.steps == ["pip install", "pip download", "pip wheel"], "from the beginning"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_what_a_killed_set_up_began_is_waited_for(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(SCRIPT.parent)]))
    (tmp_path / "step.py").write_text(
        "import pathlib, time\nprint('begun', flush=True)\n"
        "while not pathlib.Path('END').exists(): time.sleep(0.01)\n".replace("END", str(tmp_path / "end"))
    )
    (tmp_path / "killed.py").write_text(
        "import pathlib, sys\nfrom environment import Environment\n"
        f"it = Environment(pathlib.Path({str(tmp_path / 'venv')!r}))\n"
        "it.python = pathlib.Path(sys.executable)\nit.path.mkdir()\n"
        "with it.alone():\n    it.run('step')\n"
    )
    killed = subprocess.Popen([sys.executable, "-m", "killed"])
    environment = setup.Environment(tmp_path / "venv")
    wait_until(lambda: logged(environment.log, "begun"))
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    entered = threading.Event()

    def enter() -> None:
        with environment.alone():
            entered.set()

    entering = threading.Thread(target=enter)
    entering.start()
    wait_until(lambda: "Waiting for another set-up" in capsys.readouterr().out)
    assert not entered.is_set()
    (tmp_path / "end").touch()
    assert entered.wait(PATIENCE_S)
    entering.join()


@pytest.mark.skipif(sys.platform == "win32", reason="processes have no groups")
def test_what_is_ended_ends_with_what_it_started(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "starts.py").write_text(
        "import subprocess, sys, time\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('started', inner.pid, flush=True)\ninner.wait()\n"
    )
    environment = setup.Environment(tmp_path)
    environment.python = Path(sys.executable)
    worked: list[bool] = []
    running = threading.Thread(target=lambda: worked.append(environment.run("starts")))
    running.start()
    started = psutil.Process(int(wait_until(lambda: logged(environment.log, r"started (\d+)\n"))[1]))
    environment.stop()
    running.join(PATIENCE_S)
    assert worked == [False]
    wait_until_ended(started)


def test_half_installed_packages_are_installed_again(setup: ModuleType, tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("whole", "half"):
        (packages / f"{name}-1.0.dist-info").mkdir(parents=True)
        (packages / f"{name}-1.0.dist-info" / "METADATA").touch()
    (packages / "whole-1.0.dist-info" / "INSTALLER").write_text("pip")
    setup.Environment(tmp_path).forget_halves()
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="other paths")
def test_an_environment_without_pip_is_made_again(setup: ModuleType, tmp_path: Path) -> None:
    """Creating it was interrupted: pip comes last."""
    environment = setup.Environment(tmp_path / "venv")
    environment.python.parent.mkdir(parents=True)
    environment.python.symlink_to(sys.executable)
    (environment.path / "pyvenv.cfg").write_text("home = /nowhere\n")
    environment.prepare()
    environment.create()
    assert environment.installed().keys() >= {"pip"}


def test_a_folder_that_was_only_begun_is_taken(setup: ModuleType, tmp_path: Path) -> None:
    """Set-up was killed before the environment was made, when kernels were being compiled."""
    environment = setup.Environment(tmp_path / "venv")
    environment.prepare()
    (environment.path / "setup-kernels.log").touch()
    setup.Environment(tmp_path / "venv").prepare()
    assert not (environment.path / "setup-kernels.log").exists()
