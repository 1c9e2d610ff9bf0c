"""Messages for paths that do not lead to a readable GGUF file."""

from __future__ import annotations

import difflib
import stat
from pathlib import Path

from edgespec.errors import ModelFileError


def require_regular_file(path: Path) -> None:
    """Refuse folders, pipes and devices; opening a pipe would block, and a device never ends."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _not_found(path) from error
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if stat.S_ISDIR(mode):
        models = _gguf_names(path)
        raise ModelFileError(
            f"{path} is a folder, not a model file.",
            f"In it: {', '.join(models[:3])}." if models else "Name a .gguf file.",
        )
    if not stat.S_ISREG(mode):
        raise ModelFileError(f"{path} is not a regular file.", "Name a .gguf file.")


def _not_found(path: Path) -> ModelFileError:
    near = difflib.get_close_matches(path.name, _gguf_names(path.parent), n=3, cutoff=0.0)
    return ModelFileError(
        f"{path} does not exist.",
        f"Did you mean {' or '.join(near)}?" if near else "Check the path.",
    )


def unreadable(path: Path, error: OSError | ValueError) -> ModelFileError:
    """The error for a path that the system refuses to read."""
    reason = getattr(error, "strerror", None) or str(error)
    return ModelFileError(f"{path} cannot be read: {reason}.", "Check the path and its permissions.")


def _gguf_names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() == ".gguf")
    except OSError:
        return []


def describe(head: bytes) -> str:
    """Describe a file that is not GGUF, for the message."""
    text = head.lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, so the real file was not downloaded"
    if text.startswith((b"<!doctype html", b"<html")):
        return "it is a web page, so the download went wrong"
    if head[8:9] == b"{":
        return "it looks like safetensors"
    if head.startswith(b"PK\x03\x04"):
        return "it is a zip archive, perhaps a PyTorch checkpoint"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg"):
        return "it is in the GGML format that came before GGUF"
    return f"it begins with {head[:4]!r}"
