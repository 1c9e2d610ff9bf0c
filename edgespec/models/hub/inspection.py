"""Reads a model's headers from disk, or from the Hub without downloading the model."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.base.progress import Progress
from edgespec.base.units import readable
from edgespec.errors import EdgeSpecError, HubError, ModelFileError, UsageError
from edgespec.models.gguf.cursor import IncompleteHeader
from edgespec.models.gguf.head_family import head_family
from edgespec.models.gguf.header import read_header, read_header_bytes
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import ArrayInfo, GGUFHeader
from edgespec.models.hub import catalog
from edgespec.models.hub.drafter_choice import candidates, entry_of
from edgespec.models.hub.external import external_models
from edgespec.models.hub.file_requests import described, request_bytes
from edgespec.models.hub.model_choice import choose_model
from edgespec.models.hub.registry import same_file
from edgespec.models.hub.repository import Hub, HubFile, Repository, find_repository, translated

_SMALLER = 2  # times, at least, that a drafter is smaller than its target
_FILE_BYTES = 1.1  # of a file, relative to its weights: the header may add a little
_MAX_FILES = 100  # that are looked at: a folder may hold any number
_KINDS = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
_TOKENS = "tokenizer.ggml.tokens"
_PADDING = 0.02  # of a vocabulary: models of one family pad theirs to different sizes
_FIRST_BYTES = 2 << 20  # asked for of a header
_LITTLE_BYTES = 64 << 10  # the same where the vocabulary is known
_ARRAY_HEAD = 8 + 4 + 4 + 8  # bytes around an array's name: its length, two types, and a count
_MAX_BYTES = 256 << 20  # of a header: the limit of `models.gguf.cursor`


@dataclass(frozen=True)
class InspectedModel:
    """A model's headers, in order."""

    headers: tuple[GGUFHeader, ...]
    path: Path | None  # its first file; None if it is only on the Hub
    entry: catalog.CatalogEntry | None
    notes: tuple[str, ...] = ()
    approximate: bool = False  # the headers are made of the catalog's sizes, as no file could be read
    projector: GGUFHeader | None = None  # the header of its projector, if both are only on the Hub


def inspect_model(
    model: str, on_progress: Progress | None = None, *, hub: Hub | None = None
) -> InspectedModel:
    """The headers of a local model, or else of the one on the Hub that would be pulled.

    If the Hub gives none, the catalog's sizes of a well-known model have to do.
    """
    try:
        found = catalog.resolve(model, hub=hub, fetch=False)
    except (HubError, UsageError):
        if catalog.hub_name_of(model) is None:
            raise
        try:
            return _inspect_remote(model, hub or Hub.from_environment(), on_progress)
        except HubError as error:
            known, entry = catalog_model(model), catalog.entry_for(model)
            if known is None and entry is not None:
                listed = (
                    f"The catalog lists only the file size of {entry.name}, about {readable(entry.n_bytes)}."
                )
                raise HubError(f"{error.what} {listed}", error.hint) from None
            if known is None:
                raise
            note = f"{error.what} The figures are approximate: they follow from the catalog's sizes."
            return replace(known, notes=(note,))
    header = read_header(found.path)
    parts = split_paths(header)
    headers = tuple(header if path == header.path else read_header(path) for path in parts)
    return InspectedModel(headers, found.path, entry_of(found.path) or catalog.entry_for(model), found.notes)


def catalog_model(model: str) -> InspectedModel | None:
    """A well-known model by the sizes in the catalog, without its file; None if these are not known."""
    name, entry = catalog.hub_name_of(model), catalog.entry_for(model)
    files = entry.hollow_in(name.pick or entry.quant) if name is not None and entry is not None else None
    return None if files is None else InspectedModel(files.headers, None, entry, approximate=True)


