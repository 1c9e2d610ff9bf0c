"""Projectors of models that see: which of the files beside a model is its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from edgespec.models.hub.names import label_of, normal

PATTERN = "mmproj*.gguf"
_NAME = re.compile(r"(?:^|[-_.])mmproj", re.IGNORECASE)
_WORD = re.compile(r"[a-z0-9]+")
# The preferred one first: F16 loses nothing that shows, and is computed faster than the larger ones.
_LABELS = ("F16", "Q8_0", "BF16", "F32")


def is_projector(path: str) -> bool:
    """True if a file is a projector, judging by its name."""
    name = PurePosixPath(path).name
    return name.lower().endswith(".gguf") and _NAME.search(name) is not None


def choose_projector(paths: Sequence[str], model: str) -> str | None:
    """The projector of a model among the files of its repository; None if there is none, or no telling which.

    Args:
        paths: of all files, with / between folders.
        model: that of the model; projectors lie beside it, or in a folder above.
    """
    above = PurePosixPath(model).parents
    found = [path for path in paths if is_projector(path) and PurePosixPath(path).parent in above]
    kinds: dict[str, list[str]] = {}
    for path in found:
        stem = PurePosixPath(path).stem.lower()
        kinds.setdefault(stem.removesuffix(label_of(path).lower()), []).append(path)
    words = set(_WORD.findall(PurePosixPath(model).stem.lower()))
    shared = {kind: len(words & set(_WORD.findall(kind))) for kind in kinds}
    best = [kind for kind in kinds if shared[kind] == max(shared.values())]
    if len(best) != 1:
        return None
    return min(kinds[best[0]], key=lambda path: (_rank(path), -len(PurePosixPath(path).parts), path))


def projectors_around(model: Path) -> list[Path]:
    """The files that may be a model's projectors: beside it, and in folders above within the Hub's cache."""
    folders = [model.parent]
    if "snapshots" in model.parts and any(part.startswith("models--") for part in model.parts):
        while folders[-1].parent.name != "snapshots":
            folders.append(folders[-1].parent)
    return [path for folder in folders for path in sorted(folder.glob(PATTERN))]


def projector_beside(model: Path) -> Path | None:
    """The projector of a model, judging by names; None if there is none, or no telling which."""
    found = {path.name: path for path in reversed(projectors_around(model))}  # the nearest of equal names
    chosen = choose_projector(list(found), model.name)
    return None if chosen is None else found[chosen]


def _rank(path: str) -> int:
    label = normal(label_of(path))
    return _LABELS.index(label) if label in _LABELS else len(_LABELS)
