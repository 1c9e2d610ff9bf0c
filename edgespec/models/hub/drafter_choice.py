"""The local drafters for a target, best first: what `--draft auto` picks from.

They are measured to be better than all others, registered by a person, smaller models of the same family from
the catalog, or made from the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import EdgeSpecError
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub import catalog
from edgespec.models.hub.registry import MADE, REGISTERED, PairRegistry, same_file

FAMILY = "catalog"  # the kind of models of the same family


@dataclass(frozen=True)
class DrafterCandidate:
    path: Path
    kind: str  # "registered", "catalog" or "made"
    top1: float | None = None  # its measured agreement; None if not measured

    @property
    def reason(self) -> str:
        """The reason why it is a candidate, as the end of a sentence."""
        why = {
            REGISTERED: "registered for this target",
            FAMILY: "of the same family",
            MADE: "made from this target",
        }[self.kind]
        return f"{why}, agreement {self.top1:.2f}" if self.top1 is not None else why


def candidates(header: GGUFHeader, registry: PairRegistry | None = None) -> list[DrafterCandidate]:
    """The local drafters for the target with this header, the preferred one first."""
    known = (registry or PairRegistry()).pairs(header.fingerprint)
    preferred = [DrafterCandidate(p.path, p.kind, p.top1) for p in known if p.preferred]
    registered = [DrafterCandidate(p.path, REGISTERED, p.top1) for p in known if p.kind == REGISTERED]
    made = [DrafterCandidate(p.path, MADE, p.top1) for p in known if p.kind == MADE]
    siblings = [DrafterCandidate(path, FAMILY) for path in _siblings(header)]
    found: list[DrafterCandidate] = []
    for candidate in preferred + registered + siblings + made:
        known_as = [header.path, *(other.path for other in found)]  # a model does not draft for itself
        if not any(same_file(candidate.path, path) for path in known_as):
            found.append(candidate)
    return found


def agreement_of(header: GGUFHeader, drafter: Path, registry: PairRegistry | None = None) -> float | None:
    """The measured agreement of a drafter with the target of this header, by whatever path."""
    return next((c.top1 for c in candidates(header, registry) if same_file(c.path, drafter)), None)


def entry_of(path: Path) -> catalog.CatalogEntry | None:
    """The catalog's entry that a file belongs to: by its place in the cache, or by its name."""
    repository = next(
        (part.removeprefix("models--") for part in path.parts if part.startswith("models--")), ""
    ).replace("--", "/", 1)
    stem = path.stem.lower()
    best: catalog.CatalogEntry | None = None
    for entry in catalog.entries().values():
        if (repository and entry.repo.lower() == repository.lower()) or (
            entry.file and entry.file == path.name
        ):
            return entry
        base = entry.repo.lower().rpartition("/")[2].removesuffix("-gguf")
        if base and stem.startswith(base) and (best is None or len(base) > len(best.repo)):
            best = entry
    return best


def _siblings(header: GGUFHeader) -> list[Path]:
    entry = entry_of(header.path)
    found = []
    for name in entry.drafters if entry else ():
        try:
            path = catalog.find(name, fetch=False)
        except EdgeSpecError:
            continue  # not on this machine
        if path.is_file():
            found.append(path)
    return found
