"""How much memory a target and its drafter will take, before any of it is allocated.

Weights are known from the files. Caches and compute buffers are found by a dry run, and the process's memory
is measured. Only what is allocated later is estimated, and each estimate is named here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import psutil
from platformdirs import user_cache_path

from edgespec.config import Config
from edgespec.costs.planned_memory import PlannedMemory
from edgespec.costs.planner import Passes
from edgespec.costs.prompts import best_rows
from edgespec.errors import MemoryLimitError
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.footprint import USUAL_NODES, Footprint, footprint, vocabulary_bytes, work_bytes
from edgespec.models.gguf.heads import is_head, read_head
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.llama.cache.shared_cells import PART
from edgespec.models.llama.heads.context import HEAD_ROWS
from edgespec.models.llama.trials.dry_run import AllocationStore, Shape
from edgespec.models.text.template import WORKER_BYTES
from edgespec.offload.planning.budget import LEARNED_BYTES, PROCESS_BYTES, bytes_needed, predict_memory
from edgespec.offload.planning.stream_plan import tied_bytes
from edgespec.speculation.noise import noise_bytes
from edgespec.speculation.sampling import scratch_bytes

MOST_PROMPT_ROWS = 512
"""Most rows of a piece of a prompt where weights are in memory: more would be no faster."""

_MOST_STREAMED_ROWS = 4096
_SHOWN_COPIES = 3  # of a row's hidden states: as they are found, side by side, and waiting to be encoded
_LATER_BYTES = 12 << 20  # imports and small allocations during generation


@dataclass(frozen=True)
class ContextShape:
    """The sizes of contexts, on which their memory depends besides the options.

    Attributes:
        n_cells, n_outputs, n_sequences, n_threads: of every context; see runtime.context.
        devices: whether layers are on devices.
        adapters: bytes of LoRA adapters.
        own_kernels: whether EdgeSpec's own kernels are in use.
        drafter_sequences: of the drafter's context, which has as many outputs; None for those of the target.
    """

    n_cells: int
    n_outputs: int
    n_sequences: int
    n_threads: int
    devices: bool = False
    adapters: int = 0
    own_kernels: bool = False
    drafter_sequences: int | None = None


@dataclass(frozen=True)
class Prefill:
    """What the size of prompts' pieces depends on besides memory.

    Attributes:
        passes: what the target's passes take, as far as that is known.
        tokens: of a usual prompt.
    """

    passes: Passes
    tokens: int


@dataclass(frozen=True)
class Needs:
    """Memory that will be needed.

    Attributes:
        footprints: of the target, and of the drafter if it is a model.
        process: bytes of the process besides its models, and of the one that renders chat templates.
        rows: most rows of the target's passes.
    """

    footprints: list[Footprint]
    process: int
    rows: int


def measure_needs(
    files: ModelFiles,
    draft: ModelFiles | None,
    config: Config,
    shape: ContextShape,
    *,
    budget: int,
    prefill: Prefill,
) -> Needs:
    """What target and drafter need, with the rows per pass that suit the budget best.

    Args:
        prefill: what the size of prompts' pieces depends on, where weights are streamed.

    Raises:
        ModelFileError: llama.cpp cannot load a model.
        MemoryLimitError: not even the logits fit.
    """
    process = _process_bytes()  # before the dry runs, which leave memory allocated
    kv, offload, asked = config.model.kv, config.memory.offload, config.speculation.exact
    fewest = max(USUAL_NODES, shape.n_outputs)
    counts = [fewest]
    while counts[0] * 2 <= MOST_PROMPT_ROWS:
        counts.insert(0, counts[0] * 2)

    shown = 0  # bytes of a row's hidden states

    def sized(row_counts: Sequence[int]) -> dict[int, Footprint]:
        found = dict(zip(row_counts, _footprints(files, shape, row_counts, kv), strict=True))
        if offload == "none":  # otherwise the file is mapped, or the stream plan counts the copy
            found = {rows: with_second_copy(size, files) for rows, size in found.items()}
        return {rows: replace(size, buffers=size.buffers + rows * shown) for rows, size in found.items()}

    drafter = []
    if draft is not None and is_head(draft.headers[0]):
        head = read_head(draft.headers[0])
        own = replace(shape, n_outputs=HEAD_ROWS)
        drafter = _footprints(draft, own, [HEAD_ROWS], beside=files.headers[0])
        shown = _SHOWN_COPIES * 4 * head.target_width * len(head.layers)
    elif draft is not None:
        outputs = shape.drafter_sequences or shape.n_outputs
        own = replace(shape, n_outputs=outputs, n_sequences=outputs)
        (small,) = _footprints(draft, own, [MOST_PROMPT_ROWS])
        drafter = [with_second_copy(small, draft)]
    sizes = sized(counts)
    headers = [files.headers[0], draft.headers[0]] if draft else [files.headers[0]]
    process += shape.adapters + _later_bytes(headers, sizes[fewest].cache // shape.n_cells)

    def whole(rows: int) -> int:
        return bytes_needed([sizes[rows], *drafter], process)

    if offload != "stream" and whole(fewest) <= budget:
        # In memory, exact passes that are padded have few rows, as reading the weights is cheap.
        padded = asked and not shape.own_kernels
        rows = fewest if padded else next(n for n in counts if whole(n) <= budget)
    else:
        # Streamed models decode exactly by default, but for those whose experts are streamed one by one.
        alone = config.memory.experts != "never" and bool(layer_weights(files).experts)
        exact = offload != "mmap" and not alone if asked is None else asked
        if exact and (offload == "mmap" or shape.devices):
            rows = fewest  # only streamed weights allow long pieces in exact decoding
        else:
            larger = streamed_counts(counts[0], shape.n_cells)
            estimates = {n: _estimate(files, shape, n, kv) for n in larger}
            while True:
                possible = {**estimates, **sizes}
                holdings = streamed_holdings(possible, drafter, files, budget, process)
                rows = best_rows(holdings, prefill.passes, prefill.tokens) if holdings else fewest
                if rows in sizes:
                    break
                sizes |= sized([rows])
    return Needs([sizes[rows], *drafter], process, rows)


def streamed_counts(fewest: int, n_cells: int) -> list[int]:
    """The rows of pieces that are compared where weights are streamed, beyond these."""
    doubled = (fewest << n for n in range(1, _MOST_STREAMED_ROWS.bit_length()))
    return [rows for rows in doubled if rows <= min(_MOST_STREAMED_ROWS, n_cells)]


def streamed_holdings(
    sizes: Mapping[int, Footprint],
    drafter: Sequence[Footprint],
    files: ModelFiles,
    budget: int,
    process: int | None = None,
) -> dict[int, PlannedMemory]:
    """The placement of streamed weights for each number of rows that there is room for.

    Args:
        sizes: rows of a pass to what the target takes with them.
        process: bytes of the process itself; None estimates them.
    """
    found = {}
    for rows in sorted(sizes):
        try:
            found[rows] = predict_memory(
                [sizes[rows], *drafter], files, budget, streams=True, process=process, n_rows=rows
            )
        except (MemoryLimitError, UnsupportedBuild):  # loading says what is wrong
            break
    return found


def with_second_copy(size: Footprint, files: ModelFiles) -> Footprint:
    """The footprint of a model whose tied embedding is in memory both rearranged and as in the file."""
    try:
        return replace(size, weights=size.weights + tied_bytes(files))
    except UnsupportedBuild:  # unknown; most models have none
        return size


@cache
def _process_bytes() -> int:
    """The process's memory when this was first called; models that were closed since leave some allocated."""
    return min(psutil.Process().memory_info().rss, PROCESS_BYTES)


