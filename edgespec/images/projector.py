"""The file of a model's projector: found beside the model or named, and its header checked."""

from __future__ import annotations

from pathlib import Path

from edgespec.base.option import named
from edgespec.errors import EdgeSpecError, ModelFileError, UsageError
from edgespec.files.state import FileState
from edgespec.files.user_folders import in_home
from edgespec.generation.config import shortened
from edgespec.images.families import another_model, go_together
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.not_gguf import unreadable
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub.projectors import choose_projector, projectors_around
from edgespec.printable import one_line

_USUAL = "mmproj-*.gguf"
_ARCHITECTURE = "clip"
_SEES = "clip.has_vision_encoder"
_WIDTH = "clip.vision.projection_dim"


def find_projector(model: Path, given: Path | None) -> GGUFHeader:
    """The header of the projector that is named, or of the one beside the model.

    Raises:
        UsageError: there is none that can be used, or there are several.
        ModelFileError: the file that is named is no projector of images, or none of this model.
    """
    target = read_header(model)
    if given is not None:
        header = read_header(given)
        if fault := _fault(header, target):
            raise ModelFileError(f"{given} {fault}.", "Name the projector of the model.")
        return header
    found, refused = _beside(target)
    if not found:
        reason = (
            refused[0] if refused else f"{model.name} has no projector beside it, so it cannot see images."
        )
        raise UsageError(reason, f"Put its {_USUAL} beside it, or name it with {named('mmproj', 'FILE')}.")
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


def identity_of(projector: GGUFHeader) -> str:
    """The header and the state of a projector's file: any write to it gives another identity.

    Raises:
        ModelFileError: the file is gone.
    """
    try:
        return f"{projector.fingerprint} {FileState.of(projector.path)}"
    except OSError as error:
        raise unreadable(projector.path, error) from error


def named_projector(mmproj: str | None) -> Path | None:
    """The file of a projector that an option names; None if it names none."""
    return None if mmproj is None else in_home(mmproj)


def doubt_about(model: Path, given: Path | None) -> str:
    """A sentence if the projector that `find_projector` finds names another model as its own; else empty."""
    try:
        projector = find_projector(model, given)
    except EdgeSpecError:
        return ""
    stated = another_model(projector.metadata, kind_of(projector), read_header(model).metadata)
    if not stated:
        return ""
    name = shortened(one_line(stated))
    return (
        f"{projector.path.name} names {name} as its model, and {model.name} is another: "
        "answers about images may make no sense."
    )


def kind_of(header: GGUFHeader) -> str:
    """The type of a projector of images, such as "gemma3"; empty if its file does not state it."""
    kind = header.metadata.get("clip.vision.projector_type") or header.metadata.get("clip.projector_type")
    return kind if isinstance(kind, str) else ""


def _beside(target: GGUFHeader) -> tuple[list[GGUFHeader], list[str]]:
    """The projectors around a model, those of its width if any state it; and why others cannot be used."""
    usable, refused = [], []
    for path in projectors_around(target.path):
        try:
            header = read_header(path)
        except ModelFileError as error:  # a partial download, for example
            refused.append(error.what)
            continue
        if fault := _fault(header, target):
            refused.append(f"{path.name} beside {target.path.name} {fault}.")
        else:
            usable.append(header)
    # Some files state the width of an inner layer, so it decides only between several.
    matching = [header for header in usable if header.metadata.get(_WIDTH) == target.embedding_length]
    return matching or usable, refused


def _fault(header: GGUFHeader, target: GGUFHeader) -> str:
    """The fault of a projector for a model, as the end of a sentence; empty if there is none."""
    if header.metadata.get("general.architecture") != _ARCHITECTURE:
        return "is not a projector"
    if not header.metadata.get(_SEES):
        return "is a projector that reads no images"
    kind = kind_of(header)
    if kind and not go_together(kind, target.architecture):
        return f"is a projector of the type {kind}, which no {target.architecture} model has"
    return ""
