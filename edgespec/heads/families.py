"""Heads of all families, by the headers of their files."""

from __future__ import annotations

from edgespec.heads.assistant.assistant_head import read_assistant_head
from edgespec.heads.block.block_head import block_kind, read_block_head
from edgespec.heads.eagle.eagle_head import read_eagle_head
from edgespec.heads.mtp.mtp_file import MTPFile, read_mtp_file
from edgespec.heads.mtp.mtp_head import MTPHead
from edgespec.heads.shared.head import Head
from edgespec.models.gguf.head_family import HeadFamily, head_family
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import GGUFHeader


def drafter_files(header: GGUFHeader) -> ModelFiles:
    """All files of a drafter, whatever kind it is, that `header` is the first or only file of.

    Raises:
        ModelFileError: a part is missing or damaged; or as `read_mtp_file`.
    """
    if head_family(header) is not HeadFamily.MTP:
        return ModelFiles.of(header)
    return read_mtp_file(
        [header if path == header.path else read_header(path) for path in split_paths(header)]
    )


def head_of(drafter: ModelFiles) -> Head | None:
    """The head that drafts; None if a model does.

    Raises:
        ModelFileError: its header lacks something, or contradicts itself.
        PairingError: it is a head that is not supported.
    """
    if isinstance(drafter, MTPLayers | MTPFile):
        return MTPHead(drafter)
    header = drafter.headers[0]
    match head_family(header):
        case HeadFamily.EAGLE:
            return read_eagle_head(header)
        case HeadFamily.BLOCK:
            return read_block_head(header)
        case HeadFamily.ASSISTANT:
            return read_assistant_head(header)
    return None


def head_kind(header: GGUFHeader) -> str:
    """The kind of a head, as people call it; empty if the file is a model."""
    family = head_family(header)
    if family is None:
        return ""
    return block_kind(header).value if family is HeadFamily.BLOCK else family.value


def head_recipe(header: GGUFHeader) -> str:
    """The kind of a drafter that was trained for its target, for people; empty for models."""
    family, kind = head_family(header), head_kind(header)
    return f"head ({kind})" if family in (HeadFamily.EAGLE, HeadFamily.BLOCK) else kind
