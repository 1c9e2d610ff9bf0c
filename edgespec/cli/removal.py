"""Removes a model: its files in the Hub's cache, and what EdgeSpec made for it.

A file outside the cache belongs to whoever put it there, and a packaged model to its package; for those, only
what EdgeSpec made is removed.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError, OutputError
from edgespec.files.small_json import files_about
from edgespec.files.user_folders import cache_folder
from edgespec.files.writing import is_locked
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.not_gguf import require_regular_file
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub.external import external_model_at
from edgespec.models.hub.projectors import is_projector, projectors_around
from edgespec.models.hub.registry import DrafterPair, PairRegistry, drafters_folder
from edgespec.models.hub.repository import Hub
from edgespec.offload.packing.index import packs_folder, parts_of


@dataclass(frozen=True)
class Removable:
    """A file that would be removed, and what it is: "model", "projector", "packed file", "row rule",
    "profile", "drafter" or "partial"."""

    path: Path
    kind: str
    n_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "kind": self.kind, "bytes": self.n_bytes}


@dataclass
class Removal:
    """The files that removing a model would free."""

    files: list[Removable] = field(default_factory=list)
    repository: Path | None = None  # the folder in the Hub's cache that the model is in
    kept: list[str] = field(default_factory=list)  # sentences about what stays, and why
    # those of which the model is the target or the drafter; they are forgotten
    pairs: list[DrafterPair] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """Bytes of disk."""
        return sum(file.n_bytes for file in self.files)

    def keep(self, why: str) -> None:
        """Add a sentence about what stays, once."""
        if why not in self.kept:
            self.kept.append(why)

    def carry_out(self) -> int:
        """Remove the files and forget the pairs; returns the bytes that were freed.

        Raises:
            OutputError: a file cannot be removed; says how much was freed before.
        """
        freed = 0
        for file in self.files:
            try:
                file.path.unlink(missing_ok=True)
                freed += file.n_bytes
            except OSError as error:
                raise OutputError(
                    f"{file.path} cannot be removed: {error.strerror}. {freed:,} bytes were freed before.",
                    "Check its permissions.",
                ) from error
        if self.repository is not None:
            _remove_empty(self.repository)
        PairRegistry().forget_all(self.pairs)
        return freed


def plan_removal(path: Path) -> Removal:
    """The files that removing a model would free, given its first or only file."""
    path = path.absolute()
    if path.is_dir():
        require_regular_file(path)
    if not path.is_file():
        pairs = PairRegistry().concerning(None, [path])
        if pairs:  # the file is gone, but its pairs are still remembered
            return Removal(kept=[f"{path} no longer exists."], pairs=pairs)
        raise ModelFileError(f"{path} does not exist.", "See 'edgespec models list'.")
    removal = Removal()
    if path.parent == packs_folder() and path.suffix == ".pack":
        for file in path.parent.glob(f"{glob.escape(path.name)}*"):
            _add_pack(removal, file)
        return removal
    header = _header(path)
    parts = [path]
    if header is not None:
        with contextlib.suppress(ModelFileError):
            parts = list(split_paths(header))
    there = external_model_at(path)
    if there is not None:
        remedy = f" To remove it: ollama rm {there.name}" if there.source == "ollama" else ""
        removal.kept.append(f"{path} is in {there.place} and stays.{remedy}")
    elif (repository := _repository(path)) is not None:
        removal.repository = repository
        for part in parts:
            _add_cached(removal, repository, part)
        for projector in projectors_around(path):
            if not _serves_another(projector, parts):
                _add_cached(removal, repository, projector, "projector")
    elif drafters_folder() in path.parents:
        removal.files.append(Removable(path, "drafter", path.stat().st_size))
    elif "site-packages" in path.parts or "dist-packages" in path.parts:
        removal.kept.append(f"{path.name} belongs to a Python package; pip uninstall removes it.")
    else:
        removal.kept.append(f"{path} is your own file and stays.")
    if header is not None:
        _add_made(removal, header)
    gone = [path, *(file.path for file in removal.files if file.kind in ("model", "drafter"))]
    removal.pairs = PairRegistry().concerning(header.fingerprint if header else None, gone)
    return removal


def _serves_another(projector: Path, parts: Sequence[Path]) -> bool:
    """True if there is another model around which a projector lies."""
    others = (path for path in projector.parent.rglob("*.gguf") if path.is_file() and path not in parts)
    return any(not is_projector(path.name) for path in others)


def _repository(path: Path) -> Path | None:
    """The folder of the repository in the Hub's cache that a file is in a snapshot of."""
    cache = Hub.without_token().cache.resolve()
    inside = (folder.parent for folder in path.parents if folder.name == "snapshots")
    own = (folder for folder in inside if folder.name.startswith("models--"))
    return next((folder for folder in own if folder.parent.resolve() == cache), None)


