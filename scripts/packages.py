"""Puts packages into the environment of scripts/setup.py: by uv, in a tenth of the time, or by pip.

uv is told what pip was told: indexes, certificates, constraints. Where pip was told something else, or uv
cannot be had or fails, pip does the work.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from environment import Environment

_CONSTRAINTS = ["--constraint", "constraints.txt"]
_PIP = ["pip", "install", "--no-input", *_CONSTRAINTS]
_UV = ["uv", "pip", "install", "--index-strategy", "unsafe-best-match", *_CONSTRAINTS]

# What pip may be told, and how uv is told the same: options with each of the values, or variables.
_OPTIONS = {
    "constraint": "--constraint",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "index-url": "--index-url",
    "trusted-host": "--allow-insecure-host",
}
_SWITCHES = {"no-cache-dir": "--no-cache", "no-index": "--no-index"}
_VARIABLES = {"cert": "SSL_CERT_FILE", "default-timeout": "UV_HTTP_TIMEOUT", "timeout": "UV_HTTP_TIMEOUT"}
_WITHOUT_EFFECT = {
    "break-system-packages",
    "cache-dir",
    "disable-pip-version-check",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "user",
    "verbose",
}

Told = tuple[list[str], dict[str, str]]
"""Options and variables that tell uv what pip was told."""


class Packages:
    """Installs into one environment."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._folder = environment.path / "uv"
        self._told: Told | None = None  # while uv is there

    def begin(self, *, has_pip: bool) -> bool:
        """Fetch uv, and have it install pip if the environment has none. Returns whether pip is there.

        pip comes out of the wheel that Python brings along: installing that takes several seconds, most of
        them for byte code.
        """
        bundled = None if has_pip else bundled_pip()
        if has_pip or bundled is not None:
            self._fetch_uv({} if bundled is None else {"PYTHONPATH": str(bundled)})
        return has_pip or self._by_uv("pip") or self._environment.run("ensurepip", "--default-pip")

    def end(self) -> None:
        """Remove uv."""
        self._told = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def install(self, *arguments: str, log: Path | None = None) -> bool:
        """Install requirements. Returns whether that worked.

        Args:
            arguments: requirements, and options that both programs know.
            log: where the output goes, if not into the environment's log.
        """
        return self._by_uv(*arguments, log=log) or self._environment.run(*_PIP, *arguments, log=log)

    def reinstall(self, *wheels: str) -> bool:
        """Install wheels without what they need, also in place of the same versions."""
        by_pip = [*_PIP, "--no-deps", "--force-reinstall", *wheels]
        return self._by_uv("--no-deps", "--reinstall", *wheels) or self._environment.run(*by_pip)

    def install_torch(self, version: str) -> bool:
        """Install torch for the processor alone. Returns whether that worked.

        It comes from where pip was told to look, or else from where uv knows it to be.
        """
        only = ["--only-binary", ":all:"]
        local = f"torch=={version}+cpu"
        return (
            self._by_uv(*only, local)
            or self._by_uv("--torch-backend=cpu", f"torch=={version}")
            # Most of its thousands of files are never imported; those that are get byte code then.
            or self._environment.run(*_PIP, "--no-compile", *only, local)
        )

    def _by_uv(self, *arguments: str, log: Path | None = None) -> bool:
        """Install by uv; False if that is not there, or fails."""
        if self._told is None:
            return False
        options, variables = self._told
        python = ["--python", str(self._environment.python)]
        extra = {**variables, "PYTHONPATH": str(self._folder)}
        return self._environment.run(*_UV, *python, *options, *arguments, extra=extra, log=log)

    def _fetch_uv(self, extra: Mapping[str, str]) -> None:
        """Have pip fetch uv, if uv can be told what pip was told.

        Args:
            extra: variables by which Python finds pip.
        """
        told = self._ask_pip(extra)
        shutil.rmtree(self._folder, ignore_errors=True)
        if told is None:
            return
        whole = ["--no-compile", "--no-deps", "--only-binary", ":all:"]
        if self._environment.run(*_PIP, *whole, "--target", str(self._folder), "uv", extra=dict(extra)):
            self._told = told

    def _ask_pip(self, extra: Mapping[str, str]) -> Told | None:
        said = subprocess.run(
            [str(self._environment.python), "-I", "-m", "pip", "config", "list"],
            env=self._environment.variables(extra),
            capture_output=True,
            text=True,
            check=False,
        )
        return None if said.returncode else for_uv(pip_settings(said.stdout))


def bundled_pip() -> Path | None:
    """The wheel of pip that Python makes environments with; None if it is not where it usually is."""
    import ensurepip

    folders = [Path(ensurepip.__file__).parent / "_bundled", sysconfig.get_config_var("WHEEL_PKG_DIR")]
    wheels = [wheel for folder in folders if folder for wheel in sorted(Path(folder).glob("pip-*.whl"))]
    return wheels[0] if wheels else None


def pip_settings(listing: str) -> dict[str, str]:
    """What `pip config list` says of installing; the environment's variables come first, as for pip."""
    found: dict[str, dict[str, str]] = {}
    for line in listing.splitlines():
        place, _, rest = line.partition(".")
        name, _, value = rest.partition("=")
        try:
            found.setdefault(place, {})[name] = str(ast.literal_eval(value))
        except (SyntaxError, ValueError):
            continue
    return {
        name: value
        for place in ("global", "install", ":env:")
        for name, value in found.get(place, {}).items()
    }


def for_uv(settings: Mapping[str, str]) -> Told | None:
    """Options and variables that tell uv what pip was told; None if uv does not know all of it."""
    options: list[str] = []
    variables: dict[str, str] = {}
    for name, value in settings.items():
        if name in _OPTIONS:
            options += [word for one in value.split() for word in (_OPTIONS[name], one)]
        elif name in _SWITCHES:
            options += [_SWITCHES[name]] if value.lower() in ("1", "on", "true", "yes") else []
        elif name in _VARIABLES:
            variables[_VARIABLES[name]] = value
        elif name not in _WITHOUT_EFFECT:
            return None
    return options, variables
