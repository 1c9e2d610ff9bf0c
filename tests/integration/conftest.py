"""Share what integration tests find out about models, since finding it out takes seconds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from platformdirs import user_cache_path

# Row rules, and what contexts allocate: both depend on the model's header, the build and the processor only.
FINDINGS = ("rows", "allocations")


@pytest.fixture(autouse=True)
def known_models(own_environment: None, shared_cache: Path) -> Iterator[None]:
    """Share findings about models between each test's own cache and earlier tests."""
    cache = user_cache_path("edgespec")
    _link_new(shared_cache, cache)
    yield
    _link_new(cache, shared_cache)


def _link_new(source: Path, destination: Path) -> None:
    """Link files of findings: they are replaced and never written to, so links do."""
    for name in FINDINGS:
        folder = destination / name
        folder.mkdir(parents=True, exist_ok=True)
        for path in (source / name).glob("*.json"):
            with contextlib.suppress(FileExistsError):
                os.link(path, folder / path.name)
