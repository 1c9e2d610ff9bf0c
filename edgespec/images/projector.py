"""The file of a model's projector: found beside the model or named, and its header checked."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import ModelFileError, UsageError
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub.projectors import choose_projector, projectors_around
from edgespec.option import named

_USUAL = "mmproj-*.gguf"
_ARCHITECTURE = "clip"
_SEES = "clip.has_vision_encoder"
_WIDTH = "clip.vision.projection_dim"


def find_projector(model: Path, given: Path | None) -> GGUFHeader:
    """The header of the projector that is named, or of the one beside the model.

    Raises:
        UsageError: there is none, or there are several.
        ModelFileError: the file that is named is no projector of images.
    """
    if given is not None:
        header = read_header(given)
        if fault := _fault(header):
            raise ModelFileError(f"{given} {fault}.", "Name the projector of the model.")
        return header
    found = _beside(model)
    if not found:
        raise UsageError(
            f"{model.name} has no projector beside it, so it cannot see images.",
            f"Put its {_USUAL} into {model.parent}, or name it with {named('mmproj', 'FILE')}.",
        )
    if len(found) > 1:
        chosen = choose_projector([header.path.name for header in found], model.name)
        if chosen is not None:
            return next(header for header in found if header.path.name == chosen)
        names = ", ".join(header.path.name for header in found)
        raise UsageError(
            f"Several projectors beside {model.name} may be its own: {names}.",
            f"Name one: {named('mmproj', 'FILE')}",
        )
    return found[0]


def _beside(model: Path) -> list[GGUFHeader]:
    """The projectors around the model: those of its width, if any state it."""
    headers = []
    for path in projectors_around(model):
        try:
            headers.append(read_header(path))
        except ModelFileError:  # a partial download, for example
            continue
    usable = [header for header in headers if not _fault(header)]
    width = read_header(model).embedding_length
    # Some files state the width of an inner layer, so it decides only between several.
    return [header for header in usable if header.metadata.get(_WIDTH) == width] or usable


def _fault(header: GGUFHeader) -> str:
    """The fault of a projector, as the end of a sentence; empty if there is none."""
    if header.metadata.get("general.architecture") != _ARCHITECTURE:
        return "is not a projector"
    return "" if header.metadata.get(_SEES) else "is a projector that reads no images"
