"""The files of a target, its drafter and its projector, checked before llama.cpp sees them."""

from __future__ import annotations

from pathlib import Path

from edgespec.base.option import named
from edgespec.config import ModelConfig
from edgespec.errors import UsageError
from edgespec.heads.families import drafter_files, head_of
from edgespec.heads.mtp import MTPHead, require_mtp
from edgespec.images.facts import ProjectorFacts
from edgespec.images.projector import find_projector, named_projector
from edgespec.llama.runtime.vetting import require_loadable
from edgespec.models.gguf.embedding import require_generation
from edgespec.models.gguf.head_family import head_family
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles, MTPLayers


def read_model(path: Path) -> ModelFiles:
    """The files of a model.

    Raises:
        ModelFileError: one is missing or damaged, or llama.cpp would not survive loading it.
        UsageError: it is a draft head.
    """
    header = read_header(path)
    files = ModelFiles.of(header)
    if head_family(header) is not None:
        raise UsageError(
            f"{path.name} is a draft head, which only works with the model that it was made for.",
            f"Name that model, and this file with {named('draft', str(path))}.",
        )
    require_generation(files.headers[0])
    require_loadable(files.headers)
    return files


def read_drafter(path: Path, target: ModelFiles) -> ModelFiles:
    """The files of a drafter: a model, a head of the target, an assistant, or an MTP layer.

    Raises:
        ModelFileError: one is missing or damaged, or llama.cpp would not survive loading it.
        PairingError: it is a head of another target.
        BackendError: it is a head, and this llama.cpp build cannot draft with heads of its kind.
        UsageError: llama.cpp does not survive drafting with the MTP layer in the file.
    """
    files = drafter_files(read_header(path))
    if (head := head_of(files)) is None:
        return read_model(path)
    from edgespec.heads.head_trial import require_draftable

    head.require_fit(target)
    require_draftable(head, files, target)
    return files


def read_mtp(target: ModelFiles) -> MTPLayers:
    """The target's own layers for multi-token prediction.

    Nothing is tried with a model that is planned for and not here.

    Raises:
        UsageError: it has none, or llama.cpp cannot compute them.
        BackendError: this llama.cpp build cannot draft with such layers.
    """
    layers = require_mtp(target)
    if target.paths[0].exists():
        from edgespec.heads.head_trial import require_draftable

        require_draftable(MTPHead(layers), layers, target)
    return layers


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
