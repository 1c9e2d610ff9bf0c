"""Share what integration tests find out about models and the machine, since finding it out takes seconds."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from edgespec.files.small_json import save_json
from edgespec.files.user_folders import cache_folder

# Row rules, and what contexts allocate: both depend on the model's header, the build and the processor only.
# Verdicts about files are shared by a link, where any user can make one.
FINDINGS = {"rows": ("*.json",), "allocations": ("*.json",), "vetted": ("*.json",)}
# How long passes, draft steps and products take. What answers teach is a test's own.
MEASURED = (
    "pass-*.json",
    "draft-*.json",
    "products-*.json",
    "threads-*.json",
    "disk-*.json",
)


@pytest.fixture
def own_profiles() -> None:
    """For tests of what is measured: they share it with no other test."""


@pytest.fixture(autouse=True)
def known_models(own_environment: None, shared_cache: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Share findings about models between each test's own cache and earlier tests."""
    cache = cache_folder()
    kinds = dict(FINDINGS)
    if "own_profiles" not in request.fixturenames:
        kinds["profiles"] = MEASURED
        _calm(shared_cache / "profiles")
    _link_new(shared_cache, cache, kinds)
    yield
    _link_new(cache, shared_cache, kinds)


def _link_new(source: Path, destination: Path, kinds: Mapping[str, tuple[str, ...]]) -> None:
    """Link files of findings: they are replaced and never written to, so links do."""
    for name, patterns in kinds.items():
        folder = destination / name
        folder.mkdir(parents=True, exist_ok=True)
        for path in _found(source / name, patterns):
            with contextlib.suppress(FileExistsError):
                os.link(path, folder / path.name)


def _found(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    return itertools.chain.from_iterable(map(folder.glob, patterns))


def _calm(profiles: Path) -> None:
    """Let measurements count as if nothing had run beside them: the tests of another worker did."""
    for path in _found(profiles, MEASURED):
        if path.name not in _calmed:
            record = json.loads(path.read_bytes())
            for name, calm in (("busy", 0.0), ("spread", [])):
                if name in record["figures"]:
                    record["figures"][name] = calm
            save_json(path, record)
            _calmed.add(path.name)


_calmed: set[str] = set()  # names of files
