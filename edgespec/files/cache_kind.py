"""Data in the user's cache folder, kept for later runs, and its deletion."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from edgespec.files.user_folders import cache_folder


class CacheKind(Enum):
    """Kinds of cached data, with the folder of each.

    Members:
        LEARNED: how often candidates of each kind were accepted, by pair of models.
        FILES: indexes of the files that drafts come from.
        PROMPTS: states of prompts that were read.
        TRIALS: whether llama.cpp survived loading a model file.
    """

    LEARNED = "acceptance"
    FILES = "files"
    PROMPTS = "prompts"
    TRIALS = "vetted"

    @property
    def folder(self) -> Path:
        """The path of the folder, which need not exist."""
        return cache_folder() / self.value

    def forget(self) -> int:
        """Delete all of it; returns how many files there were, those of interrupted writes not counted.

        Raises:
            OSError: a file cannot be deleted.
        """
        paths = [path for path in self.folder.glob("*") if path.is_file()]
        for path in paths:
            path.unlink(missing_ok=True)
        return sum(not path.name.startswith(".") and path.suffix != ".partial" for path in paths)