def _inspect_remote(model: str, hub: Hub, on_progress: Progress | None) -> InspectedModel:
    name = catalog.hub_name_of(model)
    assert name is not None
    if on_progress is not None:
        on_progress(f"Asking the Hub about {name.repo}", 0.0)
    repository = find_repository(hub, name.repo)
    choice = choose_model(replace(name, repo=repository.repo), repository.models)
    headers, remote = [], RemoteHeaders(hub, repository)
    for file in repository.files_of(choice.model):
        if on_progress is not None:
            on_progress(f"Reading the header of {file.path}", 0.0)
        headers.append(remote.read(file))
    notes: tuple[str, ...] = (choice.note,) if choice.note else ()
    file_of_projector, projector = repository.projector_of(choice.model), None
    if file_of_projector is not None:
        try:
            projector = remote.read(file_of_projector)
        except EdgeSpecError as error:  # the model is of use without it
            notes += (f"{file_of_projector.path} cannot be used: {error.what}",)
    return InspectedModel(tuple(headers), None, catalog.entry_for(model), notes, projector=projector)


def drafters_of(model: InspectedModel) -> list[dict[str, Any]]:
    """Local drafters for the model, then local models that could draft, then those that could be pulled."""
    here = [
        {"name": str(found.path), "here": True, "why": found.reason, "top1": found.top1}
        for found in candidates(model.headers[0])
    ]
    paths = [Path(str(row["name"])) for row in here]
    for path in possible_drafters(model):
        if not any(same_file(path, known) for known in paths):
            why = "has the same vocabulary; use it with --draft"
            here.append({"name": str(path), "here": True, "why": why, "top1": None})
            paths.append(path)
    more = []
    for name in model.entry.drafters if model.entry else ():
        try:
            found_path = catalog.find(name, fetch=False)
            if any(same_file(found_path, known) for known in paths):
                continue
        except HubError:
            pass
        more.append(
            {
                "name": name,
                "here": False,
                "why": f"of the same family; edgespec models pull {name}",
                "top1": None,
            }
        )
    return here + more


def possible_drafters(model: InspectedModel) -> list[Path]:
    """Smaller models with the same vocabulary, in the folder of the model and among those that are here.

    The smallest comes first: a draft step costs as much as the drafter is large.
    """
    if model.path is None:
        return []
    own = model.headers[0]
    most = sum(header.tensor_bytes for header in model.headers) / _SMALLER
    found: dict[Path, int] = {}
    for path in _models_around(model.path):
        try:
            if path.stat().st_size > most * _FILE_BYTES or same_file(path, model.path):
                continue
            header = read_header(path)
        except (EdgeSpecError, OSError):
            continue  # damaged, or no model
        n_bytes = header.tensor_bytes
        if 0 < n_bytes <= most and head_family(header) is None and same_vocabulary(own, header):
            found.setdefault(path.resolve(), n_bytes)
    return sorted(found, key=lambda path: found[path])


def _models_around(path: Path) -> list[Path]:
    """GGUF files in the same folder, and models of other programs and of the user's own folders."""
    try:
        beside = sorted(other for other in path.parent.iterdir() if other.suffix.lower() == ".gguf")
    except OSError:
        beside = []
    return [*beside[:_MAX_FILES], *(there.path for there in external_models()[:_MAX_FILES])]


def same_vocabulary(one: GGUFHeader, other: GGUFHeader) -> bool:
    """True if two files on this machine have the same tokenizer and the same tokens, padding aside."""
    if any(one.metadata.get(key) != other.metadata.get(key) for key in _KINDS):
        return False
    sizes = sorted((one.n_vocab, other.n_vocab))
    if not sizes[0] or sizes[0] < (1 - _PADDING) * sizes[1]:
        return False
    try:
        tokens = [_tokens(header) for header in (one, other)]
    except OSError:
        return False
    shared = min(map(len, tokens))
    return shared > 0 and tokens[0][:shared] == tokens[1][:shared]


def _tokens(header: GGUFHeader) -> bytes:
    """The tokens as they are in the file, each with its length before it.

    Raises:
        OSError: the file cannot be read.
    """
    tokens = header.metadata[_TOKENS]
    assert isinstance(tokens, ArrayInfo)
    start, end = tokens.byte_range
    with header.path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


