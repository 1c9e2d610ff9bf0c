"""The division of a pack's pieces among folders on several disks, by how fast each disk reads.

Every piece goes where most is missing to the folder's share of what has come so far. So the shares are right
at any point of the pack, not only at its end: within a layer, all disks are read at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from edgespec.files.user_folders import in_home
from edgespec.machine.disks import TMPFS, disk_of
from edgespec.offload.layout import Store


class Divider:
    """Chooses a folder for one piece after the other.

    No folder gets more than its share and a piece.

    Attributes:
        n_bytes: that each folder has so far.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        total = sum(rates)
        self._shares = [rate / total for rate in rates]
        self.n_bytes = [0] * len(rates)

    def next(self, n_bytes: int) -> int:
        """The number of the folder that gets the next piece."""
        total = sum(self.n_bytes) + n_bytes
        missing = [share * total - has for share, has in zip(self._shares, self.n_bytes, strict=True)]
        chosen = missing.index(max(missing))
        self.n_bytes[chosen] += n_bytes
        return chosen


def divide(sizes: Iterable[int], rates: Sequence[float]) -> list[int]:
    """Bytes that each folder gets of pieces of these sizes."""
    divider = Divider(rates)
    for size in sizes:
        divider.next(size)
    return divider.n_bytes


def existing(folder: Path) -> Path:
    """A folder, or the one that it would be made in."""
    return folder if os.path.lexists(folder) else folder.parent


RatesOf = Callable[[Sequence[Path]], Sequence[float]]
"""Recalls or measures how many bytes per second the disk of each folder reads."""


def equal_rates(folders: Sequence[Path]) -> list[float]:
    """Give every folder the same share."""
    return [1.0] * len(folders)


@dataclass(frozen=True)
class PackFolders:
    """The folders that people named for a pack's parts."""

    folders: tuple[Path, ...] = ()  # absolute, as named; none keeps the pack in the cache folder
    rates_of: RatesOf = equal_rates  # by which they get their shares

    @property
    def in_memory(self) -> tuple[Path, ...]:
        """Those that lie in memory, where only "always" packs."""
        return tuple(folder for folder in self.folders if disk_of(folder).kind == TMPFS)

    def usable(self, notes: list[str], *, in_memory: bool = False, make: bool = True) -> tuple[Path, ...]:
        """The folders that exist or can be made, and can be written to: one for each disk.

        Args:
            notes: gets a sentence for every other folder.
            in_memory: whether a folder may lie in memory.
            make: whether to make those that do not exist.
        """
        found: dict[int, Path] = {}
        for folder in dict.fromkeys(self.folders):
            try:
                if make and not os.path.lexists(folder):
                    folder.mkdir(exist_ok=True)  # not its parents: a disk that is not mounted has none
                place = existing(folder)
                with TemporaryFile(dir=place):
                    device = place.stat().st_dev
            except OSError as error:
                notes.append(f"'{folder}' cannot hold packed layers: {error.strerror or error}.")
                continue
            if not in_memory and disk_of(folder).kind == TMPFS:
                notes.append(f"'{folder}' is in memory, so no layers are packed there.")
            elif device in found:
                notes.append(
                    f"'{folder}' is on the same disk as '{found[device]}', so no layers are packed there."
                )
            else:
                found[device] = folder
        return tuple(found.values())

    def keeps(self, store: Store, usable: Collection[Path]) -> bool:
        """True if packed layers are where they belong: in all usable folders, and only in named ones.

        A folder that was named and is no longer usable may still be readable.
        """
        places = {path.parent for path in store.paths} if store.spread else set()
        return set(usable) <= places <= set(self.folders) if self.folders else True


IN_CACHE = PackFolders()
"""No folder is named: packed layers are one file in the cache folder."""


def named_folders(names: Iterable[str], rates_of: RatesOf = equal_rates) -> PackFolders:
    """The folders that people named so."""
    return PackFolders(tuple(in_home(name).absolute() for name in names if name), rates_of)
