"""The memory that a target and its drafter will take, before any of it is allocated.

Weights are known from the files. Caches and compute buffers are found by a dry run, and the process's memory
is measured; for models that are not here, and for those that are only compared, headers give estimates. Only
what is allocated later is always estimated, and each estimate is named here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache

import psutil

from edgespec.files.user_folders import cache_folder
from edgespec.heads.families import HeadContextShape, head_of
from edgespec.heads.head import Head
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.kernels.layouts import kernel_layout, looks_up_rows
from edgespec.llama.cache.shared_cells import PART
from edgespec.llama.dry_run import AllocationStore, Shape
from edgespec.llama.runtime.model import Model
from edgespec.machine.memory import PROCESS_BYTES
from edgespec.models.gguf.footprint import USUAL_NODES, Footprint, footprint, vocabulary_bytes, work_bytes
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.gguf.vocabulary import same_tokens
from edgespec.speculation.noise import noise_bytes
from edgespec.speculation.sampling import scratch_bytes
from edgespec.text.template import WORKER_BYTES

MAX_PROMPT_ROWS = 512
"""Most rows of a piece of a prompt where weights are in memory: more would be no faster."""
BESIDE_STREAM_ROWS = 128
"""Most rows of a piece of a prompt that a drafter reads beside a streamed target, which takes far longer."""

LEARNED_BYTES = 12 << 20  # for what is learned of a pair with a model as drafter, including while it is saved
_SHOWN_COPIES = 3  # of a row's hidden states: as they are found, side by side, and waiting to be encoded
LATER_BYTES = 12 << 20  # imports and small allocations during generation


@dataclass(frozen=True)
class ContextShape:
    """The options that contexts' memory depends on."""

    # of every context; see runtime.context
    n_cells: int
    _: KW_ONLY
    n_outputs: int = USUAL_NODES
    n_sequences: int = USUAL_NODES
    n_threads: int = 1
    kv: str = "f16"  # of the target's context; the drafter's is always f16
    drafter_sequences: int | None = None  # of the drafter's context; None for those of the target
    # rows of one draft step; None for as many as its sequences. llama.cpp reserves logits for every sequence,
    # but the system gives memory only to those that are written.
    drafter_outputs: int | None = None
    beside: int = 0  # bytes of whatever else the process will hold, such as LoRA adapters
    reading: int = 0  # bytes that reading an image takes, in a process of its own
    answers: int = 1  # how many are sampled at once
    # of the context of a model that drafts; None for as many as the target has. Heads have the target's.
    drafter_cells: int | None = None

    def sequences(self, model: Model) -> int:
        """Sequence ids of the target's context; running states do not branch without more ado."""
        return 1 if model.keeps_recurrent_state else self.n_sequences

    @property
    def fewest_rows(self) -> int:
        """Rows of a pass that every target can do with."""
        return max(USUAL_NODES, self.n_outputs)


@dataclass(frozen=True)
class MemoryNeeds:
    footprints: list[Footprint]  # of the target, and of the drafter if it is a model
    process: int  # bytes of the process besides its models, and of the one that renders chat templates
    rows: int = USUAL_NODES  # most rows of the target's passes
    drafter_rows: int = MAX_PROMPT_ROWS  # most rows of a drafter's decodes, if it is a model
    # what `process` consists of, by name; empty if that is not known
    process_parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of everything, all weights included."""
        return self.process + sum(size.total for size in self.footprints)

    @property
    def drafter_tables(self) -> int:
        """Bytes of the drafter's tables, which are left in its file where the target is streamed."""
        return sum(size.tables for size in self.footprints[1:])


