"""Models that are on this machine already: those of ollama, LM Studio, llama.cpp and a folder of one's own.

They are read where they are. Nothing is written, moved or removed there.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from edgespec.files.small_json import MALFORMED
from edgespec.files.state import size_of
from edgespec.files.user_folders import data_folder, expanded, holds
from edgespec.models.hub.names import ModelVariant, group_files, label_of

FOLDERS = "EDGESPEC_MODELS_FOLDER"  # of one's own; several are separated as in PATH

_OLLAMA_HOST, _OLLAMA_OWNER = "registry.ollama.ai", "library"  # left out of names
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")  # where its Linux package keeps them
_DEEPEST = 4  # folders below a models folder; without a limit, a slow disk would be searched for minutes


@dataclass(frozen=True)
class ExternalModel:
    """A model of another program."""

    name: str  # what to type for it: ollama's own name, `org/repo:quant`, or the name of the file
    also: frozenset[str]  # other names that mean it, in small letters
    source: str  # "ollama", "lm studio", "llama.cpp" or "folder"
    path: Path  # its file, or the first of them
    n_bytes: int  # of all its files
    quant: str = ""  # its quantization; empty if the name has none

    @property
    def place(self) -> str:
        return _PLACES[self.source]


_PLACES = {
    "ollama": "ollama's store",
    "lm studio": "LM Studio's folder",
    "llama.cpp": "llama.cpp's cache",
    "folder": "your models folder",
}


def external_models() -> list[ExternalModel]:
    """All of them, each file once."""
    found: dict[Path, ExternalModel] = {}
    for model in (*_of_folders(), *_of_ollama(), *_of_lm_studio(), *_of_llama_cpp()):
        found.setdefault(_resolved(model.path), model)
    return list(found.values())


def find_external(name: str) -> ExternalModel | None:
    """The model of that name, ignoring case; None if there is none, or several."""
    wanted = name.strip().lower()
    known = external_models()
    named = [model for model in known if model.name.lower() == wanted]
    found = named or [model for model in known if wanted in model.also]
    return found[0] if len(found) == 1 or named else None


def external_model_at(path: Path) -> ExternalModel | None:
    """The model whose first file this is; None if it belongs to no other program."""
    wanted = _resolved(path)
    return next((model for model in external_models() if _resolved(model.path) == wanted), None)


def display_name(path: Path) -> str:
    """A name for the model of a file: ollama's files are named by their hashes, others by their names."""
    if not path.name.startswith("sha256-"):
        return path.stem
    there = external_model_at(path)
    return there.name if there is not None else path.stem


def own_folders() -> list[Path]:
    """The folders that EDGESPEC_MODELS_FOLDER names, or else `models` in EdgeSpec's data folder."""
    names = os.environ.get(FOLDERS)
    if names is None:
        return [data_folder() / "models"]
    return [path for name in names.split(os.pathsep) if name.strip() and (path := expanded(name.strip()))]


def _of_folders() -> Iterator[ExternalModel]:
    for folder in own_folders():
        models = list(models_in(folder))
        for model in models:
            first = Path(model.paths[0])
            alone = sum(Path(other.paths[0]).stem.lower() == first.stem.lower() for other in models) == 1
            name = first.stem if alone else first.with_suffix("").as_posix()
            also = {first.name.lower(), first.as_posix().lower(), first.with_suffix("").as_posix().lower()}
            yield _made(model, folder, "folder", name, also if alone else also - {first.name.lower()})


def _of_ollama() -> Iterator[ExternalModel]:
    named = os.environ.get("OLLAMA_MODELS")
    stores = [expanded(named)] if named else [expanded("~") / ".ollama" / "models", _OLLAMA_SERVICE]
    for store in stores:
        manifests = store / "manifests"
        for file in _files_below(manifests, _DEEPEST):
            parts = file.relative_to(manifests).parts
            blob = _ollama_blob(store, file)
            if len(parts) < 3 or blob is None:
                continue
            host, *owner, model, tag = parts
            words = [*([] if host == _OLLAMA_HOST else [host]), *owner, model]
            if host == _OLLAMA_HOST and owner == [_OLLAMA_OWNER]:
                words = [model]
            name = f"{'/'.join(words)}:{tag}"
            also = frozenset([name.removesuffix(":latest").lower()])
            yield ExternalModel(name, also, "ollama", blob, blob.stat().st_size, label_of(f"-{tag}"))


