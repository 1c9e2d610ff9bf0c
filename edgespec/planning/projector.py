"""The projector that memory is reserved for."""

from __future__ import annotations

from pathlib import Path

from edgespec.config import ModelConfig
from edgespec.errors import UsageError
from edgespec.images.facts import ProjectorFacts
from edgespec.images.projector import find_projector, named_projector


def reserved_projector(model: Path, config: ModelConfig) -> ProjectorFacts | None:
    """The projector by which a model will read images for sure; None if nothing says that it will.

    One that merely lies beside the model takes no memory from texts.

    Raises:
        ModelFileError: the file that was named is no projector of images, or none of this model.
    """
    if not config.reads_images:
        return None
    try:
        return ProjectorFacts.of(find_projector(model, named_projector(config.mmproj)))
    except UsageError:  # reading the first image says what is missing
        return None
