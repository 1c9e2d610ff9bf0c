"""The origin of an answer: the model, the prompt and the settings, as each result records them.

A batch that is run again skips lines that have an answer. An answer that was made with another model,
prompt or other settings is not the requested one, so each result has a fingerprint of all three, and the
settings by name. Adapters and the type of the cache are settings. Answers about images depend on the
projector too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from edgespec.config import ModelConfig
from edgespec.errors import EdgeSpecError
from edgespec.files.state import sampled_digest
from edgespec.generation.config import GenerationConfig, Grammar

if TYPE_CHECKING:
    from edgespec.models.gguf.types import GGUFHeader

_DEFAULTS = asdict(GenerationConfig())
_OF_MODEL: dict[str, Any] = {name: getattr(ModelConfig(), name) for name in ("kv", "lora", "context")}
_ALL_DEFAULTS = _DEFAULTS | _OF_MODEL | {"raw": False, "n": 1, "endpoint": None}  # of all `settings`
# The same fields for a result without an answer.
NO_ORIGIN: dict[str, Any] = {"model": None, "settings": None, "fingerprint": None}


@dataclass(frozen=True)
class ModelIdentity:
    """The identity of a model in results.

    Attributes:
        name: of its file; empty if it is not known yet, as before a download.
        digest: a hash of its header and of samples of its weights; empty likewise.
        projector, projector_digest: likewise of the projector by which it sees; empty if it has none.
        settings: options of loading that change its answers and are not the defaults, by name.
    """

    name: str = ""
    digest: str = ""
    projector: str = ""
    projector_digest: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Origin:
    """The origin of an answer."""

    model: ModelIdentity
    prompt: str  # a hash of the prompt, the system prompt included
    settings: Mapping[str, Any]  # those that are not the defaults, by name
    about_images: bool = False  # the prompt has images

    @classmethod
    def of(
        cls,
        model: ModelIdentity,
        prompt: object,
        config: GenerationConfig,
        *,
        raw: bool,
        endpoint: str | None = None,
        answers: int = 1,
    ) -> Origin:
        """The origin of an answer.

        Args:
            prompt: text, messages or tokens.
            endpoint: of the OpenAI API, if it has the form of that API.
            answers: how many there are in one response of that API.
        """
        settings = {name: value for name, value in asdict(config).items() if value != _DEFAULTS[name]}
        settings |= model.settings
        if isinstance(config.grammar, Grammar):
            settings["grammar"] = f"{config.grammar.kind} {_hash(config.grammar.text)}"
        if config.tools:
            settings["tools"] = f"{len(config.tools)} {_hash(settings['tools'])}"
        # As they are read back from JSON.
        settings |= {name: list(value) for name, value in settings.items() if isinstance(value, tuple)}
        if raw:
            settings["raw"] = True
        if endpoint:
            settings["endpoint"] = endpoint
        if answers > 1:
            settings["n"] = answers
        return cls(model, _hash(prompt), settings, _is_about_images(prompt))

    @property
    def fingerprint(self) -> dict[str, str]:
        """16 hex digits for each; empty for an unknown model, and a projector only where it counts."""
        found = {"model": self.model.digest, "prompt": self.prompt, "settings": _hash(self.settings)}
        if self.about_images and self.model.projector_digest:
            found["projector"] = self.model.projector_digest
        return found

    def to_json(self) -> dict[str, Any]:
        """The fields of a result that record this."""
        fingerprint = self.fingerprint
        projector = {"projector": self.model.projector} if "projector" in fingerprint else {}
        return {
            "model": self.model.name or None,
            **projector,
            "settings": dict(self.settings),
            "fingerprint": fingerprint,
        }

    def differences(self, record: Mapping[str, Any]) -> list[str]:
        """Describe the differences in a result's origin; the record must have a fingerprint."""
        was, now = record["fingerprint"], self.fingerprint
        found = []
        for kind, name in (("model", self.model.name), ("projector", self.model.projector)):
            if was.get(kind) and now.get(kind) and was[kind] != now[kind]:
                before = record.get(kind)
                other = f"was {before} and is now {name}" if before != name else f"is a different {name}"
                found.append(f"the {kind} {other}")
        if was["prompt"] != now["prompt"]:
            found.append("the prompt or the system prompt differs")
        if was["settings"] != now["settings"]:
            found += _changes(record.get("settings"), self.settings)
        return found


