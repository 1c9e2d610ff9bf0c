"""The folders that the options name for packed layers, and the disks that they are on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgespec.base.progress import Progress, no_progress
from edgespec.config import Config
from edgespec.measure.folder_rates import folder_rates, known_rates
from edgespec.offload.packing.division import PackFolders, existing, named_folders
from edgespec.profiles.store import ProfileStore


@dataclass(frozen=True)
class Disks:
    """The disks that packed layers are spread over."""

    folders: tuple[Path, ...] = ()  # one on each; none if the layers are in the cache folder

    @property
    def n(self) -> int:
        return len(self.folders) or 1

    def rates(self, store: ProfileStore, on_progress: Progress) -> list[float]:
        """Bytes per second that each reads; measured now if it is not known."""
        return folder_rates([*map(existing, self.folders)], store, on_progress)

    def read_rate(self, store: ProfileStore) -> float:
        """Bytes per second that all read together; 0 if that is not known, or if there are none."""
        return sum(known_rates([*map(existing, self.folders)], store) or [])


ONE_DISK = Disks()
"""That of the cache folder."""


def pack_folders(config: Config, store: ProfileStore, on_progress: Progress = no_progress) -> PackFolders:
    """The folders, with what recalls or measures the speed of their disks.

    Raises:
        UsageError: one is in the home of a user who has none.
    """
    rates_of = partial(folder_rates, store=store, on_progress=on_progress)
    return named_folders(config.memory.pack_dir, rates_of)


def disks_of(config: Config, store: ProfileStore) -> Disks:
    """The disks of the folders that a load would use; makes none of them."""
    always = config.memory.pack == "always"
    return Disks(pack_folders(config, store).usable([], in_memory=always, make=False))