class PairSizes:
    """The memory of a target and its drafter, for each number of rows of the target's passes.

    Args:
        drafter: a model, a head of the target or layers of it; None for drafters without a model.
        measured: find by dry runs what contexts allocate, and measure this process; otherwise estimate it.
        copied: count a tied embedding's second copy as the target's weights. A stream's layout counts it
            itself, and a mapped file has none.
        process_bytes: of the process; None measures them, or assumes the usual.

    Raises:
        ModelFileError: llama.cpp cannot load a model.
        MemoryLimitError: not even the logits fit.
    """

    def __init__(
        self,
        target: ModelFiles,
        drafter: ModelFiles | None,
        context: ContextShape,
        *,
        measured: bool,
        copied: bool = False,
        process_bytes: int | None = None,
    ) -> None:
        own = process_bytes
        if own is None:
            # Before dry runs, which leave memory allocated.
            own = measured_process_bytes() if measured else PROCESS_BYTES
        self.context = context
        self._target = target
        self._measured = measured
        self._copied = copied
        self._found: dict[int, Footprint] = {}
        self._shown = 0  # bytes of a row's hidden states
        self._drafter = drafter
        self._drafters: dict[int, Footprint] = {}
        if drafter is not None:  # known before the target's, which holds hidden states for a head
            self._drafter_size(MAX_PROMPT_ROWS)
        fewest = self._size(context.fewest_rows)
        with_words = [target.headers[0]]
        # Layers of the target have no vocabulary, and the target's is not loaded a second time.
        header = None if drafter is None or isinstance(drafter, MTPLayers) else drafter.headers[0]
        if header is not None and not same_tokens(target.headers[0], header):
            with_words.append(header)
        later = _later_bytes(
            with_words,
            fewest.cache // context.n_cells,
            drafts=drafter is not None,
            answers=context.answers,
        )
        parts = {
            "interpreter and libraries": own,
            "adapters and indexes": context.beside,
            "reading of an image": context.reading,
            **later,
        }
        self._process = {name: n_bytes for name, n_bytes in parts.items() if n_bytes}

    @property
    def rows(self) -> list[int]:
        """The numbers of rows that passes may have where weights are in memory, the most first."""
        counts = [self.context.fewest_rows]
        while counts[0] * 2 <= MAX_PROMPT_ROWS:
            counts.insert(0, counts[0] * 2)
        return counts

    def at(self, rows: int, *, streams: bool = False) -> MemoryNeeds:
        """The needs with passes of so many rows; raises as the class.

        Args:
            streams: the target is to be streamed.
        """
        return self._needs(self._size(rows), rows, streams=streams)

    def roughly_streamed(self, rows: int) -> MemoryNeeds:
        """The needs with a streamed target's passes of so many rows, without a dry run of these."""
        size = self._found.get(rows) or self._whole(self._estimate(self._target, self.context, rows), rows)
        return self._needs(size, rows, streams=True)

    def is_known(self, rows: int) -> bool:
        """True if `roughly_streamed` is exact for this number of rows."""
        return rows in self._found or not self._measured

    def _needs(self, target: Footprint, rows: int, *, streams: bool) -> MemoryNeeds:
        drafter_rows = BESIDE_STREAM_ROWS if streams else MAX_PROMPT_ROWS
        drafters = [] if self._drafter is None else [self._drafter_size(drafter_rows)]
        process = sum(self._process.values())
        return MemoryNeeds([target, *drafters], process, rows, drafter_rows, self._process)

    def _drafter_size(self, rows: int) -> Footprint:
        assert self._drafter is not None
        if rows not in self._drafters:
            self._drafters[rows] = self._size_of(self._drafter, rows)
        return self._drafters[rows]

    def _size(self, rows: int) -> Footprint:
        """The target's footprint; a first dry run finds those of all usual rows."""
        if rows not in self._found:
            counts = self.rows if rows in self.rows else [rows]
            sizes = self._sizes(self._target, self.context, counts)
            self._found |= {n: self._whole(size, n) for n, size in zip(counts, sizes, strict=True)}
        return self._found[rows]

    def _whole(self, size: Footprint, rows: int) -> Footprint:
        """The target's footprint with what a context of its own does not have."""
        size = replace(size, buffers=size.buffers + rows * self._shown)
        return with_second_copy(size, self._target) if self._copied else size

    def _size_of(self, drafter: ModelFiles, rows: int) -> Footprint:
        """The footprint of a drafter that reads so many rows at a time; a head has a number of its own."""
        if (head := head_of(drafter)) is not None:
            from edgespec.heads.head_context import HEAD_ROWS

            self._shown = _SHOWN_COPIES * 4 * head.shown_width
            own = replace(self.context, kv="f16", n_outputs=HEAD_ROWS)
            size = self._sizes(drafter, own, [HEAD_ROWS], head)[0]
            return size if head.keeps_cells else replace(size, cache=0)  # the target's is reported
        outputs = self.context.drafter_outputs or self.context.drafter_sequences or self.context.n_outputs
        cells = self.context.drafter_cells or self.context.n_cells
        own = replace(self.context, kv="f16", n_cells=cells, n_outputs=outputs, n_sequences=outputs)
        size = with_second_copy(self._sizes(drafter, own, [rows])[0], drafter)
        return replace(size, tables=sum(table.n_bytes for table in drafter.tables))

    def _sizes(
        self,
        files: ModelFiles,
        context: ContextShape,
        row_counts: Sequence[int],
        head: Head | None = None,
    ) -> list[Footprint]:
        """The footprints of a model, or of a head, with contexts for each of these row counts."""
        estimates = [self._estimate(files, context, rows) for rows in row_counts]
        if not self._measured:
            return estimates
        kind = Shape if head is None else HeadContextShape
        shapes = [
            kind(context.n_cells, rows, context.n_outputs, context.n_sequences, context.kv)
            for rows in row_counts
        ]
        store = AllocationStore(cache_folder() / "allocations")
        beside = self._target.headers[0] if head is not None and head.beside_target else None
        mtp = head is not None and not head.beside_target
        found = store.get(files.headers[0], shapes, beside, mtp=mtp)
        if found is None:
            return estimates
        work = [work_bytes(files.headers, n, context.n_threads, context.n_cells) for n in row_counts]
        return [
            replace(size, cache=allocated.cache, buffers=allocated.buffers + n_bytes)
            for size, allocated, n_bytes in zip(estimates, found, work, strict=True)
        ]

    @staticmethod
    def _estimate(files: ModelFiles, context: ContextShape, rows: int) -> Footprint:
        return footprint(
            files,
            n_cells=context.n_cells,
            n_outputs=context.n_outputs,
            n_rows=rows,
            n_threads=context.n_threads,
            kv=context.kv,
        )


