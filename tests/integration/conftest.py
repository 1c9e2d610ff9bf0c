"""Share what integration tests find out about models, since finding it out takes seconds."""

from __future__ import annotations

import shutil
import tempfile
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
    _copy_new(shared_cache, cache)
    yield
    _copy_new(cache, shared_cache)


def _copy_new(source: Path, destination: Path) -> None:
    for name in FINDINGS:
        folder = destination / name
        folder.mkdir(parents=True, exist_ok=True)
        for path in (source / name).glob("*.json"):
            if not (folder / path.name).exists():
                with tempfile.TemporaryDirectory(dir=folder) as partial:  # another worker may be reading
                    Path(shutil.copy(path, partial)).replace(folder / path.name)
