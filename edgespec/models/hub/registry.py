"""Known pairs of target and drafter: those that people registered, and drafters made here.

They are kept in one JSON file in the user's data folder. A target is identified by the fingerprint of its
header, so a model that was moved or renamed keeps its drafters.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.files.small_json import MALFORMED
from edgespec.files.state import size_of
from edgespec.files.user_folders import data_folder, expanded
from edgespec.files.writing import atomic_write, writing_to

REGISTERED, MADE = "registered", "made"


@dataclass(frozen=True)
class DrafterPair:
    """A drafter for a target.

    Attributes:
        target: fingerprint of the target's header; `target_name` is for people.
        kind: "registered" by a person, or "made" here.
        top1, top4: share of the target's tokens that are the drafter's first choice, or among its first
            four, over `tokens` tokens that the target wrote; None if not measured.
        recipe: how it was made, such as "q4_0".
        preferred: whether it was measured to be better than all others that were known of the target.
    """

    target: str
    target_name: str
    drafter: str
    kind: str
    top1: float | None = None
    top4: float | None = None
    tokens: int = 0
    recipe: str = ""
    preferred: bool = False

    @property
    def path(self) -> Path:
        """The drafter's file."""
        return Path(self.drafter)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"n_bytes": size_of(self.path)}


def drafters_folder() -> Path:
    return data_folder() / "drafters"


class PairRegistry:
    """The pairs, in a file that is replaced as a whole with every change."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or data_folder() / "pairs.json"

    def pairs(self, target: str | None = None) -> list[DrafterPair]:
        """All pairs, or those of a target, whose drafters exist: the preferred one, then by agreement."""
        found = [
            pair
            for pair in self._known()
            if (target is None or pair.target == target) and pair.path.is_file()
        ]
        return sorted(found, key=lambda pair: (not pair.preferred, -(pair.top1 or 0.0)))

    def add(self, pair: DrafterPair) -> None:
        """Remember a pair, replacing what was known about it.

        A preferred one is the only one of its target. It stays so when it is measured again, and gives way to
        another that a person registers.
        """

        def changed(pairs: list[DrafterPair]) -> list[DrafterPair]:
            known = [p for p in pairs if p.target == pair.target and same_file(p.path, pair.path)]
            kept = [p for p in pairs if p not in known]
            if pair.preferred or pair.kind == REGISTERED:
                kept = [replace(p, preferred=False) if p.target == pair.target else p for p in kept]
            return [*kept, replace(pair, preferred=pair.preferred or any(p.preferred for p in known))]

        self._change(changed)

    def forget(self, *, target: str | None = None, drafter: Path | None = None) -> None:
        """Forget the pairs of a target, or those with a drafter, by whatever path."""
        self.forget_all(self.concerning(target, [drafter] if drafter else []))

    def forget_all(self, gone: Collection[DrafterPair]) -> None:
        if gone:
            self._change(lambda pairs: [pair for pair in pairs if pair not in gone])

    def concerning(self, target: str | None, drafters: Collection[Path]) -> list[DrafterPair]:
        """The pairs of a target, and those with one of these drafters, even if the file is gone."""
        return [
            pair
            for pair in self._known()
            if pair.target == target or any(same_file(pair.path, path) for path in drafters)
        ]

    def missing(self, target: str) -> list[DrafterPair]:
        """The pairs of a target whose drafter no longer exists."""
        return [pair for pair in self._known() if pair.target == target and not pair.path.is_file()]

    def _known(self) -> list[DrafterPair]:
        """The pairs in the file; none if it cannot be read."""
        try:
            return self._read()
        except OSError:
            return []

    def _read(self) -> list[DrafterPair]:
        """The pairs in the file.

        Raises:
            OSError: it cannot be read, so that it must not be replaced.
        """
        try:
            rows = json.loads(self._path.read_text(encoding="utf-8"))["pairs"]
            return [DrafterPair(**row) for row in rows]
        except FileNotFoundError:
            return []
        except MALFORMED:
            # Registered pairs must not be lost: a file that cannot be read is set aside, not overwritten.
            with contextlib.suppress(OSError):
                self._path.replace(_unused(self._path.with_suffix(".damaged")))
            return []

    def _change(self, change: Callable[[list[DrafterPair]], list[DrafterPair]]) -> None:
        with writing_to(self._path, "Check its permissions."):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self._path.with_suffix(".lock")):
                rows = [asdict(pair) for pair in change(self._read())]
                with atomic_write(self._path) as file:
                    file.write(json.dumps({"pairs": rows}, indent=1).encode())


def _unused(path: Path) -> Path:
    """A path, or the first one with a number behind it at which there is no file."""
    numbered = (path.with_name(f"{path.name}{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not each.exists())


def same_file(one: Path, other: Path) -> bool:
    """Check that two paths lead to one file: directly, through links, or from the current folder."""
    try:
        return one.samefile(other)
    except OSError:  # one does not exist
        return expanded(one).absolute() == expanded(other).absolute()


def _locked(path: Path) -> contextlib.AbstractContextManager[object]:
    from filelock import FileLock

    return FileLock(path, timeout=10)
