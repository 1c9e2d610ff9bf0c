"""Fetching the published head of a catalog model: `edgespec models pull TARGET --head`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.drafting.pair_check import examine_pair
from edgespec.errors import EdgeSpecError, HubError, UsageError
from edgespec.heads.eagle.eagle_conversion import convert_head
from edgespec.models.hub import catalog
from edgespec.models.hub.download import download
from edgespec.models.hub.names import HubName
from edgespec.models.hub.pull import pull
from edgespec.models.hub.repository import Hub, Repository, any_repository
from edgespec.progress import Progress

_PUBLISHED = ("config.json", "model.safetensors")


@dataclass(frozen=True)
class FetchedHead:
    """A head that is here now, and drafts for its target.

    Attributes:
        repo: where it came from.
        converted: whether it was made into a GGUF file here.
    """

    path: Path
    repo: str
    converted: bool


def fetch_head(
    target: str,
    on_progress: Progress | None = None,
    *,
    repos: tuple[str, ...] | None = None,
    hub: Hub | None = None,
) -> FetchedHead:
    """Download a head of a target, convert it if it is published as safetensors, and remember the pair.

    Args:
        target: path or name of the target; downloaded if it is not here, since its head must fit it.
        repos: tried one after another; None takes those of the catalog.

    Raises:
        UsageError: the catalog has no head for it.
        HubError, OutputError: none can be downloaded.
        ModelFileError, PairingError: it cannot be converted, or is a head of another model.
    """
    repos = catalog.heads_of(target) if repos is None else repos
    if not repos:
        known = [name for name, entry in catalog.entries().items() if entry.heads]
        raise UsageError(
            f"No known head for {target}.",
            f"Heads are known for {', '.join(known)}. --draft also takes a GGUF on the Hub.",
        )
    hub = hub or Hub.from_environment()
    path = catalog.find(target, on_progress, hub=hub)
    for repo in repos[:-1]:
        try:
            return _fetch(repo, path, hub, on_progress)
        except EdgeSpecError:
            continue  # the next one may do
    return _fetch(repos[-1], path, hub, on_progress)


def _fetch(repo: str, target: Path, hub: Hub, on_progress: Progress | None) -> FetchedHead:
    if on_progress is not None:
        on_progress(f"Asking the Hub about {repo}", 0.0)
    repository = any_repository(hub, repo)
    if repository.models:
        head = pull(HubName(repository.repo, None), on_progress, hub=hub).path
        examine_pair(str(target), str(head), measure_agreement=False, on_progress=on_progress)
        return FetchedHead(head, repository.repo, converted=False)
    folder = _published(repository, hub, on_progress)
    made = convert_head(folder, str(target), on_progress=on_progress)
    return FetchedHead(made.path, repository.repo, converted=True)


def _published(repository: Repository, hub: Hub, on_progress: Progress | None) -> Path:
    """The folder with a head's configuration and weights, in the Hub's cache."""
    by_path = {file.path: file for file in repository.files}
    missing = [name for name in _PUBLISHED if name not in by_path]
    if missing:
        raise HubError(
            f"{repository.repo} has no {' and no '.join(missing)}, so its head cannot be converted.",
            f"It has: {', '.join(sorted(by_path)[:8]) or 'nothing'}.",
        )
    return download(hub, repository, [by_path[name] for name in _PUBLISHED], on_progress)[0].parent
