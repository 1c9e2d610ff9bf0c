"""The weights that a budget keeps in memory, and those that are streamed: arithmetic over sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from edgespec.config import Config
from edgespec.costs.planned_weights import HitRates, PlannedExperts, PlannedWeights
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.llama.runtime.vetting import reading_order
from edgespec.models.gguf.experts import LayerWeights, layer_weights
from edgespec.models.gguf.layers import ModelFiles, kind_of
from edgespec.models.gguf.parts import split_layers
from edgespec.offload.layout import EXPERT_PIECE_BYTES, PART_BYTES, plain_store
from edgespec.offload.packing.pack import gains_from_packing, packed_layer, record_places
from edgespec.planning.memory.needs import MemoryNeeds, tied_bytes
from edgespec.planning.memory.placement import LayerPlacement, PoolSizes, place, place_with_experts

# Beside each expert in memory, kernels keep the rows that it is multiplied by: an entry for each choice that
# the rows of a pass can make, and a few counters.
_CHOICE_BYTES, _COUNTER_BYTES = 8, 80
_READ_BYTES = 512  # to remember a part of an expert that was read, and its checksum


@dataclass(frozen=True)
class StreamLayout:
    """The places of a model's weights, some of whose layers may be streamed."""

    files: ModelFiles  # the model
    elsewhere: Collection[str]  # names of weights that devices hold
    needs: MemoryNeeds  # what target and drafter take with all weights in memory
    budget: int  # bytes that may be used in total
    config: Config  # slots and experts, as for loading
    hits: HitRates  # how often experts are in memory
    packed: bool  # whether layers are read from a packed file
    pack_bytes: int  # memory that the packed file takes, where its folder lies in memory
    weights: LayerWeights  # of the layers, with single experts apart if these are streamed
    layer_bytes: Mapping[int, int]  # memory of each layer, by its number
    placement: LayerPlacement  # which layers are resident
    other_bytes: int  # memory for the weights outside the layers, without tables that are left in the file
    fixed_bytes: int  # memory of everything but layers and single experts
    holding: PlannedWeights  # the sums of all that

    @classmethod
    def of(
        cls,
        files: ModelFiles,
        needs: MemoryNeeds,
        budget: int,
        config: Config,
        hits: HitRates,
        *,
        elsewhere: Collection[str] = frozenset(),
        packed: bool | None = None,
        pack_bytes: int = 0,
    ) -> StreamLayout:
        """The layout under which a pass reads the least.

        Args:
            elsewhere: names of weights that devices hold; the needs are without them.
            packed: None follows the option.

        Raises:
            UnsupportedBuild: the model has no layers, or ggml cannot be asked about layouts.
            MemoryLimitError: the budget is too small; says how much is needed.
        """
        everything = streamable(files, config.memory.experts)
        weights, rest = everything.without(elsewhere), files.without(elsewhere)
        if not weights.layers and not weights.experts:
            raise UnsupportedBuild(f"'{files.paths[0].name}' has no layers to stream")
        if packed is None:
            packed = wants_pack(files, config.memory.pack)
        layers, expert_bytes = _stored_sizes(files, everything, packed=packed, elsewhere=elsewhere)
        beside = rest.tensor_bytes - weights.n_bytes - sum(table.n_bytes for table in files.tables)
        other = beside + tied_bytes(files)  # a tensor that is rearranged during loading is in memory twice
        fixed = needs.total - needs.footprints[0].weights - needs.drafter_tables + other + pack_bytes
        placement = _placed(
            layers,
            _pool_sizes(weights, expert_bytes, needs.rows),
            budget=budget,
            fixed=fixed,
            loading=needs.process + other + _largest_beside(rest),
            n_slots=config.memory.slots,
        )
        streamed = sum(layers[index] for index in placement.streamed)
        resident = beside + sum(layers[index] for index in placement.resident)
        experts = None
        if placement.expert_slots:
            n_needed = weights.n_used * len(weights.experts)
            slots, rate = placement.expert_slots, hits.at(placement.expert_slots / weights.n_experts)
            experts = PlannedExperts(
                expert_bytes, slots, weights.n_experts, n_needed, rate, measured=hits.measured
            )
            streamed += experts.missed_bytes(1)
            resident += slots * expert_bytes
        slot = max((layers[index] for index in placement.streamed), default=0)
        holding = PlannedWeights(budget, needs.total, resident, streamed, slot, placement.n_slots, experts)
        return cls(
            files,
            elsewhere,
            needs,
            budget,
            config,
            hits,
            packed,
            pack_bytes,
            weights,
            layers,
            placement,
            other,
            fixed,
            holding,
        )

    def again(self, *, packed: bool | None = None, experts: str | None = None) -> StreamLayout:
        """The layout where a fact or an option turned out to be another; raises as `of`."""
        config = self.config if experts is None else self.config.with_(experts=experts)
        packed = self.packed if packed is None else packed
        return self.of(
            self.files,
            self.needs,
            self.budget,
            config,
            self.hits,
            elsewhere=self.elsewhere,
            packed=packed,
            pack_bytes=self.pack_bytes,
        )

    @property
    def kernels_differ(self) -> bool:
        """True if different kernels run than for the same model in memory."""
        return not self.packed and gains_from_packing(self.files.layers())


