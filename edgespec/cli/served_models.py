"""Sets up the models of `edgespec serve` with its options: one that is loaded at once, or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.api.limits import Limits
from edgespec.api.response_store import ResponseStore
from edgespec.base.progress import Progress, no_progress
from edgespec.cli.conversation.settings import sampling_in_words
from edgespec.cli.options.sampling import SamplingOptions
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import Config
from edgespec.errors import UsageError
from edgespec.files.state import size_of
from edgespec.loading.embedder import names_embedder, open_embedder, usual_context
from edgespec.loading.load import open_engine
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.footprint import cell_bytes
from edgespec.models.gguf.header import read_header
from edgespec.models.hub import catalog
from edgespec.models.hub.external import display_name
from edgespec.models.hub.inventory import local_models
from edgespec.models.hub.pull import pull as hub_pull
from edgespec.models.hub.repository import Hub
from edgespec.serving.app import Application
from edgespec.serving.completion_handler import CompletionHandler
from edgespec.serving.embeddings import EmbeddingHandler, EmbeddingWorker, ServedEmbedder
from edgespec.serving.engine_worker import EngineWorker
from edgespec.serving.loaded_models import LoadedModels, OfferedModel
from edgespec.serving.ollama.model_card import ModelCard
from edgespec.serving.request_log import RequestLogEntry
from edgespec.serving.served_model import ServedModel

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine

_BESIDE = 512 << 20  # bytes that a model takes beside its weights and their cache, with a drafter, about


@dataclass(frozen=True)
class FoundModel:
    """A model that is to be served."""

    name: str  # for clients
    model: str  # its path, or a name by which `catalog.find` finds it
    path: Path  # its first file
    n_bytes: int


def find_models(names: Sequence[str]) -> list[FoundModel]:
    """The models of these names, or those on this machine if there are none.

    Raises:
        EdgeSpecError: as `catalog.find`.
    """
    if not names:
        there = local_models(Hub.without_token())
        return [FoundModel(m.name, str(m.path), m.path, m.n_bytes) for m in there if m.source != "made"]
    paths = [catalog.find(name) for name in names]
    # Files are known by their names, unless several have the same.
    pairs = list(zip(paths, names, strict=True))
    own = [display_name(path) if Path(name).is_file() else name for path, name in pairs]
    known = [one if own.count(one) == 1 else name for one, name in zip(own, names, strict=True)]
    return [
        FoundModel(one, name, path, size_of(path)) for one, (path, name) in zip(known, pairs, strict=True)
    ]


@dataclass(frozen=True)
class ServingOptions:
    """Settings that all models of a server have in common."""

    sampling: SamplingOptions
    terminal: Terminal
    limits: Limits
    queue: int  # most waiting requests
    parallel: int  # most requests at once
    idle_s: float  # after which a model is unloaded; never if it is negative
    on_request: Callable[[RequestLogEntry], None]
    system: str | None  # the system prompt of chats without one
    chosen_context: bool  # the context was given, and not to be chosen

    def handler(
        self,
        loading: Config,
        name: str | None,
        aliases: tuple[str, ...],
        memory: Callable[[], int | None] | None = None,
    ) -> CompletionHandler | EmbeddingHandler:
        """Set up a model.

        Args:
            loading: with its name or path.
            name: of the model, for clients; None for that of its file.
            memory: gives the bytes that it may take when its first request loads it; None loads it now.

        Raises:
            EdgeSpecError: as `load` and `load_embedder`.
        """
        with self.terminal.working() if memory is None else nullcontext(no_progress) as report:
            embeds = names_embedder(loading, report)
            if not embeds and not self.chosen_context:
                loading = loading.with_(context=usual_context(loading, report))
        # A device that has failed is left out when the model is loaded again.
        again = loading.with_(leave_out_missing=True)
        path = catalog.find(loading.model.name)
        card = None  # a loaded model has its own
        if memory is not None:
            card = ModelCard.of_files(path, loading.model.context, embeds=embeds)

        def limited() -> Config:
            most = memory() if memory is not None else None
            return again if most is None else again.with_(memory=most)

        if embeds:

            def embedder(progress: Progress) -> ServedEmbedder:
                opened = open_embedder(limited(), progress)
                self.terminal.tell_of(opened)
                return ServedEmbedder(opened)

            worker = EmbeddingWorker(
                None if memory is not None else ServedEmbedder(self.terminal.load_embedder(loading)),
                self.queue,
                embedder,
                self.terminal.warn,
                parallel=self.parallel,
                keep_alive=self.idle_s,
                card=card,
            )
            return EmbeddingHandler(
                worker, name or display_name(path), self.limits, aliases=aliases, on_request=self.on_request
            )

        def engine(progress: Progress) -> ServedModel:
            opened = open_engine(limited(), progress)
            self.terminal.tell_of(opened)
            return self._served(loading, opened)

        answering = EngineWorker(
            None if memory is not None else self._served(loading, self.terminal.load(loading)),
            self.queue,
            engine,
            self.terminal.warn,
            parallel=self.parallel,
            keep_alive=self.idle_s,
            card=card,
        )
        return CompletionHandler(
            answering,
            name or display_name(path),
            self.limits,
            aliases=aliases,
            on_request=self.on_request,
            on_prefill_progress=lambda progress: self.terminal.detail(f"Reading a prompt: {progress}."),
            system=self.system,
        )

    def offered(
        self, loading: Config, found: Sequence[FoundModel], responses: ResponseStore, aliases: Sequence[str]
    ) -> LoadedModels:
        """Models that are loaded when requests need them.

        Args:
            aliases: other names of one of them each, as NAME=MODEL.

        Raises:
            UsageError: there is no such model.
        """
        by_model: dict[str, list[str]] = {one.name: [] for one in found}
        for text in aliases:
            alias, _, name = text.partition("=")
            name = name or (found[0].name if len(found) == 1 else "")
            if not alias or name not in by_model:
                raise UsageError(
                    f"--alias {text} names none of the models, and several are served.",
                    f"Write NAME=MODEL, such as gpt-4o={found[0].name}.",
                )
            by_model[name].append(alias)
        models = [
            self._offered(loading.with_(model=one.model), one, responses, *by_model[one.name])
            for one in found
        ]
        return LoadedModels(models, FreeMemory.read().budget(loading.memory.limit), self.queue)

    def puller(
        self, loading: Config, models: LoadedModels, responses: ResponseStore
    ) -> Callable[[str, Progress], None]:
        """Downloads a model of a name and offers it to clients."""

        def pull(name: str, progress: Progress) -> None:
            wanted, known = catalog.hub_name_of(name), catalog.named(name)
            if wanted is not None:
                path = hub_pull(wanted, progress).path
            elif known is not None:  # in a package
                path = catalog.find(known[0].name)
            else:
                raise UsageError(
                    f"{name[:80]!r} is not the name of a model on the Hub.",
                    "Give a repository, such as ORG/NAME-GGUF:Q4_K_M, or a name of the catalog.",
                )
            if models.offers(name):  # by another request meanwhile
                return
            same = next((one for one in models.models if one.path == path), None)
            if same is not None:
                same.also_named(name)
                return
            there = {one.path: one for one in local_models(Hub.without_token())}
            found = FoundModel(there[path].name if path in there else name, str(path), path, size_of(path))
            models.models.append(self._offered(loading.with_(model=found.model), found, responses, name))

        return pull

    def _offered(
        self, loading: Config, found: FoundModel, responses: ResponseStore, *aliases: str
    ) -> OfferedModel:
        weights = found.n_bytes + _BESIDE

        def set_up(model: OfferedModel) -> Application:
            handler = self.handler(loading, found.name, model.names[1:], lambda: model.memory)
            header = read_header(catalog.find(found.model))
            model.needs = weights + handler.worker.card.context * cell_bytes(header, loading.model.kv)
            return Application(handler, responses=responses)

        names = dict.fromkeys((found.name, *aliases))
        shorter = (name.removesuffix(":latest") for name in names)
        return OfferedModel(tuple(dict.fromkeys((*names, *shorter))), weights, set_up, found.path)

    def _served(self, loading: Config, engine: Engine) -> ServedModel:
        chosen = self.sampling.chosen_for(loading, engine.target.model.path, default="recommended")
        sampled = sampling_in_words(chosen.config, chosen.sources)
        self.terminal.detail(f"Sampling, unless a request says otherwise: {sampled}.")
        self.terminal.thinking(engine, chosen.config)
        self.terminal.watch_prompt_cache(engine)
        return ServedModel(engine, chosen.config)