class RemoteHeaders:
    """Reads headers of a repository's files without downloading the rest.

    Most of a header is the vocabulary, which the quantizations of a model share: it is read once. Several
    threads may read.
    """

    def __init__(self, hub: Hub, repository: Repository) -> None:
        self._hub = hub
        self._repository = repository
        self._marker = b""  # what stands before the vocabulary in a file
        self._vocabulary = b""
        self._first = threading.Lock()  # one thread at a time, until the vocabulary is known

    def read(self, file: HubFile) -> GGUFHeader:
        """Read and check the header of one file.

        Raises:
            HubError: the Hub cannot be asked, or gives no size.
        """
        with translated(self._hub, self._repository.repo):
            with self._first:
                if not self._vocabulary:
                    return self._read(file, _FIRST_BYTES)
            try:
                return self._read(file, _LITTLE_BYTES)
            except ModelFileError:  # its vocabulary may be another one
                return self._read(file, _FIRST_BYTES)

    def _read(self, file: HubFile, step: int) -> GGUFHeader:
        """Read a header, at first so many bytes of it; if these are few, the vocabulary that is known is
        taken for its own, provided that it begins alike."""
        file, data = _range(self._hub, self._repository, file, 0, step)
        if step == _LITTLE_BYTES:
            data = self._with_vocabulary(data)
        while True:
            if not file.n_bytes:
                raise HubError(
                    f"{self._hub.host} does not report the size of {file.path}.",
                    "Download it: edgespec models pull.",
                )
            try:
                header = read_header_bytes(Path(file.path), data, file.n_bytes)
            except IncompleteHeader as incomplete:
                # Most of it is the vocabulary, whose length is only known at its end.
                end = min(max(incomplete.needed, len(data) + step), _MAX_BYTES)
                step *= 2
                file, more = _range(self._hub, self._repository, file, len(data), end)
                if not more:
                    raise HubError(
                        f"{self._hub.host} sends only a part of {file.path}.", "Try again later."
                    ) from None
                data += more
            else:
                self._remember_vocabulary(header, data)
                return header

    def _with_vocabulary(self, data: bytes) -> bytes:
        """The beginning of a file, to the end of its vocabulary if that begins like the one that is known."""
        start = data.find(self._marker) + len(self._marker)
        read = len(data) - start
        alike = self._marker in data and self._vocabulary.startswith(data[start:])
        return data[:start] + self._vocabulary if alike and read else data

    def _remember_vocabulary(self, header: GGUFHeader, data: bytes) -> None:
        tokens = header.metadata.get(_TOKENS)
        if self._vocabulary or not isinstance(tokens, ArrayInfo):
            return
        start = tokens.byte_range[0]
        end = max(
            value.byte_range[1]
            for key, value in header.metadata.items()
            if key.startswith("tokenizer.") and isinstance(value, ArrayInfo)
        )
        if end - start > _LITTLE_BYTES:
            self._marker = data[start - len(_TOKENS) - _ARRAY_HEAD : start]
            self._vocabulary = data[start:end]


def _range(hub: Hub, repository: Repository, file: HubFile, start: int, end: int) -> tuple[HubFile, bytes]:
    """The file, with its size if the response has it, and its bytes from `start` to `end`, or fewer.

    A server that ignores ranges sends everything: what lies before is dropped, and the rest not awaited.
    """
    import httpx2
    from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

    if file.n_bytes:
        end = min(end, file.n_bytes)
    data = bytearray()
    try:
        with request_bytes(hub, repository, file, start, end) as response:
            hf_raise_for_status(response)
            file = described(hub, file, response)
            first = start if response.status_code == 206 else 0
            for chunk in response.iter_bytes():
                data += chunk
                if first + len(data) >= end:
                    break
    except (httpx2.NetworkError, httpx2.RemoteProtocolError):
        if not data:
            raise
    return file, bytes(data[start - first : end - first])