def tied_bytes(files: ModelFiles) -> int:
    """Memory for a tied embedding's second copy: one is for looking rows up, one rearranged for products.

    Where rows can be looked up in the rearranged one, there is none.
    """
    tensors = {tensor.name: tensor for header in files.headers for tensor in header.tensors}
    embedding = tensors.get("token_embd.weight")
    tied = embedding is not None and "output.weight" not in tensors
    if not tied or embedding is None:
        return 0
    layout = kernel_layout(embedding.type_id, embedding.shape)
    one_serves = layout is None or looks_up_rows(layout, embedding.type_id, embedding.shape)
    return 0 if one_serves else embedding.n_bytes


def with_second_copy(size: Footprint, files: ModelFiles) -> Footprint:
    """The footprint of a model whose tied embedding is in memory both rearranged and as in the file."""
    try:
        return replace(size, weights=size.weights + tied_bytes(files))
    except UnsupportedBuild:  # unknown; most models have none
        return size


@cache
def measured_process_bytes() -> int:
    """The process's memory when this was first called; models that were closed since leave some allocated."""
    return min(psutil.Process().memory_info().rss, PROCESS_BYTES)


def _later_bytes(
    headers: Sequence[GGUFHeader], cell_bytes: int, *, drafts: bool, answers: int
) -> dict[str, int]:
    """Memory of the process beyond what it takes now, by what takes it.

    Args:
        headers: the target's, and the drafter's if it has a vocabulary.
        cell_bytes: of a token in the target's cache.
        drafts: whether a model or a head drafts.
        answers: how many are sampled at once.
    """
    target = headers[0]
    template = WORKER_BYTES if "tokenizer.chat_template" in target.metadata else 0
    return {
        "imports and small objects": LATER_BYTES,
        "chat template's process": template,
        "vocabulary": sum(vocabulary_bytes(header) for header in headers),
        "sampling": noise_bytes(target.n_vocab, drafts=drafts, answers=answers)
        + scratch_bytes(target.n_vocab),
        "compaction of the cache": PART * cell_bytes,
        "learned tables": LEARNED_BYTES if drafts else 0,
    }