def wants_pack(files: ModelFiles, pack: str) -> bool:
    """True if layers are to be packed: "auto" does so where that gains something."""
    return pack == "always" or (pack == "auto" and gains_from_packing(files.layers()))


def streamable(files: ModelFiles, experts: str = "auto") -> LayerWeights:
    """The weights of a model's layers, with experts apart unless these are "never" streamed alone.

    Without experts apart, large layers are in parts, as far as the order is known in which passes read them.
    """
    weights = LayerWeights(files.layers()) if experts == "never" else layer_weights(files)
    if weights.experts:
        return weights
    parts = split_layers(weights.layers, reading_order(files.headers), PART_BYTES)
    return replace(weights, layers=parts)


def _placed(
    layers: dict[int, int],
    pool: PoolSizes | None,
    *,
    budget: int,
    fixed: int,
    loading: int,
    n_slots: int | None,
) -> LayerPlacement:
    if pool is None:
        return place(layers, budget=budget, fixed=fixed, loading=loading, n_slots=n_slots)
    return place_with_experts(layers, pool, budget=budget, fixed=fixed, loading=loading, n_slots=n_slots)


def _pool_sizes(weights: LayerWeights, slot_bytes: int, n_rows: int) -> PoolSizes | None:
    """Return the sizes of a pool for single experts; None if none are streamed.

    Args:
        slot_bytes: of the largest expert.
        n_rows: most rows of a pass.
    """
    if not weights.experts:
        return None
    # A long piece of a prompt may need all experts of a layer at once.
    return PoolSizes(
        slot_bytes + n_rows * weights.n_used * _CHOICE_BYTES + _COUNTER_BYTES,
        fewest=max(found.n_experts for found in weights.experts),
        most=weights.n_experts,
        beside=weights.n_experts * (3 + slot_bytes // EXPERT_PIECE_BYTES) * _READ_BYTES,
    )


def _stored_sizes(
    files: ModelFiles, weights: LayerWeights, *, packed: bool, elsewhere: Collection[str]
) -> tuple[dict[int, int], int]:
    """Bytes of memory of each layer and of the largest expert: as in a packed file, or in the model's.

    Args:
        weights: of the model, with those that are elsewhere.
    """
    here = weights.without(elsewhere)
    left = {layer.index: {tensor.name for tensor in layer.tensors} for layer in here.layers}
    whole = {layer.index: layer for layer in weights.layers if layer.index in left}
    if packed:  # asking about layouts takes long, and most layers are of a few kinds
        kinds = {
            i: (kind_of(layer), tuple(t.name in left[i] for t in layer.tensors)) for i, layer in whole.items()
        }
        examples = {kind: index for index, kind in kinds.items()}
        n_bytes = {
            kind: packed_layer(whole[index]).only(left[index]).n_bytes for kind, index in examples.items()
        }
        experts = {kind_of(found): found for found in here.experts}.values()
        return (
            {index: n_bytes[kind] for index, kind in kinds.items()},
            max((record_places(found)[1] for found in experts), default=0),
        )
    store = plain_store(files, whole.values(), here.experts)
    layers = {index: stored.only(left[index]).n_bytes for index, stored in store.layers.items()}
    return layers, max((found.n_bytes for found in store.experts.values()), default=0)


def _largest_beside(files: ModelFiles) -> int:
    """Bytes of the largest tensor outside the layers."""
    elsewhere = {tensor.name for layer in files.layers() for tensor in layer.tensors}
    elsewhere |= {table.name for table in files.tables}
    return max(
        (t.n_bytes for header in files.headers for t in header.tensors if t.name not in elsewhere), default=0
    )
