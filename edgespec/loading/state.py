"""The state that the steps of loading share, and the undoing of a load that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from edgespec.base.option import named
from edgespec.base.progress import Progress
from edgespec.base.units import readable
from edgespec.config import Config, ModelConfig
from edgespec.errors import MemoryLimitError
from edgespec.llama.first_layers import FirstLayers
from edgespec.llama.runtime.abort import AbortFlag
from edgespec.llama.runtime.model import Closable, Model
from edgespec.machine.cores import default_threads
from edgespec.planning.adapters import Adapter
from edgespec.planning.plan import Plan
from edgespec.profiles.store import ProfileStore

if TYPE_CHECKING:
    from edgespec.workers.pool import WorkerPool

Opened = TypeVar("Opened", bound=Closable)


class LoadState:
    """The state of one load.

    Attributes:
        abort: ends the decodes of everything that is loaded.
        notes: what a person might wonder about, in plain sentences.
        store: what was measured on this machine.
        n_threads: CPU threads to compute with.
        plan: what is being carried out; None before it is made.
        adapters: LoRA adapters of the target.
        workers: the workers that may hold layers of the target.
        warnings: what people should know at once.
        drafter: the model that drafts, if it was loaded before the target was ready.
        first_layers: of a streamed target, for passes that cost little; None before it is open.
    """

    def __init__(self, config: Config, on_progress: Progress) -> None:
        self.config = config
        self.on_progress = on_progress
        self.abort = AbortFlag()
        self.notes: list[str] = []
        self.store = ProfileStore()
        self.n_threads = config.devices.threads or default_threads()
        self.plan: Plan | None = None
        self.adapters: list[Adapter] = []
        self.workers: WorkerPool | None = None
        self.warnings: list[str] = []
        self.drafter: Model | None = None
        self.first_layers: FirstLayers | None = None
        self._opened: list[Closable] = []

    def register(self, opened: Opened) -> Opened:
        """Close this if a later step fails."""
        self._opened.append(opened)
        return opened

    @contextmanager
    def undone_on_memory_limit(self) -> Iterator[None]:
        """Close all that the block has opened and take back its notes if memory runs out in it."""
        opened, noted, warned = len(self._opened), len(self.notes), len(self.warnings)
        try:
            yield
        except MemoryLimitError:
            for late in reversed(self._opened[opened:]):
                late.close()
            del self._opened[opened:], self.notes[noted:], self.warnings[warned:]
            raise

    @property
    def variant(self) -> str:
        """A mark that sets the target apart from the file alone, for keys of caches; usually empty."""
        kv = self.config.model.kv
        parts = [f"kv={kv}"] if kv != ModelConfig().kv else []
        parts += [f"lora={a.header.fingerprint}:{a.scale:g}" for a in self.adapters]
        return "".join(f" {part}" for part in parts)

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Close all that the block has opened, latest first, if it raises."""
        try:
            yield
        except BaseException as error:
            for opened in reversed(self._opened):
                opened.close()
            if isinstance(error, MemoryLimitError) and not error.hint and self.plan is not None:
                raise _with_figures(error, self.plan) from error
            raise


def _with_figures(error: MemoryLimitError, plan: Plan) -> MemoryLimitError:
    return MemoryLimitError(
        f"{error.what} About {readable(plan.needs.total)} are needed, and "
        f"{readable(plan.machine.free.available)} are available, unless the process has a lower limit.",
        f"Lower {named('context')} or {named('tree_budget')}, close other programs, or use a smaller model.",
    )
