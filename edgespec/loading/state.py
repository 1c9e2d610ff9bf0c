"""What the steps of loading share, and how a load that fails is undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from edgespec.config import Config, ModelConfig
from edgespec.errors import MemoryLimitError
from edgespec.loading.adapters import Adapter
from edgespec.loading.devices.cards import Cards
from edgespec.loading.devices.finding import CardRequest
from edgespec.loading.devices.placing import Wish
from edgespec.machine.cores import default_threads
from edgespec.machine.probe import available_memory
from edgespec.models.gguf.footprint import SPARE_CELLS, USUAL_NODES
from edgespec.models.llama.first_layers import FirstLayers
from edgespec.models.llama.runtime.abort import AbortFlag
from edgespec.models.llama.runtime.model import Model
from edgespec.progress import Progress
from edgespec.speculation.tree import MAX_LEAVES
from edgespec.units import readable
from edgespec.workers.crew import Crew

_BESIDE_TREES = 8  # sequence ids for padding, for what is parked, and for texts


class Closable(Protocol):
    """A model, a context, or a process that renders templates."""

    def close(self) -> None: ...


Opened = TypeVar("Opened", bound=Closable)


class LoadState:
    """The state of one load.

    Attributes:
        abort: ends the decodes of everything that is loaded.
        notes: what a person might wonder about, in plain sentences.
        n_threads: CPU threads to compute with.
        usual_nodes: nodes that trees may have if no other number is asked for.
        more_cells: cells for texts beside a single one.
        needed_bytes: of memory, for everything; 0 until it is known.
        adapters: LoRA adapters of the target.
        crew: the workers that may hold layers of the target.
        cards: this machine's devices that may hold layers.
        most_on_devices: layers that may be on them, after a load has run out of their memory; None for any.
        warnings: what people should know at once.
        first_layers: of a streamed target, for passes that cost little; None before it is open.
    """

    def __init__(self, config: Config, on_progress: Progress) -> None:
        self.config = config
        self.on_progress = on_progress
        self.abort = AbortFlag()
        self.notes: list[str] = []
        self.n_threads = config.devices.threads or default_threads()
        self.usual_nodes = USUAL_NODES
        self.more_cells = 0
        self.needed_bytes = 0
        self.adapters: list[Adapter] = []
        self.crew: Crew | None = None
        self.cards: Cards | None = None
        self.most_on_devices: int | None = None
        self.warnings: list[str] = []
        self.first_layers: FirstLayers | None = None
        self._opened: list[Closable] = []

    def keep(self, opened: Opened) -> Opened:
        """Have this closed if a later step fails."""
        self._opened.append(opened)
        return opened

    @property
    def card_request(self) -> CardRequest:
        """The devices of this machine to use."""
        devices = self.config.devices
        return CardRequest(
            devices.layers_here,
            devices.names,
            self.n_threads,
            devices.drafter_here,
            self.on_progress,
            self.notes,
        )

    @property
    def wish(self) -> Wish:
        """The requested device placement."""
        request = self.card_request
        return Wish(request.layers, drafter=request.drafter)

    @contextmanager
    def undone_on_memory_limit(self) -> Iterator[None]:
        """If memory runs out in the block, close what it has opened, and take back its notes."""
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
        """What sets the target apart from the file alone, for keys of what is remembered; usually empty."""
        kv = self.config.model.kv
        parts = [f"kv={kv}"] if kv != ModelConfig().kv else []
        parts += [f"lora={a.header.fingerprint}:{a.scale:g}" for a in self.adapters]
        return "".join(f" {part}" for part in parts)

    @property
    def n_nodes(self) -> int:
        """Most rows of a pass that want logits: the nodes of the largest tree, or one for each text."""
        return max(self.asked_nodes, self.usual_nodes)

    @property
    def asked_nodes(self) -> int:
        """The rows that want logits, but for what memory and measurements allow beyond the usual."""
        parallel, budget = self.config.batching.parallel, self.config.speculation.tree_budget
        return max(budget or 0, parallel if isinstance(parallel, int) else 0, USUAL_NODES)

    @property
    def n_cells(self) -> int:
        """Cells of the cache: for the texts, and for the trees after them."""
        return self.cells_alone + self.more_cells

    @property
    def cells_alone(self) -> int:
        """Cells for a single text and its tree."""
        return self.config.model.context + SPARE_CELLS + (self.config.speculation.tree_budget or 0)

    def n_sequences(self, model: Model | None = None) -> int:
        """Sequence ids for texts and the branches of trees; each costs a row of logits, used or not."""
        if model is not None and model.keeps_recurrent_state:
            return 1
        return _sequences(self.n_nodes)

    def drafter_sequences(self, model: Model | None = None) -> int:
        """Sequence ids of a drafter: most leaves of the largest trees are not expanded, and need none."""
        if model is not None and model.keeps_recurrent_state:
            return 1
        return _sequences(self.asked_nodes)

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """If the block raises, close what it has opened, the latest first.

        Raises:
            MemoryLimitError: with how much memory is needed, which llama.cpp does not say.
        """
        try:
            yield
        except BaseException as error:
            for opened in reversed(self._opened):
                opened.close()
            if isinstance(error, MemoryLimitError) and not error.hint:
                raise self._with_figures(error) from error
            raise

    def _with_figures(self, error: MemoryLimitError) -> MemoryLimitError:
        return MemoryLimitError(
            f"{error.what} About {readable(self.needed_bytes)} are needed, and "
            f"{readable(available_memory())} are available, unless the process has a lower limit.",
            "Ask for a smaller --context or --tree-budget, close other programs, or take a smaller model.",
        )


def _sequences(nodes: int) -> int:
    return min(nodes + _BESIDE_TREES, MAX_LEAVES) if nodes > USUAL_NODES else USUAL_NODES
