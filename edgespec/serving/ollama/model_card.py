"""Descriptions of the served model, as Ollama's clients list and show models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from edgespec.engine.engine import Engine
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.summary import describe
from edgespec.serving.api.completion_request import is_pattern
from edgespec.units import readable_count
from edgespec.version import __version__

API_VERSION = "0.13.0"
"""The version of Ollama whose API is followed; clients refuse servers that seem too old."""

_FOREVER = datetime(9999, 12, 31, tzinfo=UTC).isoformat()


class ModelCard:
    """The served model, from its file's header.

    Args:
        names: all names that it answers to; patterns are not listed.
    """

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        self._path = engine.target.model.path
        self._names = [name for name in names if not is_pattern(name)]
        self._context = engine.context
        self._capabilities = ["completion"]
        if engine.has_chat_template:
            self._capabilities.append("tools")
        if engine.can_think:
            self._capabilities.append("thinking")

    def tags(self) -> dict[str, Any]:
        """The body of `/api/tags`."""
        modified = datetime.fromtimestamp(self._path.stat().st_mtime, UTC).isoformat()
        return {"models": [{**self._entry(name), "modified_at": modified} for name in self._names]}

    def running(self) -> dict[str, Any]:
        """The body of `/api/ps`: the model stays loaded for as long as the server runs."""
        more = {"expires_at": _FOREVER, "size_vram": 0, "context_length": self._context}
        return {"models": [{**self._entry(self._names[0]), **more}]}

    def shown(self) -> dict[str, Any]:
        """The body of `/api/show`."""
        facts = self._facts
        family = facts["architecture"]
        return {
            "modelfile": f"FROM {self._path.name}",
            "parameters": f"num_ctx {self._context}",
            "template": "",
            "details": self._details,
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": facts["parameters"],
                f"{family}.context_length": self._context,
                f"{family}.block_count": facts["layers"],
                f"{family}.embedding_length": facts["embedding"],
            },
            "capabilities": self._capabilities,
        }

    @cached_property
    def _facts(self) -> dict[str, Any]:
        header = read_header(self._path)
        paths = split_paths(header)
        return describe([header if path == header.path else read_header(path) for path in paths], memory={})

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
            "quantization_level": types.most_common(1)[0][0] if types else "",
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
