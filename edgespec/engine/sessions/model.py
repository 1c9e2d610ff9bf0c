"""The model that a saved conversation uses, found on this machine."""

from __future__ import annotations

from pathlib import Path

from edgespec.engine.sessions.file import Conversation, SessionFile
from edgespec.errors import EdgeSpecError, SessionError
from edgespec.models.gguf.header import read_header
from edgespec.models.hub.inventory import local_models
from edgespec.models.hub.repository import Hub


def model_of(file: SessionFile) -> Path | None:
    """The file of the session's model: where it was, or else a local model with the same name and header.

    Returns:
        None for a new session.

    Raises:
        SessionError: the model is gone, or the session cannot be read.
    """
    saved = file.read()
    if saved is None:
        return None
    if _is_model(saved, Path(saved.model_path)):
        return Path(saved.model_path)
    for model in local_models(Hub.without_token()):
        if _is_model(saved, model.path):
            return model.path
    raise SessionError(
        f'Session "{file.path.stem}" uses {saved.model_name}, which is no longer on this machine.',
        "Restore the file, or choose another session name.",
    )


def _is_model(saved: Conversation, path: Path) -> bool:
    if path.name != saved.model_name or not path.is_file():
        return False
    try:
        return f"{path.name} {read_header(path).fingerprint}" in saved.identity["model"]
    except EdgeSpecError:
        return False
