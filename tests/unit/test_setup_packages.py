"""What scripts/setup.py installs packages with; nothing is downloaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import loaded_script, part

needs_own_pip = pytest.mark.skipif(find_spec("ensurepip") is None, reason="this Python brings no pip")


@pytest.fixture(scope="module")
def setup() -> Iterator[ModuleType]:
    with loaded_script("setup") as module:
        yield module


class Programs:
    """Stands for what the environment runs: notes each command, and lets those fail that it is told."""

    def __init__(self, *failing: str) -> None:
        self.commands: list[str] = []
        self._failing = failing

    def __call__(self, *command: str, extra: object = None, log: object = None) -> bool:
        self.commands.append(" ".join(command))
        return not any(word in self.commands[-1] for word in self._failing)

    @property
    def ends(self) -> list[str]:
        """The program and the last argument of each command."""
        return [f"{line.split()[0]} {line.split()[-1]}" for line in self.commands]


def environment_of(setup: ModuleType, path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A new environment without pip whose programs are those given."""
    environment = setup.Environment(path)
    environment.python = Path(sys.executable)  # which answers how pip is configured
    monkeypatch.setattr(environment, "run", programs)
    return environment


@needs_own_pip
def test_uv_installs_what_an_environment_needs(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs()
    packages = environment_of(setup, tmp_path, programs, monkeypatch).packages
    assert packages.begin(has_pip=False)
    assert packages.install("rich")
    assert packages.install_torch("2.13.0")
    assert packages.reinstall("it.whl")
    assert programs.ends == ["pip uv", "uv pip", "uv rich", "uv torch==2.13.0+cpu", "uv it.whl"]


@needs_own_pip
def test_pip_installs_where_uv_cannot_be_had(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs("--target")
    packages = environment_of(setup, tmp_path, programs, monkeypatch).packages
    assert packages.begin(has_pip=False)
    assert packages.install("rich")
    assert packages.install_torch("2.13.0")
    assert packages.reinstall("it.whl")
    wanted = ["ensurepip --default-pip", "pip rich", "pip torch==2.13.0+cpu", "pip it.whl"]
    assert programs.ends[1:] == wanted


@needs_own_pip
def test_pip_installs_what_uv_fails_at(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs("uv pip install")
    packages = environment_of(setup, tmp_path, programs, monkeypatch).packages
    assert packages.begin(has_pip=False)
    assert packages.install("rich")
    assert packages.install_torch("2.13.0")
    assert programs.ends == [
        *("pip uv", "uv pip", "ensurepip --default-pip", "uv rich", "pip rich"),
        *("uv torch==2.13.0+cpu", "uv torch==2.13.0", "pip torch==2.13.0+cpu"),
    ]


@needs_own_pip
def test_pip_installs_where_it_was_told_what_uv_does_not_know(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_PREFER_BINARY", "1")
    programs = Programs()
    packages = environment_of(setup, tmp_path, programs, monkeypatch).packages
    assert packages.begin(has_pip=False)
    assert packages.install("rich")
    assert programs.ends == ["ensurepip --default-pip", "pip rich"]


@pytest.mark.parametrize(
    ("listing", "options", "variables"),
    [
        ("", [], {}),
        (
            "global.index-url='https://one/simple'\n:env:.index-url='https://two/simple'\nlist.format='json'",
            ["--index-url", "https://two/simple"],
            {},
        ),
        (
            "global.extra-index-url='https://one https://two'\ninstall.no-index='true'\nglobal.no-cache-dir='0'",
            ["--extra-index-url", "https://one", "--extra-index-url", "https://two", "--no-index"],
            {},
        ),
        (
            "global.cert='/etc/all.pem'\nglobal.timeout='60'",
            [],
            {"SSL_CERT_FILE": "/etc/all.pem", "UV_HTTP_TIMEOUT": "60"},
        ),
    ],
    ids=["nothing", "the environment first", "several", "variables"],
)
def test_uv_is_told_what_pip_was_told(
    setup: ModuleType, listing: str, options: list[str], variables: dict[str, str]
) -> None:
    packages = part("packages")
    assert packages.for_uv(packages.pip_settings(listing)) == (options, variables)


def test_uv_is_not_used_with_an_unknown_setting(setup: ModuleType) -> None:
    packages = part("packages")
    assert packages.for_uv(packages.pip_settings("global.proxy='http://proxy:3128'")) is None


@pytest.mark.parametrize(
    ("platform", "nvidia"), [("linux", True), ("darwin", False), ("win32", False), ("win32", True)]
)
def test_torch_is_the_default_build(
    platform: str, nvidia: bool, setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs()
    environment = environment_of(setup, tmp_path, programs, monkeypatch)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(setup, "has_nvidia", lambda: nvidia)
    setup.install_torch(environment, {}, "2.13.0")
    assert programs.ends == ["pip torch==2.13.0"]


def test_torch_without_nvidia_on_linux_is_the_cpu_build(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs()
    environment = environment_of(setup, tmp_path, programs, monkeypatch)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(setup, "has_nvidia", lambda: False)
    setup.install_torch(environment, {}, "2.13.0")
    assert programs.ends == ["pip torch==2.13.0+cpu"]
    assert "--no-compile --only-binary :all:" in programs.commands[0]
