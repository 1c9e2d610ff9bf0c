"""The file of a model's projector: found beside the model or named, and checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgespec.base.option import named
from edgespec.errors import EdgeSpecError, ModelFileError, UsageError
from edgespec.files.state import FileState
from edgespec.files.user_folders import in_home
from edgespec.generation.config import shortened
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


# Architectures of models, by the type of the projector that llama.cpp's converter writes for them alone.
_MODELS: dict[str, tuple[str, ...]] = {
    "cogvlm": ("cogvlm",),
    "gemma3": ("gemma3",),
    "gemma3nv": ("gemma3n",),
    "gemma4uv": ("gemma4",),
    "gemma4v": ("gemma4",),
    "hunyuanvl": ("hunyuan_vl",),
    "llama4": ("llama4",),
    "minicpmv4_6": ("qwen35",),
    "paddleocr": ("paddleocr",),
    "qwen2.5o": ("qwen2vl",),
    "qwen2.5vl_merger": ("qwen2vl",),
    "qwen2vl_merger": ("qwen2vl",),
    "qwen3vl_merger": ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen4exp"),
}
_BASE_NAME = "general.basename"
_MADE_OF = re.compile(r"general\.base_model\.\d+\.name")
_WITH_THEIR_OWN = {architecture for found in _MODELS.values() for architecture in found}
_OF_ANY_MODEL = ("adapter", "internvl", "ldp", "ldpv2", "mlp", "mlp_norm", "pixtral", "resampler")


def go_together(projector: str, architecture: str) -> bool:
    """False if a projector of that type cannot be that of a model of that architecture."""
    if projector in _MODELS:
        return architecture in _MODELS[projector]
    return architecture not in _WITH_THEIR_OWN or projector in _OF_ANY_MODEL


def another_model(projector: Mapping[str, Any], kind: str, target: Mapping[str, Any]) -> str:
    """The model that a projector states as its own, if that is another than the target; else empty.

    llama.cpp's converter writes the same base name into both files. Fine-tuned models often have another one
    than their projector, but name the model that they were made of. Types that belong to certain
    architectures decide without names.

    Args:
        projector, target: metadata of the files.
        kind: type of the projector.
    """
    stated = projector.get(_BASE_NAME)
    if kind in _MODELS or not isinstance(stated, str) or not _plain(stated):
        return ""
    if not isinstance(target.get(_BASE_NAME), str):
        return ""
    theirs = {_plain(name) for name in (stated, *_made_of(projector))}
    ours = {_plain(name) for name in (target[_BASE_NAME], target.get("general.name"), *_made_of(target))}
    related = any(one in other or other in one for one in theirs - {""} for other in ours - {""})
    return "" if related else stated


def _made_of(metadata: Mapping[str, Any]) -> Iterator[object]:
    """Names of the models that a file's model was made of."""
    return (value for key, value in metadata.items() if _MADE_OF.fullmatch(key))


def _plain(name: object) -> str:
    """A name without what people write in different ways."""
    return re.sub(r"[^a-z0-9]", "", name.lower()) if isinstance(name, str) else ""