def _add_cached(removal: Removal, repository: Path, path: Path, kind: str = "model") -> None:
    """The links of all revisions to the same blob, and the blob."""
    blob = path.resolve()
    linked = [link for link in (repository / "snapshots").rglob("*.gguf") if link.resolve() == blob]
    for link in linked:
        alone = link.is_symlink()
        removal.files.append(Removable(link, kind, 0 if alone else link.stat().st_size))
    if blob.is_file() and blob not in linked:
        # Only blobs in this repository: a blob that the cache shares is used by others too.
        if repository in blob.parents:
            removal.files.append(Removable(blob, kind, blob.stat().st_size))
        else:
            removal.kept.append(f"{blob} is shared between repositories and stays.")
    for partial in (repository / "blobs").glob("*.edgespec.incomplete"):
        # It is named by a checksum, and may be of another file that is being downloaded.
        removal.keep(f"{partial}, an unfinished download from this repository, stays.")


def _add_made(removal: Removal, header: GGUFHeader) -> None:
    cache = cache_folder()
    for pack in packs_folder().glob(f"*-{header.fingerprint[:16]}*.pack*"):
        if is_locked(pack):
            removal.keep(f"{pack} is being written by another program and stays.")
        else:
            _add_pack(removal, pack)
    for rule in files_about(cache / "rows", header.fingerprint):
        removal.files.append(Removable(rule, "row rule", rule.stat().st_size))
    for profile in _profiles(cache / "profiles", header.fingerprint):
        removal.files.append(Removable(profile, "profile", profile.stat().st_size))
    # A drafter that also serves another target stays.
    others = {p.path for p in PairRegistry().pairs() if p.target != header.fingerprint}
    for pair in PairRegistry().pairs(header.fingerprint):
        if pair.kind == "made" and pair.path not in others and drafters_folder() in pair.path.parents:
            removal.files.append(Removable(pair.path, "drafter", pair.path.stat().st_size))
    folder = drafters_folder() / "work" / header.fingerprint[:16]
    if is_locked(folder / "lock"):
        removal.keep(f"{folder} is in use by 'edgespec draft' and stays.")
        return
    for path in folder.glob("*"):
        removal.files.append(Removable(path, "partial", path.stat().st_size))


def _add_pack(removal: Removal, pack: Path) -> None:
    """A packed file with its parts and its lock, or one of its companions."""
    files = [pack]
    if pack.suffix == ".pack":
        for part in reversed(parts_of(pack)):
            if part.is_file():
                files.insert(0, part)  # before the file that tells where they are
            else:
                removal.kept.append(f"{part}, a part of {pack.name}, is not there: its disk may be missing.")
        if (lock := pack.with_suffix(".lock")).exists():
            files.append(lock)
    removal.files += [Removable(file, "packed file", file.stat().st_size) for file in files]


def _profiles(folder: Path, fingerprint: str) -> list[Path]:
    """Profiles of the model: small files that contain its fingerprint."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            if fingerprint in path.read_text(encoding="utf-8"):
                found.append(path)
    return found


def _header(path: Path) -> GGUFHeader | None:
    try:
        return read_header(path)
    except ModelFileError:
        return None  # damaged files can be removed too


def _remove_empty(repository: Path) -> None:
    """Remove the empty folders of a repository, and all of it if it has no files any more."""
    kept = (repository / name for name in ("blobs", "snapshots"))  # without links, blobs are in snapshots
    if not any(path.is_file() for folder in kept for path in folder.rglob("*")):
        import shutil

        # References, and the list of missing files, go with the last file.
        shutil.rmtree(repository, ignore_errors=True)
        return
    folders = [path for path in (repository / "snapshots").rglob("*") if path.is_dir()]
    for folder in sorted(folders, reverse=True):  # the inner ones first
        with contextlib.suppress(OSError):
            folder.rmdir()