def compact(fingerprint: object) -> str | None:
    """A result's fingerprint as one string, which is kept for every line of a batch; None if it has none."""
    if not isinstance(fingerprint, dict):
        return None
    parts = [fingerprint.get(name) for name in ("model", "prompt", "settings")]
    parts.append(fingerprint.get("projector", ""))
    return " ".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None


def same(was: str, now: str) -> bool:
    """True if two compact fingerprints agree; an unknown model or projector agrees with every other."""
    before, after = was.split(" "), now.split(" ")
    return before[1:3] == after[1:3] and all(
        not before[place] or not after[place] or before[place] == after[place] for place in (0, 3)
    )


def model_identity(model: ModelConfig) -> ModelIdentity:
    """The identity of a model and its projector; nameless if it is not local, or cannot be read.

    Nothing is downloaded; loading the model reports what is wrong with it.
    """
    from edgespec.images.projector import find_projector, named_projector
    from edgespec.models.gguf.header import read_header
    from edgespec.models.gguf.layers import ModelFiles
    from edgespec.models.hub import catalog

    settings: dict[str, Any] = {} if model.kv == _OF_MODEL["kv"] else {"kv": model.kv}
    try:
        if model.lora:
            settings["lora"] = [_adapter(name) for name in model.lora]
        files = ModelFiles.of(read_header(catalog.find(model.name, fetch=False)))
        if files.depends_on_context and model.context != _OF_MODEL["context"]:
            settings["context"] = model.context
        # Without the file's name: a model that was moved is still the same.
        identity = ModelIdentity(files.paths[0].name, _content(*files.headers), settings=settings)
    except (EdgeSpecError, OSError):
        return ModelIdentity(settings=settings)
    try:
        projector = find_projector(files.paths[0], named_projector(model.mmproj))
        return replace(identity, projector=projector.path.name, projector_digest=_content(projector))
    except (EdgeSpecError, OSError):
        return identity


def _content(*headers: GGUFHeader) -> str:
    """A hash of files with these headers; of large ones, samples of the weights."""
    return _hash([[header.fingerprint, sampled_digest(header.path)] for header in headers])


def _adapter(name: str) -> str:
    """An adapter's file and scale, and a hash of its content."""
    from edgespec.planning.adapters import file_and_scale

    path, scale = file_and_scale(name)
    return f"{path.name}:{scale:g} {sampled_digest(path)}"


def _is_about_images(prompt: object) -> bool:
    """True if there are images among the messages of a prompt."""
    from edgespec.images.parts import has_images

    return (
        isinstance(prompt, list)
        and all(isinstance(message, Mapping) for message in prompt)
        and has_images(prompt)
    )


def _changes(was: object, now: Mapping[str, Any]) -> list[str]:
    then: Mapping[str, Any] = was if isinstance(was, dict) else {}
    found = []
    for name in _ALL_DEFAULTS:
        before, after = then.get(name, _default(name)), now.get(name, _default(name))
        if before != after:
            found.append(f"{name} was {_words(before)} and is now {_words(after)}")
    return found or ["the settings differ"]


def _default(name: str) -> Any:
    value = _ALL_DEFAULTS[name]
    return list(value) if isinstance(value, tuple) else value


def _words(value: Any) -> str:
    text = "none" if value in (None, []) else json.dumps(value, ensure_ascii=False).strip('"')
    return text if len(text) <= 60 else text[:59] + "…"


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