def _ollama_blob(store: Path, manifest: Path) -> Path | None:
    """The GGUF file of a model in ollama's store; None if it has none, or not all of it."""
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL]
        if len(digests) != 1:
            return None
        blob = store / "blobs" / str(digests[0]).replace(":", "-")
        with blob.open("rb") as file:
            return blob if file.read(4) == b"GGUF" and blob.parent == store / "blobs" else None
    except (OSError, *MALFORMED):  # another form, being written, or not readable
        return None


def _of_lm_studio() -> Iterator[ExternalModel]:
    for folder in _lm_studio_folders():
        yield from _by_repository(folder, "lm studio")


def _lm_studio_folders() -> list[Path]:
    """Find its models folders: where the settings of each of its homes say, and in the homes themselves."""
    home = expanded("~")
    homes = [home / ".lmstudio", home / ".cache" / "lm-studio"]
    with contextlib.suppress(OSError, ValueError):
        pointed = (home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
        homes = [*([expanded(pointed)] if pointed else []), *homes]
    chosen = []
    for place in homes:
        with contextlib.suppress(OSError, *MALFORMED):
            folder = json.loads((place / "settings.json").read_text(encoding="utf-8"))["downloadsFolder"]
            chosen.append(expanded(folder))
    return list(dict.fromkeys([*chosen, *(place / "models" for place in homes)]))


def _of_llama_cpp() -> Iterator[ExternalModel]:
    folder = _llama_cpp_folder()
    for repository in sorted(folder.glob("models--*--*")) if folder.is_dir() else ():
        repo = repository.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in sorted((repository / "snapshots").glob("*")):
            for model in models_in(snapshot):
                yield _of_repository(model, snapshot, "llama.cpp", repo)
    # Older versions write user_repository_file.gguf, and note the first two in the name of a manifest.
    repos = {
        f"{user}_{repo}_": f"{user}/{repo}"
        for file in (folder.glob("manifest=*=*=*.json") if folder.is_dir() else ())
        for _, user, repo, *_ in [file.name.split("=")]
    }
    for model in models_in(folder, deepest=0):
        prefix = next((start for start in repos if model.name.startswith(start)), None)
        if prefix is not None:
            yield _of_repository(model, folder, "llama.cpp", repos[prefix])
        else:
            yield _made(model, folder, "llama.cpp", Path(model.name).stem, {model.name.lower()})


def _llama_cpp_folder() -> Path:
    named = os.environ.get("LLAMA_CACHE")
    if named:
        return expanded(named)
    with contextlib.suppress(RuntimeError):  # a user without a home
        return platformdirs.user_cache_path("llama.cpp", False, opinion=False)
    return expanded("~/.cache/llama.cpp")


def _by_repository(folder: Path, source: str) -> Iterator[ExternalModel]:
    """The models of a folder that is laid out as org/repo/file."""
    for model in models_in(folder):
        parts = Path(model.paths[0]).parts
        if len(parts) == 3:
            yield _of_repository(model, folder, source, "/".join(parts[:2]))
        else:
            yield _made(model, folder, source, Path(model.name).stem, {model.name.lower()})


def _of_repository(model: ModelVariant, folder: Path, source: str, repo: str) -> ExternalModel:
    also = {repo.lower(), f"{repo}:{model.name}".lower(), Path(model.name).stem.lower(), model.name.lower()}
    return _made(model, folder, source, f"{repo}:{model.label or model.name}", also)


def _made(model: ModelVariant, folder: Path, source: str, name: str, also: Iterable[str]) -> ExternalModel:
    return ExternalModel(name, frozenset(also), source, folder / model.paths[0], model.n_bytes, model.label)


def models_in(folder: Path, deepest: int = _DEEPEST) -> tuple[ModelVariant, ...]:
    """The GGUF models below a folder, by their paths in it."""
    files = (path for path in _files_below(folder, deepest) if path.suffix.lower() == ".gguf")
    there = (path for path in files if holds(path.is_file))  # links may lead nowhere
    return group_files((path.relative_to(folder).as_posix(), size_of(path)) for path in there)


def _files_below(folder: Path, deepest: int) -> Iterator[Path]:
    """The files below a folder, down to a depth, in order; none where it cannot be read."""
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < deepest else []
        yield from (Path(place) / name for name in sorted(names) if not name.startswith("."))


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()
