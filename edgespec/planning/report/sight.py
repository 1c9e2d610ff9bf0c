"""The sight of a model: its projector, and what that takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.base.option import named
from edgespec.base.units import readable
from edgespec.errors import EdgeSpecError
from edgespec.images.facts import TYPICAL, ProjectorFacts
from edgespec.images.projector import find_projector
from edgespec.models.gguf.header import read_header
from edgespec.models.hub.inspection import InspectedModel


def projector_facts(model: InspectedModel, given: Path | None = None) -> ProjectorFacts | None:
    """The projector of a model that is here or on the Hub; None if it does not see.

    Args:
        given: the file of a projector that was named.

    Raises:
        ModelFileError: that file is no projector of images, or none of this model.
    """
    if given is not None:
        return ProjectorFacts.of(find_projector(model.path, given) if model.path else read_header(given))
    if model.path is None:
        return None if model.projector is None else ProjectorFacts.of(model.projector)
    try:
        return ProjectorFacts.of(find_projector(model.path, None))
    except EdgeSpecError:  # there is none, or no telling which
        return None


def describe_projector(
    projector: dict[str, Any], usual_context: int | None = None, *, reserved: bool = False
) -> str:
    """A projector, as `ProjectorFacts.to_json` gives it, in one line.

    Args:
        usual_context: tokens of a context that may be too small for a picture.
        reserved: the memory limit includes what reading one takes.
    """
    width, height = TYPICAL
    tokens = (
        "" if projector["tokens"] is None else f", {projector['tokens']} tokens for {width} x {height} pixels"
    )
    if usual_context and (projector["tokens"] or 0) >= usual_context:
        tokens += f", more than the usual context of {usual_context} holds ({named('context')})"
    where = "reserved within" if reserved else "beside"
    memory = f"reading one takes {readable(projector['reading_bytes'])}, {where} the memory limit"
    return f"{projector['name']} ({readable(projector['bytes'])}){tokens}; {memory}"


def image_notes(projector: ProjectorFacts, context: int, left: int | None) -> Iterator[str]:
    """Notes on a context or memory that is too small for images.

    Args:
        context: tokens that the context holds.
        left: bytes of memory beside everything that a load takes; None if the load reserves what images take.
    """
    if projector.tokens is not None and projector.tokens >= context:
        width, height = TYPICAL
        yield (
            f"A picture of {width} x {height} pixels takes {projector.tokens} tokens, and the context holds "
            f"{context}: raise {named('context')}."
        )
    if left is not None and projector.reading_bytes > left:
        yield (
            f"Reading an image takes {readable(projector.reading_bytes)} beside everything else, and "
            f"{readable(max(left, 0))} are left: lower {named('memory')}, or images may fail."
        )
