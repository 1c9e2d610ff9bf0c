"""The engines that answer a batch: one on this machine, or those of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

from edgespec.cli.batch.answering import BatchEngine
from edgespec.cli.origin import ModelIdentity, model_identity
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import Config


class LoadedEngine(NamedTuple):
    """An engine that is ready, and which model it has."""

    engine: BatchEngine
    model: ModelIdentity


class EngineLoader(Protocol):
    """Loads what answers a batch."""

    def __call__(self, loading: Config, terminal: Terminal) -> AbstractContextManager[LoadedEngine]:
        """Load it for the time of the block."""


@contextmanager
def load_here(loading: Config, terminal: Terminal) -> Iterator[LoadedEngine]:
    """Load an engine on this machine."""
    with terminal.load(loading) as engine:
        yield LoadedEngine(engine, model_identity(loading.model))


def load_on_cluster(address: str) -> EngineLoader:
    """A loader of engines on the nodes of a Ray cluster.

    Args:
        address: what `--ray` says.

    Raises:
        UsageError: it is no address.
    """
    from edgespec.cli.batch.cluster.address import RayAddress

    where = RayAddress.parse(address)

    @contextmanager
    def load(loading: Config, terminal: Terminal) -> Iterator[LoadedEngine]:
        from edgespec.cli.batch.cluster.engine import cluster_engine

        with cluster_engine(where, loading, terminal) as engine:
            yield LoadedEngine(engine, engine.facts.model)

    return load
