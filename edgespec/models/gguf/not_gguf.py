"""Messages for paths that do not lead to a readable GGUF file."""

from __future__ import annotations

import codecs
import errno
import stat
from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import ModelFileError, similar, which_of


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
            f"GGUF files in it: {_first(models)}." if models else "Name a .gguf file.",
        )
    if not stat.S_ISREG(mode):
        raise ModelFileError(f"{path} is not a regular file.", "Name a .gguf file.")


def _not_found(path: Path) -> ModelFileError:
    there = _gguf_names(path.parent)
    near = similar(path.name, there, n=3)
    others = f"GGUF files there: {_first(there)}." if there else "Check the path."
    return ModelFileError(f"{path} does not exist.", which_of(near) if near else others)


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def unreadable(path: Path, error: OSError | ValueError) -> ModelFileError:
    """The error for a path that the system refuses to read."""
    reason = getattr(error, "strerror", None) or str(error)
    short = getattr(error, "errno", None) == errno.ENOMEM
    hint = "Allow more memory: ulimit -v." if short else "Check the path and its permissions."
    return ModelFileError(f"{path} cannot be read: {reason}.", hint)


def _gguf_names(folder: Path) -> list[str]:
    try:
        return sorted(
            entry.name for entry in folder.iterdir() if entry.suffix.lower() == ".gguf" and entry.is_file()
        )
    except OSError:
        return []


_CONVERT = "Convert it with llama.cpp's convert_hf_to_gguf.py, or name a GGUF file."


def not_gguf(path: Path, head: bytes) -> ModelFileError:
    """The error for a file that is not GGUF, by what it begins with."""
    looks, hint = _described(head)
    return ModelFileError(f"{path} is not a GGUF file: {looks}.", hint)


def _described(head: bytes) -> tuple[str, str]:
    """Describe a file that is not GGUF, and the remedy."""
    text = head.lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, without the model itself", "Fetch the model: git lfs pull"
    if text.startswith((b"<!doctype html", b"<html")):
        return "it is a web page, so the download went wrong", "Download the model again."
    if head[8:9] == b"{":
        return "it looks like safetensors", _CONVERT
    if head.startswith(b"PK\x03\x04"):
        return "it is a zip archive, perhaps a PyTorch checkpoint", _CONVERT
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg"):
        return "it is in the older GGML format", "Get a GGUF conversion of the model."
    looks = "it is a text file" if _is_text(head) else f"it begins with {head[:4]!r}"
    return looks, "Name a GGUF file."


def _is_text(head: bytes) -> bool:
    """True for printable UTF-8; its last character may be cut off."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(head)
    return "\ufffd" not in text and all(c.isprintable() or c.isspace() for c in text)
