"""Getting the files of a name on the Hub, from the cache or by download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from edgespec.base.progress import Progress
from edgespec.errors import HubError
from edgespec.models.hub.cache import cached_models
from edgespec.models.hub.model_choice import choose_model, listing
from edgespec.models.hub.names import FoundModel, HubName, ModelVariant, normal
from edgespec.models.hub.repository import Hub, find_repository


def pull(
    name: HubName,
    on_progress: Progress | None = None,
    *,
    hub: Hub | None = None,
    fetch: bool = True,
    refresh: bool = False,
) -> FoundModel:
    """The first file of a model on the Hub, from the cache or downloaded into it, with its projector.

    Args:
        fetch: whether the network may be used.
        refresh: ask the Hub for a newer version even if the model is in the cache.
    """
    hub = hub or Hub.from_environment()
    models = dict(cached_models(hub, name.repo))
    here = None if refresh else _exact(name, models)
    if here is None and models and name.pick is None and (hub.offline or not fetch):
        here = models[choose_model(name, list(models)).model]
    if here is not None:
        return FoundModel(here)
    if not fetch or hub.offline:
        raise _missing(name, models, offline=hub.offline)
    if on_progress is not None:
        on_progress(f"Asking the Hub about {name.repo}", 0.0)
    repository = find_repository(hub, name.repo)
    choice = choose_model(replace(name, repo=repository.repo), repository.models)
    from edgespec.models.hub.download import download

    projector = repository.projector_of(choice.model)
    wanted = [*repository.files_of(choice.model), *([projector] if projector else [])]
    paths = download(hub, repository, wanted, on_progress)
    return FoundModel(paths[0], (choice.note,) if choice.note else ())


def _exact(name: HubName, models: Mapping[ModelVariant, Path]) -> Path | None:
    """The cached model that matches the name unambiguously, so that the Hub need not be asked."""
    wanted = normal(name.pick) if name.pick else None
    fits = [
        path
        for model, path in models.items()
        if wanted is None or name.pick in (model.name, *model.paths) or normal(model.label) == wanted
    ]
    return fits[0] if len(fits) == 1 else None


def _missing(name: HubName, models: Mapping[ModelVariant, Path], *, offline: bool) -> HubError:
    here = f" Installed: {listing(list(models))}." if models else ""
    if offline:
        return HubError(
            f"{name} is not installed, and HF_HUB_OFFLINE forbids asking the Hub.{here}",
            "Unset HF_HUB_OFFLINE, or give the path of a GGUF file.",
        )
    return HubError(f"{name} is not installed.{here}", f"Download it: edgespec models pull {name}")
