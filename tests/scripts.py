"""The scripts of the repository as modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[1] / "scripts"


@contextmanager
def loaded_script(name: str) -> Iterator[ModuleType]:
    """A script, which finds the modules beside it as when it is run."""
    sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(f"edgespec_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPTS))


def part(name: str) -> ModuleType:
    """A module that a loaded script has beside it."""
    return sys.modules[name]
