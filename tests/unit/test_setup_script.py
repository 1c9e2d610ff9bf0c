"""The checks and choices of scripts/setup.py; nothing is downloaded or compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup.py"
PIP = ["pip", "install", "--no-input", "--constraint", "constraints.txt"]


@pytest.fixture(scope="module")
def setup_module() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPT.parent))  # where Python looks first when the script is run
    spec = importlib.util.spec_from_file_location("edgespec_setup", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture
def setup(setup_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script on a processor that needs no fixes, whatever this one needs."""
    monkeypatch.setattr(setup_module.build_fixes, "are_needed", lambda: False)
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


@pytest.mark.parametrize(
    ("platform", "nvidia"), [("linux", True), ("darwin", False), ("win32", False), ("win32", True)]
)
def test_torch_is_the_default_build(platform: str, nvidia: bool, setup: ModuleType) -> None:
    commands = setup.torch_commands(platform, nvidia, "2.13.0", "python")
    assert commands == [[[*PIP, "torch==2.13.0"]]]


def test_torch_without_nvidia_on_linux_is_the_cpu_build(setup: ModuleType) -> None:
    by_pip, by_uv = setup.torch_commands("linux", False, "2.13.0", "/venv/bin/python")
    assert by_pip == [[*PIP, "--no-compile", "--only-binary", ":all:", "torch==2.13.0+cpu"]]
    assert by_uv == [
        [*PIP, "uv"],
        [
            *("uv", "pip", "install", "--python", "/venv/bin/python"),
            *("--constraint", "constraints.txt", "--torch-backend=cpu", "torch==2.13.0"),
        ],
    ]


def test_every_version_it_installs_is_pinned(setup: ModuleType) -> None:
    pins = setup.read_pins(SCRIPT.parents[1] / "constraints.txt")
    by_name = ["torch", "llama-cpp-python", *setup.MODELS, *setup.TEST_MODELS]
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
        f'{{"inputs": "{setup.inputs_digest()}", "dev": false, "cmake_args": "", '
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
        monkeypatch.setattr(setup, "CMAKE_ARGS", arguments)
        assert environment.has_build() is built


def test_some_processors_need_a_build_with_fixes(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = setup.Environment(tmp_path)
    environment.mark_current(dev=False, compiled=False)  # a build of unknown origin
    assert environment.has_build()
    monkeypatch.setattr(setup.build_fixes, "are_needed", lambda: True)
    assert not environment.has_build()
    environment.mark_current(dev=False, compiled=True)
    assert environment.has_build()
    environment.mark_current(dev=False, compiled=False)  # another package was added
    assert environment.has_build()
    monkeypatch.setattr(setup.build_fixes, "digest", lambda: "better fixes")
    assert not environment.has_build()


@pytest.mark.parametrize("needed", [False, True])
def test_a_cached_build_does_not_come_to_a_processor_that_needs_fixes(
    needed: bool, setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.build_fixes, "are_needed", lambda: needed)
    environment = setup.Environment(tmp_path)
    runs: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "run", lambda *a, extra, log: runs.append(a) or True)
    assert setup.build_llama_cpp(environment, {}, "1.0") is needed
    assert ("--no-cache-dir" in runs[0]) is needed


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
    assert len(lines) == 1 + setup.LOG_TAIL + 2
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
    assert setup.backends.found("linux", tmp_path) == found
    assert setup.backends.found("darwin", tmp_path) is None


def test_headers_that_are_too_old_for_vulkan(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "glslc").touch(mode=0o755)
    header = tmp_path / "include" / "vulkan" / "vulkan_core.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define VK_HEADER_VERSION 239")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VULKAN_SDK", str(tmp_path))
    assert f"{header} is older" in setup.backends.missing("vulkan", "linux")


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
    assert setup.backends.arguments("cuda").removeprefix("-DGGML_CUDA=ON").strip() == wanted
    assert "ARCHITECTURES" not in setup.backends.arguments("vulkan")


