"""How many texts are answered at once, and the cells that they take: planned before anything is loaded.

Cells take memory that weights could have. So the cache gets room for as many texts as make passes worth most,
and no model that fits in memory is streamed for the sake of company. Where texts turn out to be longer, some
wait for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgespec.costs.batches import SIZES, TextCells, fewest_texts, predict_batch
from edgespec.costs.planner import Passes
from edgespec.errors import MemoryLimitError
from edgespec.loading.devices.card_plan import placement_here
from edgespec.loading.devices.crew_plan import CrewPlan
from edgespec.loading.devices.placed import Placed, Placement
from edgespec.loading.state import LoadState
from edgespec.measure.threads import known_threads
from edgespec.models.gguf.footprint import USUAL_TEXT, cell_bytes, footprint
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader
from edgespec.offload.planning.budget import memory_room
from edgespec.offload.planning.needs import with_second_copy
from edgespec.profiles.store import ProfileStore
from edgespec.units import readable

_UNMEASURED = 16  # texts, where it is not known what passes take
_SHARE = 1 / 8  # of a streamed model's budget for the cells of company, where it is not known what that gains
_SURE = 0.95  # of the budget: what is estimated to take no more fits


@dataclass(frozen=True)
class TextPlan:
    """How many texts are answered at once.

    Attributes:
        texts: how many, where a call does not say; None leaves it to the passes' costs.
        more_cells: cells of the cache besides those for a single text.
        note: what that takes, in a sentence.
    """

    texts: int | None = None
    more_cells: int = 0
    note: str = field(default="", compare=False)


def plan_texts(
    target: ModelFiles, drafter: ModelFiles | None, state: LoadState, store: ProfileStore | None = None
) -> TextPlan:
    """The number of texts for which the options ask, and the cells that there is memory for.

    Args:
        store: what passes take, if it was measured; None is that of this machine.
    """
    config, header = state.config, target.headers[0]
    parallel = config.batching.parallel
    if parallel is None:
        return TextPlan()
    asked = parallel if isinstance(parallel, int) else None
    if asked == 1 or _has_one_size(target):
        return TextPlan(asked)
    models = [target] if drafter is None else [target, drafter]
    cells = TextCells(
        cell_bytes(header, config.model.kv) + sum(cell_bytes(model.headers[0]) for model in models[1:]),
        min(config.batching.text_tokens or USUAL_TEXT, config.model.context),
    )
    sizes = SIZES if asked is None else sorted({*(n for n in SIZES if n < asked), asked})
    room = memory_room(config.memory.limit)
    placed = _possible(models, cells, sizes, room, state)
    possible = {texts: there.holding for texts, there in placed.items()}
    if not possible:  # there is no room for a single one; loading says what is missing
        return TextPlan(asked)
    passes = _known_passes(header, state, store or ProfileStore(), streams=possible[1].streamed_bytes > 0)
    if passes is None:
        possible = {
            texts: holding
            for texts, holding in possible.items()
            if not holding.streamed_bytes or (texts - 1) * cells.text_bytes <= room * _SHARE
        }
    texts = _chosen({texts: placed[texts] for texts in possible}, passes, asked)
    note = (
        f"A token takes {readable(cells.cell_bytes)} of cache, which has room for {texts} texts of "
        f"{cells.tokens} tokens: {readable(texts * cells.text_bytes)}."
    )
    return TextPlan(asked or texts, (texts - 1) * cells.tokens, note)


def _possible(
    models: Sequence[ModelFiles], cells: TextCells, sizes: Sequence[int], room: int, state: LoadState
) -> dict[int, Placed]:
    """Where weights would be held, for each number of texts that there is room for."""
    target, *others = models
    placement = _placement(target, state)
    alone = [
        replace(
            footprint(
                model.headers[0],
                n_cells=state.n_cells,
                n_outputs=state.n_nodes,
                n_threads=state.n_threads,
            ),
            weights=model.tensor_bytes,
        )
        for model in models
    ]
    drafters = [with_second_copy(size, model) for size, model in zip(alone[1:], models[1:], strict=True)]
    possible: dict[int, Placed] = {}
    for texts in sizes:
        # Which of the two models' cells these are does not matter for the sum.
        first = replace(alone[0], cache=alone[0].cache + (texts - 1) * cells.text_bytes)
        try:
            streams = state.config.memory.offload == "stream"
            placed = placement.place([first, *drafters], room, *others, streams=streams)
        except MemoryLimitError:
            break
        holding = placed.holding
        sure = holding.needed <= _SURE * holding.budget
        if possible and not possible[1].holding.streamed_bytes and (holding.streamed_bytes or not sure):
            break
        possible[texts] = placed
    return possible


def _placement(target: ModelFiles, state: LoadState) -> Placement:
    """What may hold layers: workers, or this machine alone."""
    if state.crew is not None:
        return CrewPlan(state.crew, target)
    return placement_here(state.cards, target, state.card_request)


def _known_passes(
    header: GGUFHeader, state: LoadState, store: ProfileStore, *, streams: bool
) -> Passes | None:
    """What passes of the target take here; None if that was not measured yet."""
    threads = state.config.devices.threads or known_threads(header.fingerprint, store)
    profile = store.preferred_passes(header.fingerprint, threads, streams=streams)
    if profile is None or (streams and not profile.read_rate):
        return None
    return Passes(profile.compute, profile.read_rate, profile.accept_s, profile.overlap)


def _chosen(possible: Mapping[int, Placed], passes: Passes | None, asked: int | None) -> int:
    """For how many texts the cache gets cells."""
    most = max(possible)
    if passes is None:
        return most if asked is not None else min(most, _UNMEASURED)
    predictions = [
        predict_batch(placed.holding, placed.over(passes), texts) for texts, placed in possible.items()
    ]
    if asked is None:
        return fewest_texts(predictions).texts
    if not possible[most].holding.streamed_bytes:
        return most  # cells for more texts than are fast cost nothing
    return max(predictions, key=lambda prediction: prediction.tokens_per_second).texts


def _has_one_size(model: ModelFiles) -> bool:
    """Whether more cells would be of no use, or change texts.

    Models with a recurrent state have one text at a time. Those with factors for long contexts (LongRoPE)
    compute otherwise from a certain size of the cache on.
    """
    header = model.headers[0]
    tensors = (tensor for part in model.headers for tensor in part.tensors)
    return header.keeps_running_state or any(
        tensor.name.startswith("rope_factors_long") for tensor in tensors
    )
