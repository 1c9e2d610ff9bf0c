"""The plan of a load: where every layer will be, what that takes, and why. `load` carries it out.

It follows from the configuration, a snapshot of the machine, the models' headers and what earlier runs have
measured. A plan does no I/O beyond missing measurements, so the plan of `edgespec plan`, and those by which
drafters and numbers of sequences are compared, are the plans that a load would carry out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from edgespec.base.option import named
from edgespec.config import NONE, Config
from edgespec.costs.curves import Curve
from edgespec.costs.layer_assignment import RemotePart, curve_over_machines
from edgespec.costs.planned_weights import HitRates, PlannedWeights
from edgespec.costs.planner import TargetPasses
from edgespec.costs.sending import HostProducts
from edgespec.drafters.folder_index import MAKING_BYTES
from edgespec.errors import MemoryLimitError
from edgespec.generation.result import MemoryUse
from edgespec.images.facts import ProjectorFacts
from edgespec.llama.runtime.model import Model
from edgespec.measure.threads import planned_threads
from edgespec.models.gguf.footprint import USUAL_NODES, cells_for
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.planning.adapters import Adapter
from edgespec.planning.devices.assignment import (
    LayerAssignment,
    LayerDevices,
    known_read_rate,
    read_rate,
    remote_parts,
)
from edgespec.planning.devices.card_placement import NO_CARDS, CardPlacement, drafter_parts, place_models
from edgespec.planning.devices.cards import Cards
from edgespec.planning.devices.finding import PlacementRequest, describe, open_cards
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
from edgespec.planning.memory.rows import needs_within
from edgespec.planning.memory.stream_layout import StreamLayout, wants_pack
from edgespec.planning.pack_folders import ONE_DISK, Disks, disks_of
from edgespec.planning.pass_costs import expected_prefill, passes_of
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
class SequencePlan:
    """The number of sequences answered at once."""

    sequences: int | None = None  # how many, where a call does not say; None leaves it to the passes' costs
    more_cells: int = 0  # cells of the cache besides those for a single sequence
    note: str = field(default="", compare=False)  # what that takes, in a sentence


@dataclass(frozen=True)
class Plan:
    """The places of the weights of a target and its drafter, and the memory that these take.

    Attributes:
        config: the options that it is for.
        target, drafter: the models; no drafter if it has no model.
        context: the sizes of their contexts: cells, rows with logits, sequences, threads.
        needs: as if everything were on the processor, with the rows of a pass.
        memory: what of this machine's memory holds the target, and what is streamed.
        machine: that this is a plan for.
        assignment: which layers are on cards or workers; None if none are.
        on_cards: what is on cards.
        products: with weights that no card holds; None if these are computed as without one.
        sequences: how many are answered at once.
        notes, warnings: the reasons, in sentences.
    """

    config: Config
    target: ModelFiles
    drafter: ModelFiles | None
    context: ContextShape
    needs: MemoryNeeds
    memory: MemoryPlan
    machine: MachineSnapshot
    assignment: LayerAssignment | None = None
    on_cards: CardPlacement = NO_CARDS
    products: HostProducts | None = None
    sequences: SequencePlan = SequencePlan()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def holding(self) -> PlannedWeights:
        """The places of the target's weights, in bytes."""
        return self.memory.holding

    @property
    def drafter_tables(self) -> int:
        """Bytes of the drafter's tables that are left in its file."""
        on_card = bool(self.on_cards.drafter_name)
        return 0 if self.memory.layout is None or on_card else self.needs.drafter_tables

    @property
    def drafts_for_itself(self) -> bool:
        """True if the target's own layers for multi-token prediction draft."""
        return isinstance(self.drafter, MTPLayers)

    @property
    def streams(self) -> bool:
        """True if passes read weights from disk."""
        return self.holding.streamed_bytes > 0

    @property
    def exact(self) -> bool:
        """Exactness of decoding: as asked for, or else where the weights are streamed.

        A streamed pass takes the same time with the rows that exactness adds. But where only the experts that
        rows need are read, a pass over few rows takes about as long as its arithmetic. And a card that is
        sent weights for many rows rounds differently than the processor, which computes few.
        """
        asked, layout = self.config.speculation.exact, self.memory.layout
        costs_nothing = layout is not None and not layout.weights.experts and not self.sends
        return costs_nothing if asked is None else asked

    @property
    def sends(self) -> bool:
        """True if passes of many rows send weights to a card."""
        return self.products is not None and self.products.sends

    @property
    def alone(self) -> bool:
        """True if this machine's processor computes all layers: other devices cannot be watched."""
        return self.assignment is None and self.machine.workers is None

    @property
    def times_threads(self) -> bool:
        """True if passes over random text are to find the fastest number of threads, where that is asked.

        They would fill the memory for experts with those that no real text needs. And what they take on
        devices and other machines says nothing of the processor.
        """
        speculation = self.config.speculation
        sizes_trees = speculation.drafts and speculation.tree_budget is None
        return sizes_trees and self.holding.experts is None and self.assignment is None

    @property
    def kernels(self) -> str:
        """The kernel layout, as used in profile keys."""
        return "plain" if self.memory.kernels_differ or not self.rearranges else "packed"

    @property
    def rearranges(self) -> bool:
        """True if weights in memory are rearranged for the processor, where it has kernels for that."""
        return not self.memory.paged and (self.products is None or self.products.rearranged)

    @property
    def places(self) -> str:
        """The places of layers, for keys; empty if all are on the processor."""
        if self.assignment is None:
            return ""
        products, sent = self.products, ""
        if products is not None and (products.sends or not self.rearranges):
            sent = f" {'read again' if products.rereads else 'sent'} from {products.sent_from}"
        return f" layers={self.assignment.key}{sent}"

    @property
    def rereads(self) -> bool:
        """True if weights in memory are read from the model's file again, to be sent for prompts."""
        return self.products is not None and self.products.rereads

    def with_layout(self, layout: StreamLayout) -> Plan:
        """The plan with other places of streamed weights."""
        return replace(self, memory=replace(self.memory, weights=layout))

    def use(self, model: Model) -> MemoryUse:
        """Memory of the loaded target, for reports."""
        footprints, layout = self.needs.footprints, self.memory.layout
        use = MemoryUse(
            budget_bytes=self.memory.budget,
            resident_bytes=sum(f.weights for f in footprints),
            target_bytes=footprints[0].weights,
        )
        use.device_bytes = self.on_cards.drafter_bytes
        cards = self.machine.cards
        use.devices = () if cards is None else tuple(map(describe, cards.devices))
        if self.assignment is not None:
            use.device_bytes += self.assignment.lent_bytes
            use.layers = self.assignment.where
        use.resident_bytes -= use.device_bytes
        if layout is not None and model.weights.resident_bytes:
            drafter = sum(f.weights for f in footprints[1:]) - self.on_cards.drafter_bytes
            drafter -= self.drafter_tables
            use.resident_bytes = layout.other_bytes + model.weights.resident_bytes + drafter
            use.streamed_bytes_per_pass = model.weights.streamed_bytes
        return use

    @property
    def parts(self) -> list[RemotePart]:
        """Time per pass on each device that holds layers."""
        return _parts(self.assignment, self._devices, self.target, self.products)

    @property
    def _devices(self) -> LayerDevices | Cards | None:
        """The workers or cards that may hold layers; None if there are none."""
        return self.machine.workers or self.on_cards.cards

    def over(self, passes: TargetPasses) -> TargetPasses:
        """The target's passes, from those of the whole model on the processor."""
        return replace(passes, compute=curve_over_machines(passes.compute, self.parts))

    def draft_steps(self, here: Curve) -> Curve:
        """Seconds of draft steps by rows, from those on the processor."""
        parts = () if self.drafter is None else drafter_parts(self.on_cards, self.drafter)
        return curve_over_machines(here, parts)


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
    sequences: SequencePlan = SequencePlan()  # how many are to be answered at once, and their cells

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
        """The sizes of contexts."""
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

        Raises:
            MemoryLimitError, BackendError: as plan_memory; or a device has no room for what was asked for.
            ModelFileError: llama.cpp cannot load a model.
        """
        sizes = self.sizes(drafter)
        needs = self._within(sizes, self.budget + self.machine.lent_bytes)
        if self.machine.workers is not None:
            try:
                plan = self.place(needs, drafter)
            except MemoryLimitError:
                plan = None
            if plan is None or not plan.memory.in_memory:
                # Passes get fewer rows first; what is left over is streamed then.
                plan = self.place(self._within(sizes, self.budget, devices=True), drafter)
        else:
            plan = self._plan_with_cards(sizes, needs, drafter)
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
        on_cards: CardPlacement | None = None,
    ) -> Plan:
        """Place weights that need so much.

        Args:
            needs: as if everything were on the processor.
            budget: another one than the planner's.
            on_cards: what is on cards, if that is decided already.

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
            on_cards = on_cards or self._on_cards(needs, drafter, budget)[0]
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

    def _within(
        self,
        sizes: PairSizes,
        budget: int,
        *,
        devices: bool = False,
        on_cards: CardPlacement = NO_CARDS,
        products: HostProducts | None = None,
    ) -> MemoryNeeds:
        """The needs with the rows of a pass that suit the budget best.

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
            parts = _parts(on_cards.assignment, on_cards.cards, self.target, products)
            compute = curve_over_machines(prefill.passes.compute, parts)
            prefill = replace(prefill, passes=replace(prefill.passes, compute=compute))
        return needs_within(sizes, self.target, budget, self.config, prefill, devices=devices, sends=sends)

    def _plan_with_cards(self, sizes: PairSizes, needs: MemoryNeeds, drafter: ModelFiles | None) -> Plan:
        """The plan for a machine that may have cards; raises as `plan`."""
        try:
            plan = self._sized_for_cards(sizes, needs, drafter)
        except MemoryLimitError:
            if (shorter := self._in_memory(sizes, drafter)) is None:
                raise
            return shorter
        return plan if plan.memory.in_memory else self._in_memory(sizes, drafter) or plan

    def _sized_for_cards(self, sizes: PairSizes, needs: MemoryNeeds, drafter: ModelFiles | None) -> Plan:
        """The plan with the rows of a pass that suit the first placement best."""
        on_cards, products = self._on_cards(needs, drafter, self.budget, sizes)
        if on_cards.assignment is not None:  # exact passes are shorter then
            needs = self._beside_cards(sizes, on_cards, products)
        if products is not None and products.sends:  # and others may be longer
            on_cards, _ = self._on_cards(needs, drafter, self.budget)
        return self.place(needs, drafter, on_cards=on_cards)

    def _in_memory(self, sizes: PairSizes, drafter: ModelFiles | None) -> Plan | None:
        """The plan with the longest passes beside which all weights are in memory and on cards.

        Buffers for long passes may keep layers off a card, which memory has no room for then.
        """
        if self.machine.cards is None or self.config.memory.offload not in ("auto", NONE):
            return None
        found = None
        exact = self.config.speculation.exact  # whose passes are not longer, as in `needs_within`
        for rows in [sizes.context.fewest_rows] if exact else reversed(sizes.rows):
            try:
                plan = self.place(sizes.at(rows), drafter)
            except MemoryLimitError:
                break
            if not plan.memory.in_memory:
                break
            found = plan
        return found

    def _beside_cards(
        self, sizes: PairSizes, on_cards: CardPlacement, products: HostProducts | None
    ) -> MemoryNeeds:
        """The needs with the rows of a pass that suit the memory beside cards best."""
        assert on_cards.assignment is not None
        budget = self.budget + on_cards.assignment.lent_bytes
        within = partial(self._within, sizes, devices=True)
        if products is None or not products.rereads:
            return within(budget, on_cards=on_cards, products=products)
        needs = within(budget - self._rereading(on_cards), on_cards=on_cards, products=products)
        if needs.rows < products.sent_from:  # no pass would read weights again
            return within(budget)
        return needs

    def _on_cards(
        self,
        needs: MemoryNeeds,
        drafter: ModelFiles | None,
        budget: int,
        sizes: PairSizes | None = None,
    ) -> tuple[CardPlacement, HostProducts | None]:
        """The parts of models on cards, and the products with the rest of the target's weights.

        Args:
            sizes: of the pair, if passes may have fewer rows.
        """
        cards = self.machine.cards
        if cards is None:
            return NO_CARDS, None
        placed = place_models(cards, needs, self.target, drafter, budget, self._request)
        left = placed.left(needs)
        weights = left.footprints[0].weights
        streamed = min(max(left.total - budget, 0), weights)
        holding = PlannedWeights(budget, left.total, weights - streamed, streamed)
        least = needs if sizes is None else sizes.at(sizes.context.fewest_rows)
        spare = budget - placed.left(least).total
        products = self._products(placed, drafter, holding, spare, MAX_PROMPT_ROWS)
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


def _parts(
    assignment: LayerAssignment | None,
    devices: LayerDevices | Cards | None,
    target: ModelFiles,
    products: HostProducts | None,
) -> list[RemotePart]:
    """Time per pass on each device that holds layers, and of products that are not computed as usual."""
    if assignment is None or devices is None:
        return []
    parts = remote_parts(assignment, devices, target)
    if products is not None:
        parts.append(products.part(1 - sum(part.share for part in parts)))
    return parts


def _sequence_ids(nodes: int) -> int:
    """Sequence ids for sequences and the branches of trees; each costs a row of logits, used or not."""
    return min(nodes + _BESIDE_TREES, _MAX_IDS) if nodes > USUAL_NODES else USUAL_NODES
