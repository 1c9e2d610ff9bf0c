"""The Hub's files on this machine, in the layout of huggingface-hub's cache, which other programs share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from edgespec.models.hub.names import ModelVariant, group_files
from edgespec.models.hub.repository import Hub, Repository


def cached_models(hub: Hub, repo: str) -> Iterator[tuple[ModelVariant, Path]]:
    """The whole models of a repository that are in the cache, and the path of each one's first file.

    The latest revision comes first.
    """
    snapshots = hub.folder(repo) / "snapshots"
    try:
        newest = (hub.folder(repo) / "refs" / "main").read_text("ascii").strip()
    except (OSError, ValueError):
        newest = ""
    seen: set[tuple[str, ...]] = set()
    for revision in sorted(_folders(snapshots), key=lambda path: (path.name != newest, -_modified(path))):
        # is_file(): a link whose blob was removed is not a file.
        found = [path for path in revision.rglob("*") if path.is_file()]
        sizes = [(path.relative_to(revision).as_posix(), path.stat().st_size) for path in found]
        for model in group_files(sizes):
            if model.paths not in seen:
                seen.add(model.paths)
                yield model, revision / model.paths[0]


def cached_repositories(hub: Hub) -> list[str]:
    """The repositories that have something in the cache."""
    return sorted(
        folder.name.removeprefix("models--").replace("--", "/", 1)
        for folder in _folders(hub.cache)
        if folder.name.startswith("models--")
    )


def snapshot_folder(hub: Hub, repository: Repository) -> Path:
    """The folder of a repository's files at its commit; each is a link to a blob."""
    return hub.folder(repository.repo) / "snapshots" / repository.commit


def blobs_folder(hub: Hub, repository: Repository) -> Path:
    """The folder of the contents, which are named by their checksums."""
    return hub.folder(repository.repo) / "blobs"


def link_blob(blob: Path, place: Path) -> None:
    """Link a file of a snapshot to its blob; where links cannot be made, move the blob there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)  # a link whose blob was removed
    try:
        place.symlink_to(os.path.relpath(blob, place.parent))
    except OSError:
        shutil.move(blob, place)


def make_newest(hub: Hub, repository: Repository) -> None:
    """Record that this is the newest known commit, as huggingface-hub does."""
    reference = hub.folder(repository.repo) / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(repository.commit)


def _folders(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