@pytest.mark.parametrize("backend", ["cuda", "rocm", "vulkan", "metal"])
def test_a_backend_that_cannot_be_compiled(backend: str, tmp_path: Path) -> None:
    done = run("--venv", tmp_path / "venv", "--backend", backend, path=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("setup: For ") or "Metal is for Macs" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_build_lets_machines_share_a_model_and_a_rebuild_is_fresh(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = setup.Environment(tmp_path)
    runs: list[tuple[tuple[str, ...], dict[str, str]]] = []
    monkeypatch.setattr(environment, "run", lambda *a, extra, log: runs.append((a, extra)) or True)
    monkeypatch.setattr(setup.backends, "found", lambda _platform: None)
    there = {"llama-cpp-python": "1.0"}
    assert not setup.build_llama_cpp(environment, there, "1.0")
    assert runs == []
    assert setup.build_llama_cpp(environment, there, "1.0", rebuild=True)
    ((arguments, variables),) = runs
    assert "--no-cache-dir" in arguments
    assert "-DGGML_RPC=ON" in variables["CMAKE_ARGS"]
    monkeypatch.setattr(setup.backends, "found", lambda _platform: "vulkan")
    assert setup.build_llama_cpp(environment, {}, "1.0")
    assert "-DGGML_VULKAN=ON" in runs[1][1]["CMAKE_ARGS"]


def test_what_the_readme_uses_is_installed(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    environment = setup.Environment(tmp_path)
    monkeypatch.setattr(environment, "run", lambda *command: ran.append(command) or True)
    environment.wheels.mkdir()
    (environment.wheels / "llama_cpp_python-1.0-py3-none-any.whl").touch()
    setup.install_edgespec(environment, dev=False)
    assert ran[0][-1].endswith("llama_cpp_python-1.0-py3-none-any.whl")
    assert not environment.wheels.exists()
    extras = ran[1][-1].removeprefix(".[").removesuffix("]").split(",")
    readme = (SCRIPT.parents[1] / "README.md").read_text(encoding="utf-8")
    for used, extra in {"edgespec serve": "serve", "--html": "report", "JSON schema": "grammar"}.items():
        assert used not in readme or extra in extras


def test_compiling_and_installing_run_side_by_side(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = setup.Environment(tmp_path)
    compiling = threading.Event()
    installing = threading.Event()

    def build(*_: object, **__: object) -> bool:
        compiling.set()
        assert installing.wait(30)
        return True

    def torch(*_: object) -> None:
        installing.set()
        assert compiling.wait(30)

    steps: list[str] = []
    monkeypatch.setattr(setup, "build_llama_cpp", build)
    monkeypatch.setattr(setup, "install_torch", torch)
    monkeypatch.setattr(setup, "compile_kernels", lambda _: steps.append("kernels"))
    monkeypatch.setattr(setup, "install_models", lambda *_: steps.append("models"))
    monkeypatch.setattr(setup, "install_dependencies", lambda *_, dev: steps.append("packages"))
    monkeypatch.setattr(setup, "install_edgespec", lambda *_, dev: steps.append("edgespec"))
    pins = setup.read_pins(SCRIPT.parents[1] / "constraints.txt")
    assert setup.install(environment, {}, pins, dev=False, rebuild=False)
    assert sorted(steps[:3]) == ["kernels", "models", "packages"]
    assert steps[3:] == ["edgespec"]


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

    def torch(*_: object) -> None:
        while not (environment.compiling_log.exists() and "begun" in environment.compiling_log.read_text()):
            time.sleep(0.01)
        raise setup.SetupError("the network is away")

    monkeypatch.setattr(setup, "build_llama_cpp", build)
    monkeypatch.setattr(setup, "install_torch", torch)
    pins = setup.read_pins(SCRIPT.parents[1] / "constraints.txt")
    with pytest.raises(setup.SetupError, match="the network is away"):
        setup.install(environment, {}, pins, dev=False, rebuild=False)
    assert not environment.run("this")


def test_it_says_how_far_a_compilation_is(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    assert setup.compiled_files(log) == (0, 0)
    log.write_text("[1/80] Building\n" + "x" * 50_000 + "\n  [20/80] Building CXX object\n")
    assert setup.compiled_files(log) == (20, 80)
    monkeypatch.setattr(setup, "REPORT_S", 0.01)
    said = []

    def action() -> bool:
        while not any("20 of 80 files, about " in line for line in said):
            said.extend(capsys.readouterr().out.splitlines())
            time.sleep(0.01)
        return True

    assert setup.Progress().during("llama.cpp", "compiling", action, log)
    assert said[0] == "llama.cpp: compiling"
    assert capsys.readouterr().out.splitlines()[-1] == "llama.cpp: done in 0 s"
    assert setup.Progress(quiet=True).during("llama.cpp", "compiling", lambda: True, log)
    assert capsys.readouterr().out == ""
    assert [setup.duration(seconds) for seconds in (0.4, 59.6, 61)] == ["0 s", "1 min 0 s", "1 min 1 s"]
