"""A llama.cpp context: decoding batches, reading logits, and editing the key-value cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.base.option import named
from edgespec.errors import BackendError, ContextLengthError, EdgeSpecError, MemoryLimitError
from edgespec.kernels.bindings import llama_cpp
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.kernels.native import library
from edgespec.kernels.native.guard import CallFailed
from edgespec.kernels.native.library import StateBranching
from edgespec.llama.runtime import forks
from edgespec.llama.runtime.abort import AbortFlag, DecodeAborted
from edgespec.llama.runtime.backend import LogLines, log_lines
from edgespec.llama.runtime.batch import EncoderBatch, TokenBatch
from edgespec.llama.runtime.device_failures import device_error
from edgespec.llama.runtime.graph import GraphCallback, GraphObserver
from edgespec.llama.runtime.model import Model
from edgespec.llama.runtime.signals import DeferredSignals

FloatArray = NDArray[np.float32]

_NO_BUFFERS = -2  # what llama_decode returns if it cannot allocate what it computes in
_CACHE_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}


class NoRoomInCache(ContextLengthError):
    """The cache has too few free cells for a batch.

    Args:
        n_cells: cells in the cache.
    """

    def __init__(self, n_cells: int) -> None:
        super().__init__(f"The cache of {n_cells} cells is full.", f"Raise {named('context')}.")


class BranchesFailed(BackendError):
    """The branches of a pass were not computed, because the graph has another form than is known."""


class Context:
    """One llama.cpp context: a key-value cache, compute buffers, and the logits of the last decode.

    Args:
        kv: type of the keys and values, of models.gguf.footprint.CACHE_TYPES.
        observers: of the graph's nodes, besides those that the weights need.
        beside: the context whose model this one borrows matrices of, for draft heads. It must stay open as
            long as this one computes.
        branching: of a model with a running state, sequences are to branch. Each pass is over a single one,
            the others keep its earlier states.
        mtp: compute the model's layers for multi-token prediction instead of its own. They keep cells, and
            are in memory wherever the others are, so what watches weights is left out.
        embeds: compute embeddings, pooled as the model's file says.

    Attributes:
        n_cells: cells in the cache, one for each token.
        n_rows: most rows in one decode call, and in one physical batch.
        n_outputs: most rows of one decode call whose logits can be read.
        n_sequences: sequence ids, 0 .. n_sequences - 1.
        n_threads: CPU threads.
        graph: calls the observers of the graph's nodes.
        adapted: whether it computes with LoRA adapters.
        n_decoded: rows of the last decode, with those of padding.
        branches: whether batches may have branches.
        keeps_recurrent_state: whether layers keep a recurrent state instead of cells.
        window: positions that sliding-window layers see; 0 if there are no such layers.
        keeper_id: a sequence id that batches cannot have, for cells that these layers must keep; None if
            there are no such layers.

    Raises:
        BackendError: llama.cpp refuses it for another reason; or it is to have several sequences of a model
            with a running state, which was loaded in a kernel layout that computes them wrongly; or the model
            was loaded without the layers to compute.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_cells: int,
        n_rows: int,
        n_outputs: int,
        n_sequences: int,
        n_threads: int,
        abort: AbortFlag | None = None,
        kv: str = "f16",
        observers: Sequence[GraphObserver] = (),
        beside: Context | None = None,
        branching: bool = False,
        mtp: bool = False,
        embeds: bool = False,
    ) -> None:
        if mtp and not model.mtp:  # llama.cpp would end the process
            raise BackendError(f"'{model.path.name}' was loaded without its MTP layers.")
        self.keeps_recurrent_state = model.keeps_recurrent_state and not mtp
        self.model = model
        self.n_rows = n_rows
        self.n_sequences = n_sequences
        self.n_threads = n_threads
        self._handle: Any = None
        self._memory_handle: Any = None
        self._forked = False
        self._state_unknown = False  # what is not a number in a state would stay in those that replace it
        self._n_outputs = self.n_decoded = 0
        self.adapted = False
        self._planner = model.kernels.new_planner()  # None if ggml alone plans graphs
        self._abort = abort  # C keeps the flag's address, so it must live as long as the context
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_cells
        params.n_batch = params.n_ubatch = n_rows
        self.n_outputs = max(n_outputs, n_sequences)  # llama.cpp reserves one a sequence anyway
        params.n_outputs_max = self.n_outputs
        params.n_seq_max = n_sequences
        params.kv_unified = True  # branches of a tree share cells
        params.swa_full = True  # sliding-window layers keep all cells, so that branches can be cut
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = _CACHE_TYPES[kv]
        params.n_threads = params.n_threads_batch = n_threads
        params.no_perf = True
        params.embeddings = embeds
        if abort is not None:
            abort.install(params)
        if beside is not None:
            params.ctx_other = beside.handle
        if mtp:
            params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
            params.offload_kqv = False
        model.weights.amend_context(params, sends=model.sent is not None, keeps_views=model.keeps_views)
        if mtp:  # nobody watches its graph, and so nobody sees to what is sent
            params.op_offload = False
        self._branching = _new_branching() if branching and self.keeps_recurrent_state else None
        self.branches = self._branching is not None
        watching = [] if mtp else model.weights.observers
        self.graph = GraphCallback([*watching, *observers], self._branching)
        self.graph.install(params)
        try:
            # llama.cpp calls back for its log.
            with log_lines() as log, DeferredSignals(), self._guarded(), self._sending():
                self._handle = llama_cpp.llama_init_from_model(model.handle, params)
        except BaseException:
            self.close()
            raise
        if not self._handle:
            self._end_branching()
            self._require_weights()
            if model.guard is not None and model.guard.stopped(log.errors):
                raise self._failed(CallFailed(log.cause()), log)
            kind = MemoryLimitError if log.memory_ran_out else BackendError
            raise kind(
                f"llama.cpp cannot set up a context of {n_cells} cells for '{model.path.name}': "
                f"{log.cause()}."
            )
        model.add_context(self)
        if beside is not None:
            beside.model.add_context(self)
        forks.notify_of_forks(self)
        self._memory_handle = llama_cpp.llama_get_memory(self._handle)
        self.n_cells = int(llama_cpp.llama_n_ctx(self._handle))
        self.window = int(llama_cpp.llama_model_n_swa(model.handle))
        self.keeper_id = llama_cpp.llama_max_parallel_sequences() - 1 if self.window else None

    @property
    def handle(self) -> Any:
        """The llama_context pointer.

        Raises:
            BackendError: the context is closed, or was made before this process was forked.
        """
        if not self._handle:
            raise self._closed()
        return self._handle

    @property
    def closed(self) -> bool:
        """True if the context cannot be used any more."""
        return not self._handle

    @property
    def _memory(self) -> Any:
        if not self._memory_handle:
            if self._handle:
                raise BackendError(
                    f"{self.model.path.name} keeps no KV cache: it is an encoder or a diffusion "
                    "model, which does not write token by token.",
                    "Name another model.",
                )
            raise self._closed()
        return self._memory_handle

    def _closed(self) -> BackendError:
        return forks.refusal() if self._forked else BackendError("The engine is closed.", "Load it again.")

    def adapt(self, adapters: Sequence[tuple[Any, float]]) -> None:
        """Compute with LoRA adapters from now on.

        Args:
            adapters: their handles, from `adapters.load_adapter`, and scales.

        Raises:
            BackendError: llama.cpp refuses them.
        """
        handles = (llama_cpp.llama_adapter_lora_p_ctypes * len(adapters))(*(handle for handle, _ in adapters))
        scales = (ctypes.c_float * len(adapters))(*(scale for _, scale in adapters))
        with log_lines() as log:
            refused = llama_cpp.llama_set_adapters_lora(self.handle, handles, len(adapters), scales)
        if refused:
            raise BackendError(f"llama.cpp rejects the LoRA adapters: {log.cause()}.")
        self.adapted = bool(adapters)

    def watch_own(self) -> Callable[[], bool]:
        """Begin to watch who computes products and attention in this context; see NodePlanner.watch."""
        return (lambda: False) if self._planner is None else self._planner.watch()

    def set_threads(self, n_threads: int) -> None:
        """Compute with this many CPU threads from now on."""
        llama_cpp.llama_set_n_threads(self.handle, n_threads, n_threads)
        self.n_threads = n_threads

    def decode(self, batch: TokenBatch) -> None:
        """Run the model over the batch: its tokens enter the cache, and its logits can be read.

        Raises:
            DecodeAborted: the abort flag was set. The batch is not in the cache, but a recurrent state may
                have been overwritten.
            NoRoomInCache: too few free cells.
            BranchesFailed: the branches of the batch cannot be computed.
            BackendError: llama.cpp refused the batch, or a kernel failed; or the context is closed.
            DeviceLostError, DeviceMemoryError: a device has failed; the context can only be closed.
            StreamError: weights could not be read; as for DecodeAborted.
            ModelFileError: the model's file was changed; as for DecodeAborted.
        """
        handle = self.handle
        if (change := self.model.change()) is not None:  # reading past a truncated end is SIGBUS
            raise change
        forks.has_computed()
        struct, keep_alive = batch.to_llama()
        error: BaseException | None = None
        with log_lines() as log, self._uninterrupted(), self._branched(batch) as problems:
            if not self.graph.installed:
                code = self._compute(llama_cpp.llama_decode, handle, struct, log)
            else:
                self.graph.begin(self._stopped, batch.padding)
                try:
                    code = self._compute(llama_cpp.llama_decode, handle, struct, log)
                finally:
                    error = self.graph.end()
            error = error or self.model.change()
            if error is not None or code == 2:
                self._forget(batch)  # before an interruption is raised
            # ggml computes the first node of each later split after an error.
            self._state_unknown = self._state_unknown or (error is not None and self.keeps_recurrent_state)
        del keep_alive
        if isinstance(error, CallFailed):  # in a callback
            raise self._failed(error, log)
        if error is not None:
            raise error
        self._require_success(code, log)
        if problems:
            raise BranchesFailed(f"Branches of '{self.model.path.name}' cannot be computed: {problems[0]}.")
        self._n_outputs, self.n_decoded = batch.n_outputs, len(batch)

    def _compute(self, function: Any, handle: Any, struct: Any, log: LogLines) -> int:
        """The code of a call that computes a batch; raises where a device fails in it."""
        guard = self.model.guard
        compute = function if guard is None else partial(guard.batch, function)
        try:
            with nullcontext() if self._planner is None else self._planner, self._sending():
                code: int = compute(handle, struct)
        except CallFailed as failed:
            raise self._failed(failed, log) from None
        return code

    def _guarded(self) -> AbstractContextManager[None]:
        """A block around calls that catch exceptions themselves, in which a device that fails throws one."""
        return nullcontext() if self.model.guard is None else self.model.guard.entered()

    def _sending(self) -> AbstractContextManager[None]:
        """A block in which weights in memory are sent to devices as the model says."""
        return nullcontext() if self.model.sent is None else self.model.sent.in_force()

    def _failed(self, failed: CallFailed, log: LogLines) -> EdgeSpecError:
        """The error for a device that has failed, after which nothing computes here any more."""
        error = device_error(self.model.devices, str(failed), log)
        self.model.fail(error)
        return error

    def synchronize(self) -> None:
        """Wait until devices have computed all that they were given."""
        guard = self.model.guard
        if guard is None:
            llama_cpp.llama_synchronize(self.handle)
            return
        with log_lines() as log:
            try:
                guard.context(llama_cpp.llama_synchronize, self.handle)
            except CallFailed as failed:
                raise self._failed(failed, log) from None

    @contextmanager
    def _branched(self, batch: TokenBatch) -> Iterator[list[str]]:
        """A block in which a batch's branches are computed; what is wrong with them is in the list then."""
        problems: list[str] = []
        if batch.branches is None:
            yield problems
            return
        assert self._branching is not None, "this context has no branches"
        tree = batch.branches
        try:
            self._branching.begin(tree.parents, tree.certain, tree.first_cell)
            yield problems
        finally:
            if problem := self._branching.end():
                problems.append(problem)

    def run_encoder(self, batch: EncoderBatch) -> None:
        """Run the encoder of a draft head over features.

        Raises:
            NoRoomInCache, DecodeAborted, BackendError: as `decode`.
        """
        forks.has_computed()
        struct, keep_alive = batch.to_llama()
        with log_lines() as log, self._uninterrupted():
            code = self._compute(llama_cpp.llama_encode, self.handle, struct, log)
        del keep_alive
        self._require_success(code, log)

    def set_causal(self, causal: bool) -> None:
        """Let rows see only those at positions before theirs, or all, from now on."""
        llama_cpp.llama_set_causal_attn(self.handle, causal)

    def _uninterrupted(self) -> AbstractContextManager[object]:
        """Hold back signal handlers in a block in which llama.cpp calls back."""
        return DeferredSignals(self._interrupt) if self.graph.installed else nullcontext()

    def _require_success(self, code: int, log: LogLines) -> None:
        """Raise what a return code means."""
        if code == 1:
            raise NoRoomInCache(self.n_cells)
        if code == 2:
            raise DecodeAborted
        if code == _NO_BUFFERS and self.model.devices:
            raise self._failed(CallFailed("out of memory"), log)
        if code != 0:
            raise BackendError(f"llama.cpp failed to decode (code {code}): {log.cause()}.")

    @property
    def waited_s(self) -> float:
        """Total seconds that decodes have waited for weights from disk."""
        return self.model.weights.waited_s

    @property
    def setup_s(self) -> float:
        """Total seconds that decodes have spent on one-time setup for their number of rows."""
        return self.model.weights.setup_s

    def _stopped(self) -> bool:
        return self._abort is not None and self._abort.is_set

    def _interrupt(self) -> None:
        """Abort the decode that is running; KeyboardInterrupt follows when it has returned."""
        if self._abort is not None:
            self._abort.set()

    def _forget(self, batch: TokenBatch) -> None:
        """Remove a batch whose decode did not complete from the cache.

        llama.cpp itself removes a row from the first of its sequences only.
        """
        times = batch.positions[: len(batch)]  # with M-RoPE, height and width follow
        positions = np.repeat(times, np.diff(batch.offsets))
        for sequence in np.unique(batch.sequence_ids).tolist():
            self.remove(sequence, int(positions[batch.sequence_ids == sequence].min()))

    def logits(self) -> FloatArray:
        """The last decode's logits, (rows that wanted them, n_vocab): a view, valid until the next decode.

        Raises:
            BackendError: there are none, or the context is closed.
        """
        self.synchronize()
        start = ctypes.cast(llama_cpp.llama_get_logits(self.handle), ctypes.c_void_p).value
        n_vocab = self.model.vocabulary.n_tokens
        if not start:
            raise BackendError("llama.cpp has no logits to read.")
        memory = (ctypes.c_float * (self._n_outputs * n_vocab)).from_address(start)
        return np.frombuffer(memoryview(memory), dtype=np.float32).reshape(self._n_outputs, n_vocab)

    def copy(self, source: int, destination: int, start: int, end: int) -> None:
        """Make `destination` share the cells of `source` at positions start .. end - 1."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, destination, start, end)

    def remove(self, sequence: int, start: int = 0, end: int = -1) -> bool:
        """Remove the sequence from its cells at positions start .. end - 1; -1 means to the end.

        Returns:
            False if this kind of memory cannot remove a part.
        """
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, end))

    @property
    def can_shift(self) -> bool:
        """True if `shift` works with this kind of memory."""
        return bool(llama_cpp.llama_memory_can_shift(self._memory))

    def shift(self, sequence: int, start: int, by: int) -> None:
        """Move the cells of a sequence from position `start` on; keys are turned before the next decode."""
        llama_cpp.llama_memory_seq_add(self._memory, sequence, start, -1, by)

    def last_position(self, sequence: int) -> int:
        """The greatest position of a sequence; -1 if it is empty."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence))

    def clear(self) -> None:
        """Empty the cache."""
        llama_cpp.llama_memory_clear(self._memory, self._state_unknown)
        self._state_unknown = False

    def save(self, sequence: int) -> ctypes.Array[ctypes.c_uint8]:
        """The state of one sequence as bytes, lossless."""
        self._require_weights()
        self.synchronize()  # llama.cpp does, where no exception may pass
        size = llama_cpp.llama_state_seq_get_size(self.handle, sequence)
        buffer: ctypes.Array[ctypes.c_uint8] = (ctypes.c_uint8 * size)()
        with self._guarded():
            written = llama_cpp.llama_state_seq_get_data(self.handle, buffer, size, sequence)
        self._require_weights()
        if written != size:
            raise BackendError("llama.cpp could not read the state of the conversation.")
        return buffer

    def restore(self, sequence: int, state: ctypes.Array[ctypes.c_uint8]) -> None:
        """Restore a saved state, into consecutive cells."""
        self._require_weights()
        self.synchronize()
        with self._guarded():
            read = llama_cpp.llama_state_seq_set_data(self.handle, state, len(state), sequence)
        if read == 0:
            raise BackendError("llama.cpp could not restore the state of the conversation.")
        self._require_weights()

    def _require_weights(self) -> None:
        """Raise if cells may be out of reach, where weights and cells are on a device or another machine."""
        if (failure := self.model.failure) is not None:
            raise failure

    def forked(self) -> None:
        """Forget handles that belong to the process that this one was forked from."""
        if self._handle:
            self._handle = self._memory_handle = None
            self._forked = True

    def close(self) -> None:
        """Free the cache and the buffers; a second call does nothing.

        No other thread may be using the context.
        """
        if self._handle:
            handle, self._handle, self._memory_handle = self._handle, None, None
            if not self.model.lost:
                llama_cpp.llama_free(handle)
            self._end_branching()

    def _end_branching(self) -> None:
        if self._branching is not None:
            self._branching.close()
            self._branching = None


def _new_branching() -> StateBranching | None:
    """Return the object that computes branches of running states; None if nothing can here."""
    try:
        return library.load().new_branching()
    except UnsupportedBuild:
        return None
