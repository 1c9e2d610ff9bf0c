"""Plans for one target on one machine.

A plan follows from the configuration, a snapshot of the machine, the models' headers and what earlier runs
have measured. It takes no I/O beyond missing measurements, so the plan of `edgespec plan`, and those by which
drafters and numbers of sequences are compared, are the plans that a load would carry out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from edgespec.base.option import named
from edgespec.config import NONE, Config
from edgespec.costs.layer_assignment import curve_over_machines
from edgespec.costs.planned_weights import HitRates, PlannedWeights
from edgespec.costs.planner import TargetPasses
from edgespec.costs.sending import HostProducts
from edgespec.drafters.folder_index import MAKING_BYTES
from edgespec.errors import MemoryLimitError
from edgespec.images.facts import ProjectorFacts
from edgespec.measure.threads import planned_threads
from edgespec.models.gguf.footprint import USUAL_NODES, cells_for
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.adapters import Adapter
from edgespec.planning.devices.assignment import (
    LayerAssignment,
    LayerDevices,
    known_read_rate,
    read_rate,
)
from edgespec.planning.devices.card_placement import NO_CARDS, CardPlacement, place_models
from edgespec.planning.devices.cards import Cards
from edgespec.planning.devices.finding import PlacementRequest, open_cards
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.devices.workers import assign_to_workers
from edgespec.planning.draft_window import drafter_cells
from edgespec.planning.host_products import (
    copied_bytes,
    describe_host_products,
    host_layers,
    host_products,
)
from edgespec.planning.memory.budget import MemoryPlan, plan_memory
from edgespec.planning.memory.needs import MAX_PROMPT_ROWS, ContextShape, MemoryNeeds, PairSizes
from edgespec.planning.memory.rows import streamed_needs
from edgespec.planning.memory.stream_layout import wants_pack
from edgespec.planning.pack_folders import ONE_DISK, Disks, disks_of
from edgespec.planning.pass_costs import expected_prefill, passes_of
from edgespec.planning.plan import Plan, SequencePlan, device_parts
from edgespec.profiles.store import ProfileStore
from edgespec.speculation.growth import usual_limits
from edgespec.speculation.policies import policy_shape
from edgespec.speculation.sources.answers import ANSWERS_BYTES
from edgespec.speculation.tree import MAX_LEAVES
from edgespec.text.grammar.limits import index_bytes

_SHARED_STEP = 16  # rows of a draft step for several sequences where none were asked for
_REQUESTS_BYTES = 24 << 20  # what servers keep of the latest: responses, answers, schemas
_MAX_IDS = MAX_LEAVES - 1  # llama.cpp's most, but for one that keeps cells of sliding windows
_BESIDE_TREES = 8  # sequence ids for padding, for what is parked, and for sequences


@dataclass(frozen=True)
class Planner:
    """Plans for one target on one machine."""

    target: ModelFiles
    config: Config
    machine: MachineSnapshot
    store: ProfileStore  # what was measured on this machine
    beside: int = 0  # bytes of LoRA adapters
    projector: ProjectorFacts | None = None  # that will read images for sure; None leaves no memory for them
    measured: bool = False  # whether contexts are tried by dry runs, as when they are about to be loaded
    process_bytes: int | None = None  # of the process; None measures them where contexts are measured
    usual_nodes: int = USUAL_NODES  # nodes that trees may have if no other number is asked for
    # how many are to be answered at once, and their cells
    sequences: SequencePlan = field(default_factory=SequencePlan)

    @classmethod
    def of_this_machine(
        cls,
        target: ModelFiles,
        config: Config,
        request: PlacementRequest,
        *,
        adapters: Sequence[Adapter] = (),
        projector: ProjectorFacts | None = None,
        cards: Cards | None = None,
        workers: LayerDevices | None = None,
        measured: bool = False,
    ) -> Planner:
        """A planner for this machine as it is now.

        Args:
            request: with the threads to compute with, and what was measured on this machine.
            cards: other ones than are found here.
            workers: connected already; they keep layers off cards.

        Raises:
            UsageError, BackendError: as `open_cards`.
        """
        if cards is None:
            cards = open_cards(target, request)
        machine = MachineSnapshot.read(request.n_threads, cards, workers)
        beside = sum(adapter.header.file_bytes for adapter in adapters)
        return cls(
            target,
            config,
            machine,
            request.store,
            beside=beside,
            projector=projector,
            measured=measured,
        )

    @property
    def budget(self) -> int:
        """Bytes of this machine's memory that may be used."""
        return self.machine.free.budget(self.config.memory.limit)

    @cached_property
    def threads(self) -> int:
        """CPU threads of the passes that were measured: those asked for, or the fastest number."""
        return planned_threads(self.config.devices.threads, self.target.headers[0].fingerprint, self.store)

    @cached_property
    def hits(self) -> HitRates:
        """Hit rates of experts in memory, as far as they were measured."""
        known = self.store.experts(self.target.headers[0].fingerprint)
        return HitRates.measured_at(known.held, known.hit_rate) if known else HitRates()

    @cached_property
    def disks(self) -> Disks:
        """The disks of the folders that were named for packed layers, as far as these would be packed."""
        memory = self.config.memory
        if not memory.pack_dir or self.machine.no_streaming or not wants_pack(self.target, memory.pack):
            return ONE_DISK
        return disks_of(self.config, self.store)

    @cached_property
    def read_rate(self) -> float:
        """Bytes per second that the model's disk reads, or those of its packed layers together."""
        return self.disks.read_rate(self.store) or read_rate(self.target, self.store)

    def known_passes(self, *, streams: bool) -> TargetPasses | None:
        """Passes of the target; None if they were not measured yet."""
        profile = self.store.preferred_passes(
            self.target.headers[0].fingerprint, self.threads, streams=streams
        )
        if profile is None or (streams and not profile.on_disks(self.disks.n).read_rate):
            return None
        return passes_of(profile, streams=streams)

    @property
    def context(self) -> ContextShape:
        config = self.config
        parallel, tree = config.batching.parallel, config.speculation.tree_budget
        asked = max(tree or 0, parallel if isinstance(parallel, int) else 0, USUAL_NODES)
        nodes = max(asked, self.usual_nodes)
        return ContextShape(
            n_cells=cells_for(config.model.context, tree or 0) + self.sequences.more_cells,
            n_outputs=nodes,
            n_sequences=_sequence_ids(nodes),
            n_threads=self.machine.n_threads,
            kv=config.model.kv,
            # Most leaves of the largest trees are not expanded, and need none.
            drafter_sequences=_sequence_ids(asked),
            drafter_outputs=self._drafter_outputs(nodes, _sequence_ids(asked)),
            beside=self.beside + self._indexing,
            reading=0 if self.projector is None else self.projector.reading_bytes,
            answers=self.sequences.sequences or 1,
        )

    def _context_with(self, drafter: ModelFiles | None) -> ContextShape:
        """The sizes of contexts with a drafter, which need not have cells for whole texts."""
        if drafter is None:
            return self.context
        cells = drafter_cells(self.config, drafter) + self.sequences.more_cells
        return replace(self.context, drafter_cells=cells)

    def _drafter_outputs(self, nodes: int, sequences: int) -> int:
        """Rows of a draft step: those of a tree's, or one for each sequence where these share passes."""
        if self.config.batching.parallel is not None:
            return sequences
        options = self.config.speculation
        shape = policy_shape(options.tree)
        limits = shape.clamp(usual_limits(nodes), options.tree_depth, options.tree_width)
        return min(max(limits.width, _SHARED_STEP), sequences)

    @property
    def _indexing(self) -> int:
        """Bytes of the indexes of texts and answers to draft from, and of requests and their grammars."""
        speculation = self.config.speculation
        texts = 0 if speculation.draft_from is None else MAKING_BYTES
        texts += ANSWERS_BYTES if speculation.drafts_from_answers else 0
        if self.config.batching.parallel is None:  # requests have grammars, and a call seldom has
            return texts
        return texts + index_bytes(self.target.headers[0].n_vocab) + _REQUESTS_BYTES

    def plan(self, drafter: ModelFiles | None = None) -> Plan:
        """The plan for the target with a drafter, with the rows of a pass that suit the memory best.

        They are as many as there is room for beside all weights. Where even short passes leave some to be
        streamed, a prompt and its answer take the least time with them.

        Raises:
            MemoryLimitError, BackendError: as plan_memory; or a device has no room for what was asked for.
            ModelFileError: llama.cpp cannot load a model.
        """
        sizes = self.sizes(drafter)
        plan = self._in_memory(sizes, drafter) or self._streamed(sizes, drafter)
        needs = plan.needs
        if drafter is not None and needs.footprints[1].weights > needs.footprints[0].weights:
            name = drafter.headers[0].path.name
            note = f"The drafter {name} is larger than its target: it is unlikely to pay off."
            plan = replace(plan, notes=(note, *plan.notes))
        if self.projector is not None:
            plan = replace(plan, notes=(self.projector.reserved, *plan.notes))
        if self.config.memory.slots is not None and not plan.memory.holding.streamed_bytes:
            ignored = f"Ignored {named('slots')}: no layers are streamed."
            plan = replace(plan, warnings=(ignored, *plan.warnings))
        return plan

    def place(
        self,
        needs: MemoryNeeds,
        drafter: ModelFiles | None = None,
        *,
        budget: int | None = None,
    ) -> Plan:
        """Place weights that need so much.

        Args:
            needs: as if everything were on the processor.
            budget: another one than the planner's.

        Raises:
            MemoryLimitError, BackendError: as `plan`.
        """
        budget = self.budget if budget is None else budget
        planned = partial(
            Plan,
            self.config,
            self.target,
            drafter,
            self._context_with(drafter),
            needs,
            machine=self.machine,
            sequences=self.sequences,
        )
        notes: tuple[str, ...] = ()
        warnings: tuple[str, ...] = ()
        if self.machine.workers is not None:
            disk_rate = None if self.config.memory.offload == NONE else self.read_rate
            found = assign_to_workers(self.machine.workers, needs, self.target, budget, disk_rate)
            on_cards, left, notes = NO_CARDS, found.left(needs), (f"Layers: {found.where}.",)
            assignment: LayerAssignment | None = found
            if left.total <= budget:
                lent = self.machine.lent_bytes
                holding = PlannedWeights(budget + lent, needs.total, self.target.tensor_bytes)
                return planned(memory=MemoryPlan(budget, holding), assignment=assignment, notes=notes)
        else:
            on_cards, _ = self._on_cards(needs, drafter, budget)
            assignment, left = on_cards.assignment, on_cards.left(needs)
            notes, warnings = tuple(on_cards.notes), tuple(on_cards.shortfall(self._request))
        memory = plan_memory(
            left,
            self.target,
            budget,
            self.config,
            elsewhere=frozenset() if assignment is None else assignment.names,
            hits=self.hits,
            no_streaming=self.machine.no_streaming,
        )
        products = None
        if not memory.memory_map:
            spare = budget - left.total if memory.layout is None else 0
            products = self._products(on_cards, drafter, memory.holding, spare, needs.rows)
        if memory.layout is not None and products is not None:
            if not products.sends:
                products = None  # as without a card
            else:
                memory = replace(memory, weights=memory.layout.again(packed=False), pack="never")
        if products is not None:
            notes += (describe_host_products(products, streams=memory.holding.streamed_bytes > 0),)
        plan = planned(
            memory=memory,
            assignment=assignment,
            on_cards=on_cards,
            products=products,
            notes=notes + memory.notes,
            warnings=warnings + memory.warnings,
        )
        if not plan.rereads:
            return plan
        return replace(plan, needs=replace(needs, process=needs.process + self._rereading(on_cards)))

    def sizes(self, drafter: ModelFiles | None = None) -> PairSizes:
        """The needs of the target and a drafter by the rows of a pass; raises as PairSizes."""
        copied = self.config.memory.offload == NONE
        return PairSizes(
            self.target,
            drafter,
            self._context_with(drafter),
            measured=self.measured,
            copied=copied,
            process_bytes=self.process_bytes,
        )

    def needs(self, drafter: ModelFiles | None = None) -> MemoryNeeds:
        """The needs with passes of as few rows as any target can do with."""
        sizes = self.sizes(drafter)
        return sizes.at(sizes.context.fewest_rows)

    def _in_memory(self, sizes: PairSizes, drafter: ModelFiles | None) -> Plan | None:
        """The plan with the longest passes beside which no weights are streamed; None if some always are.

        Passes are shorter, too, so that there is memory for reading weights again.
        """
        if self.config.memory.offload == "stream":
            return None
        exact, found = self.config.speculation.exact, None
        for rows in reversed(sizes.rows):
            try:
                plan = self.place(sizes.at(rows), drafter)
            except MemoryLimitError:
                break
            if not plan.memory.in_memory or (found is not None and found.rereads and not plan.rereads):
                break
            found = plan
            # Exact passes that are padded have few rows, as reading weights is cheap.
            if exact and not (plan.alone and self.machine.own_kernels):
                break
        return found

    def _streamed(self, sizes: PairSizes, drafter: ModelFiles | None) -> Plan:
        """The plan with the fastest rows of a pass where weights are streamed; raises as `plan`."""
        if self.machine.workers is not None:
            return self.place(self._streamed_needs(sizes, self.budget, devices=True), drafter)
        needs = self._streamed_needs(sizes, self.budget)
        on_cards, products = self._on_cards(needs, drafter, self.budget)
        if on_cards.assignment is not None:
            budget = self.budget + on_cards.assignment.lent_bytes
            needs = self._streamed_needs(sizes, budget, devices=True, on_cards=on_cards, products=products)
        return self.place(needs, drafter)

    def _streamed_needs(
        self,
        sizes: PairSizes,
        budget: int,
        *,
        devices: bool = False,
        on_cards: CardPlacement = NO_CARDS,
        products: HostProducts | None = None,
    ) -> MemoryNeeds:
        """The needs with the rows of a pass that are the fastest where weights are streamed.

        Args:
            devices: layers are on devices.
            on_cards, products: as in a plan, as far as they are known.
        """
        prefill = expected_prefill(
            self.target,
            self.config.model.context,
            self.machine.n_threads,
            self.store,
            own_kernels=self.machine.own_kernels,
            disks=self.disks,
        )
        sends = products is not None and products.sends
        if sends:
            parts = device_parts(on_cards.assignment, on_cards.cards, self.target, products)
            compute = curve_over_machines(prefill.passes.compute, parts)
            prefill = replace(prefill, passes=replace(prefill.passes, compute=compute))
        return streamed_needs(sizes, self.target, budget, self.config, prefill, devices=devices, sends=sends)

    def _on_cards(
        self,
        needs: MemoryNeeds,
        drafter: ModelFiles | None,
        budget: int,
    ) -> tuple[CardPlacement, HostProducts | None]:
        """The parts of models on cards, and the products with the rest of the target's weights."""
        cards = self.machine.cards
        if cards is None:
            return NO_CARDS, None
        placed = place_models(cards, needs, self.target, drafter, budget, self._request)
        left = placed.left(needs)
        weights = left.footprints[0].weights
        streamed = min(max(left.total - budget, 0), weights)
        holding = PlannedWeights(budget, left.total, weights - streamed, streamed)
        products = self._products(placed, drafter, holding, budget - left.total, MAX_PROMPT_ROWS)
        if products is None or not products.sends:
            return placed, products
        target, *drafters = needs.footprints
        target = replace(target, buffers=target.buffers + copied_bytes(self.target))
        beside_copies = replace(needs, footprints=[target, *drafters])
        return place_models(cards, beside_copies, self.target, drafter, budget, self._request), products

    def _products(
        self,
        on_cards: CardPlacement,
        drafter: ModelFiles | None,
        holding: PlannedWeights,
        spare: int,
        rows: int,
    ) -> HostProducts | None:
        """The way of products with weights that are not on cards.

        Args:
            holding: the places of these weights.
            spare: bytes of memory that nothing else needs.
            rows: of the largest passes.
        """
        if on_cards.assignment is None or on_cards.cards is None:
            return None
        measured = known_read_rate(self.target, self.store) > 0
        choose = partial(
            host_products,
            on_cards.assignment,
            on_cards.cards,
            self.target,
            drafter,
            self.config,
            drafter_elsewhere=on_cards.drafter_card is not None,
            holding=holding,
            read_rate=self.read_rate,
            most=self.config.speculation.tree_budget or self.usual_nodes,
        )
        products = choose(rereads=measured and 0 < self._rereading(on_cards) <= spare)
        if products is not None and products.rereads and products.sent_from > rows:
            return choose(rereads=False)
        return products

    def _rereading(self, on_cards: CardPlacement) -> int:
        """Bytes of memory for reading weights again that are not on cards; 0 if all are there."""
        from edgespec.offload.reread import reread_bytes

        assert on_cards.assignment is not None
        layers = host_layers(self.target, on_cards.assignment)
        return reread_bytes(self.target, layers) if layers else 0

    @property
    def _request(self) -> PlacementRequest:
        return PlacementRequest(
            self.config.devices,
            self.machine.n_threads,
            self.store,
            read_rate=self.read_rate,
        )


def _sequence_ids(nodes: int) -> int:
    """Sequence ids for sequences and the branches of trees; each costs a row of logits, used or not."""
    return min(nodes + _BESIDE_TREES, _MAX_IDS) if nodes > USUAL_NODES else USUAL_NODES
