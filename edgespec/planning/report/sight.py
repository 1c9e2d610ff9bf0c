"""The sight of a model: its projector, and what that takes."""

from __future__ import annotations

from typing import Any

from edgespec.errors import EdgeSpecError
from edgespec.images.facts import TYPICAL, ProjectorFacts
from edgespec.images.projector import find_projector
from edgespec.models.hub.inspection import InspectedModel
from edgespec.units import readable


def projector_facts(model: InspectedModel) -> ProjectorFacts | None:
    """The projector of a model that is here or on the Hub; None if it does not see."""
    if model.path is None:
        return None if model.projector is None else ProjectorFacts.of(model.projector)
    try:
        return ProjectorFacts.of(find_projector(model.path, None))
    except EdgeSpecError:  # there is none, or no telling which
        return None


def in_words(projector: dict[str, Any]) -> str:
    """A projector, as `ProjectorFacts.to_json` gives it, in one line."""
    width, height = TYPICAL
    tokens = (
        "" if projector["tokens"] is None else f", {projector['tokens']} tokens for {width} x {height} pixels"
    )
    memory = f"reading one takes at least {readable(projector['reading_bytes'])}, and none afterwards"
    return f"{projector['name']} ({readable(projector['bytes'])}){tokens}; {memory}"
