"""The models on this machine, in the places where EdgeSpec looks for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.files.state import size_of
from edgespec.models.hub import catalog
from edgespec.models.hub.cache import cached_models, cached_repositories
from edgespec.models.hub.external import external_models
from edgespec.models.hub.projectors import projector_beside
from edgespec.models.hub.registry import drafters_folder
from edgespec.models.hub.repository import Hub


@dataclass(frozen=True)
class LocalModel:
    name: str  # what to type for it
    # "hub", "package", "made"; "ollama", "lm studio", "llama.cpp" or "folder" for models that lie elsewhere
    source: str
    path: Path
    n_bytes: int  # of all its files, a projector that several models share included
    quant: str
    projector: Path | None = None  # the file by which a model from the Hub sees; None if it has none

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "source": self.source,
            "path": str(self.path),
            "bytes": self.n_bytes,
            "quantization": self.quant,
            "projector": None if self.projector is None else str(self.projector),
        }


def local_models(hub: Hub) -> list[LocalModel]:
    """All of them: packages, the Hub's cache, drafters made here, and other programs'."""
    found = [
        LocalModel(
            entry.name, "package", catalog.find(entry.name), size_of(catalog.find(entry.name)), entry.quant
        )
        for entry in catalog.entries().values()
        if catalog.is_installed(entry)
    ]
    for repo in cached_repositories(hub):
        for model, path in sorted(cached_models(hub, repo), key=lambda pair: pair[0].n_bytes):
            pick = model.label or model.name
            projector = projector_beside(path)
            size = model.n_bytes + (0 if projector is None else size_of(projector))
            found.append(LocalModel(f"{repo}:{pick}", "hub", path, size, model.label, projector=projector))
    for path in sorted(drafters_folder().glob("*.gguf")):
        found.append(LocalModel(str(path), "made", path, size_of(path), ""))
    known = {model.path.resolve() for model in found}
    for there in external_models():
        if there.path.resolve() not in known:
            found.append(LocalModel(there.name, there.source, there.path, there.n_bytes, there.quant))
    return found
