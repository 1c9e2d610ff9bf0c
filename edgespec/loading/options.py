"""The options of loading, checked before any file is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.arguments import shown
from edgespec.drafters.kinds import DRAFTER_KINDS, NO_DRAFTER
from edgespec.errors import UsageError
from edgespec.models.gguf.footprint import CACHE_BLOCK, CACHE_TYPES, SPARE_CELLS, USUAL_NODES, head_sizes
from edgespec.models.gguf.types import GGUFHeader
from edgespec.offload.planning.budget import MemoryOptions
from edgespec.offload.planning.stream_plan import EXPERT_MODES
from edgespec.speculation.policies import tree_policy

DEFAULT_KV = "f16"
_NO_MODEL = ("auto", NO_DRAFTER, "lookup")  # values of `draft` that name no file


@dataclass(frozen=True)
class LoadOptions:
    """What `load` was asked for; its docstring says what each option means.

    Attributes:
        kind: of drafter: "model", "lookup" or "merged"; None leaves it to `draft`.
        threads: None takes the default, or what was measured to be faster.
        more_cells: cells for texts beside a single one; planned while loading.
        leave_out_missing: of the workers, use those that answer.
        device: names of the devices that may hold layers; empty for all.
        draft_device: "auto", "none" or the name of a device.
        usual_nodes: nodes that trees may have if no other number is asked for; planned while loading.
    """

    draft: str
    kind: str | None
    context: int
    threads: int | None
    memory: int | None
    tree: str
    tree_budget: int | None
    tree_depth: int | None
    tree_width: int | None
    exact: bool | None
    gpu_layers: int | str
    offload: str
    pack: str
    slots: int | None
    kv: str = DEFAULT_KV
    lora: tuple[str, ...] = ()
    parallel: int | str | None = None
    text_tokens: int | None = None
    more_cells: int = 0
    experts: str = "auto"
    draft_from: Path | None = None
    learn: bool = True
    workers: tuple[str, ...] = ()
    leave_out_missing: bool = False
    device: tuple[str, ...] = ()
    draft_device: str = "auto"
    usual_nodes: int = USUAL_NODES

    @property
    def for_memory(self) -> MemoryOptions:
        """What planning memory depends on."""
        return MemoryOptions(self.memory, self.offload, self.pack, self.context, self.slots, self.experts)

    @property
    def n_nodes(self) -> int:
        """Most rows of a pass that want logits: the nodes of the largest tree, or one for each text."""
        return max(self.asked_nodes, self.usual_nodes)

    @property
    def asked_nodes(self) -> int:
        """The same, but for what memory and measurements allow beyond the usual."""
        texts = self.parallel if isinstance(self.parallel, int) else 0
        return max(self.tree_budget or 0, texts, USUAL_NODES)

    @property
    def n_cells(self) -> int:
        """Cells of the cache: for the texts, and for the trees after them."""
        return self.cells_alone + self.more_cells

    @property
    def cells_alone(self) -> int:
        """Cells for a single text and its tree."""
        return self.context + SPARE_CELLS + (self.tree_budget or 0)

    @property
    def names_a_model(self) -> bool:
        """Whether `draft` is the name or path of a model."""
        return self.draft not in _NO_MODEL

    @property
    def may_use_a_model(self) -> bool:
        """Whether the kind of drafter that was asked for is, or may be, a model."""
        return self.kind is None or DRAFTER_KINDS[self.kind].model

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            UsageError: an option is out of its range.
        """
        _require(16 <= self.context <= 10_000_000, "context", self.context, "from 16 to 10000000")
        threads = self.threads
        _require(threads is None or 1 <= threads <= 1024, "threads", threads, "from 1 to 1024")
        _require(self.memory is None or 0 < self.memory < 2**63, "memory", self.memory, "above 0")
        budget = self.tree_budget
        _require(budget is None or 1 <= budget <= 4096, "tree budget", budget, "from 1 to 4096")
        for name, value in (("tree depth", self.tree_depth), ("tree width", self.tree_width)):
            _require(value is None or 1 <= value <= 4096, name, value, "from 1 to 4096")
        tree_policy(self.tree)
        layers = self.gpu_layers
        fine = 0 <= layers < 2**31 if isinstance(layers, int) else layers in ("auto", "all")
        _require(fine, "number of gpu layers", layers, "0 or more, auto or all")
        ways = ("auto", "stream", "mmap", "none")
        _require(self.offload in ways, "offload", self.offload, "auto, stream, mmap or none")
        _require(self.pack in ("auto", "always", "never"), "pack", self.pack, "auto, always or never")
        types = " or ".join(CACHE_TYPES)
        _require(self.kv in CACHE_TYPES, "type of keys and values", self.kv, types)
        _require(self.experts in EXPERT_MODES, "experts", self.experts, "auto or never")
        slots = self.slots
        _require(slots is None or 2 <= slots <= 4096, "number of slots", slots, "from 2 to 4096")
        parallel = self.parallel
        fine = parallel in (None, "auto") or (isinstance(parallel, int) and 1 <= parallel <= 1000)
        _require(fine, "number of parallel texts", parallel, "from 1 to 1000, or auto")
        tokens = self.text_tokens
        most = 10_000_000
        fine = tokens is None or 1 <= tokens <= most
        _require(fine, "number of tokens of a text", tokens, f"from 1 to {most}")
        self._check_workers()

    def require_exact_budget(self, most: int) -> None:
        """Refuse larger trees than exact decoding allows, if both were asked for.

        Args:
            most: rows of an exact pass.

        Raises:
            UsageError: that is the case.
        """
        if self.exact and self.tree_budget is not None and self.tree_budget > most:
            raise UsageError(
                f"The tree budget is {self.tree_budget}, and exact decoding allows {most} with this model "
                "here.",
                f"Ask for --tree-budget {most} or less, or for --no-exact.",
            )

    def _check_workers(self) -> None:
        if not self.workers:
            return
        if self.offload in ("stream", "mmap"):
            raise UsageError(
                f"--offload {self.offload} and workers do not go together.",
                "Leave out one of them: what no machine's memory holds is streamed in any case.",
            )
        if self.gpu_layers not in (0, "auto") or self.draft_device not in ("auto", "none"):
            raise UsageError(
                "This machine's GPU layers and workers do not go together.",
                "Leave out --gpu-layers and --draft-device, or have 'edgespec worker' here lend the card.",
            )

    def check_cache(self, header: GGUFHeader) -> None:
        """Refuse a cache type that the target's heads do not fit; raises as `check_cache`."""
        check_cache(self.kv, header)

    def check_drafter(self) -> None:
        """Refuse a kind of drafter that contradicts its name.

        Raises:
            UsageError: it does, or there is no such kind.
        """
        kind, draft = self.kind, self.draft
        if self.draft_from is not None and (draft == NO_DRAFTER or kind == "model"):
            raise UsageError(
                "Files to draft from were named, and this drafter does not use them.",
                f"Leave out --draft-from, or {'--draft none' if draft == NO_DRAFTER else '--drafter model'}.",
            )
        if kind is None:
            return
        if kind not in DRAFTER_KINDS or kind == NO_DRAFTER:
            raise UsageError(f"There is no drafter kind '{kind}'.", "The kinds are model, lookup and merged.")
        if not DRAFTER_KINDS[kind].model and self.names_a_model:
            raise UsageError("The lookup drafter needs no model.", "Leave out --draft, or --drafter lookup.")
        if DRAFTER_KINDS[kind].model and draft in (NO_DRAFTER, "lookup"):
            raise UsageError(f"The {kind} drafter needs a model.", "Name it with --draft PATH.")


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        shown_value = value if isinstance(value, str) else shown(value)
        raise UsageError(f"The {name} is {shown_value}.", f"It must be {wanted}.")


def check_cache(kv: str, header: GGUFHeader) -> None:
    """Refuse a type of cached keys and values that there is not, or that a model's heads do not fit.

    Raises:
        UsageError: that is the case.
    """
    _require(kv in CACHE_TYPES, "type of keys and values", kv, " or ".join(CACHE_TYPES))
    sizes = head_sizes(header)
    if kv != DEFAULT_KV and any(size % CACHE_BLOCK for size in sizes):
        raise UsageError(
            f"{header.path.name} has heads of {max(sizes)} elements, and {kv} stores {CACHE_BLOCK} together.",
            f"Leave out --kv, or take --kv {DEFAULT_KV}.",
        )
