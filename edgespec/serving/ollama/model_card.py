"""Descriptions of the served model, as Ollama's clients list and show models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edgespec.base.units import readable_count
from edgespec.llama.build import quantization_name
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.hub.projectors import projector_beside
from edgespec.planning.report.summary import describe
from edgespec.version import __version__

API_VERSION = "0.13.0"
"""The version of Ollama whose API is followed; clients refuse servers that seem too old."""

_FOREVER = datetime(9999, 12, 31, tzinfo=UTC).isoformat()


class ModelCard:
    """A loaded model, as the headers of its files describe it.

    Args:
        path, context: of the model, and its maximum tokens of a request; `name` and `context` are attributes.
        capabilities: what it can do, by Ollama's names.
    """

    def __init__(self, path: Path, context: int, capabilities: Sequence[str]) -> None:
        header = read_header(path)
        parts = [header if part == header.path else read_header(part) for part in split_paths(header)]
        self._facts = describe(parts, memory={})
        self._file_type = quantization_name(header)
        self.name = path.name
        self._modified = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat()
        self.context = context
        self._capabilities = list(capabilities)

    @classmethod
    def of_files(cls, path: Path, context: int, *, embeds: bool) -> ModelCard:
        """A model that is not loaded: it can do what its files say."""
        card = cls(path, context, ["embedding" if embeds else "completion"])
        if not embeds and card._facts["template"]:
            card._capabilities.append("tools")
        if not embeds and projector_beside(path) is not None:
            card._capabilities.append("vision")
        return card

    @property
    def sees(self) -> bool:
        return "vision" in self._capabilities

    @property
    def writes(self) -> bool:
        """True if the model writes text; others make embeddings."""
        return "completion" in self._capabilities

    @property
    def chats(self) -> bool:
        return "tools" in self._capabilities

    def tags(self, names: Sequence[str]) -> dict[str, Any]:
        """The body of `/api/tags`: the model under all its names."""
        return {"models": [{**self._entry(name), "modified_at": self._modified} for name in names]}

    def running(self, name: str, is_loaded: bool = True) -> dict[str, Any]:
        """The body of `/api/ps`."""
        if not is_loaded:
            return {"models": []}
        more = {"expires_at": _FOREVER, "size_vram": 0, "context_length": self.context}
        return {"models": [{**self._entry(name), **more}]}

    def shown(self) -> dict[str, Any]:
        """The body of `/api/show`."""
        facts = self._facts
        family = facts["architecture"]
        return {
            "modelfile": f"FROM {self.name}",
            "parameters": f"num_ctx {self.context}",
            "template": "",
            "details": self._details,
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": facts["parameters"],
                f"{family}.context_length": self.context,
                f"{family}.block_count": facts["layers"],
                f"{family}.embedding_length": facts["embedding"],
            },
            "capabilities": self._capabilities,
        }

    @property
    def _details(self) -> dict[str, Any]:
        types: Counter[str] = Counter()
        for row in self._facts["quantization"]:
            types.update(row["types"])
        family = self._facts["architecture"]
        return {
            "parent_model": "",
            "format": "gguf",
            "family": family,
            "families": [family],
            "parameter_size": readable_count(self._facts["parameters"]),
            "quantization_level": self._file_type or (types.most_common(1)[0][0] if types else ""),
        }

    def _entry(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "size": self._facts["bytes"],
            "digest": self._facts["fingerprint"],
            "details": self._details,
        }


def version() -> dict[str, Any]:
    """The body of `/api/version`."""
    return {"version": API_VERSION, "server": f"edgespec {__version__}"}