def _estimate(files: ModelFiles, shape: ContextShape, rows: int, kv: str) -> Footprint:
    """The footprint of a model with a context for so many rows, without a dry run."""
    size = footprint(
        files.headers[0],
        n_cells=shape.n_cells,
        n_outputs=shape.n_outputs,
        n_rows=rows,
        n_threads=shape.n_threads,
        kv=kv,
    )
    return replace(size, weights=files.tensor_bytes)


def _footprints(
    files: ModelFiles,
    shape: ContextShape,
    row_counts: Sequence[int],
    kv: str = "f16",
    beside: GGUFHeader | None = None,
) -> list[Footprint]:
    """The footprints of a model with contexts for each of these row counts.

    Args:
        kv: of the context; a drafter's is always f16.
        beside: of the target, for a draft head.
    """
    header = files.headers[0]
    shapes = [Shape(shape.n_cells, n, shape.n_outputs, shape.n_sequences, kv) for n in row_counts]
    store = AllocationStore(user_cache_path("edgespec") / "allocations")
    found = store.get(header, shapes, beside)
    footprints = []
    for at, rows in enumerate(row_counts):
        size = footprint(header, n_cells=shape.n_cells, n_outputs=shape.n_outputs, n_rows=rows, kv=kv)
        if found is not None:
            work = work_bytes(files.headers, rows, shape.n_threads, shape.n_cells)
            size = replace(size, cache=found[at].cache, buffers=found[at].buffers + work)
        footprints.append(replace(size, weights=files.tensor_bytes))
    return footprints


def _later_bytes(headers: Sequence[GGUFHeader], cell_bytes: int) -> int:
    """What the process will take beyond what it takes now.

    Args:
        headers: the target's, and the drafter's if it is a model.
        cell_bytes: of a token in the target's cache.
    """
    target, drafts = headers[0], len(headers) > 1
    template = WORKER_BYTES if "tokenizer.chat_template" in target.metadata else 0
    return (
        _LATER_BYTES
        + template
        + sum(vocabulary_bytes(header) for header in headers)
        + noise_bytes(target.n_vocab, drafts=drafts)
        + scratch_bytes(target.n_vocab)
        + PART * cell_bytes  # being moved when the cache is compacted
        + (LEARNED_BYTES if drafts else 0)
    )
