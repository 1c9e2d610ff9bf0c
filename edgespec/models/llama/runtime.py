"""llama.cpp, owned: a model, its vocabulary and its contexts, freed when closed.

This file knows llama.cpp's C API and its return codes, and turns them into named errors. It knows
nothing of trees or drafters.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BackendError, ContextLengthError, MemoryLimitError, ModelFileError
from edgespec.files.state import FileState, states_of
from edgespec.kernels.layouts import kernels_identity, offer_to_loader
from edgespec.models.gguf.header import parts_by_name
from edgespec.models.llama.batch import Batch
from edgespec.models.llama.directing import directed
from edgespec.models.llama.graph import GraphCallback
from edgespec.models.llama.guards import forks
from edgespec.models.llama.guards.signals import SignalsWait
from edgespec.models.llama.residency import AllInMemory, Residency
from edgespec.models.llama.vocabulary import Vocabulary

FloatArray = NDArray[np.float32]

_INFO_LEVEL, _ERROR_LEVEL = 2, 4  # ggml_log_level
_KEPT_ERRORS = 8


class DecodeAborted(Exception):
    """The pass was stopped from outside."""


class NoRoomInCache(ContextLengthError):
    """The cache has no cells for this batch.

    Args:
        n_cells: cells in the cache.
    """

    def __init__(self, n_cells: int) -> None:
        super().__init__(
            f"The cache of {n_cells} cells has no room for another pass.", "Ask for a larger --context."
        )


class _Log:
    """llama.cpp's log: silent, its first error lines kept for messages."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.info: list[str] | None = None  # lines, while somebody wants them
        self._callback: Any = None

    def install(self) -> None:
        if self._callback is not None:
            return

        @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
        def receive(level: int, text: bytes, _data: object) -> None:
            if level == _ERROR_LEVEL and len(self.errors) < _KEPT_ERRORS:
                self.errors.append(text.decode("utf-8", "replace").strip())
            elif level == _INFO_LEVEL and self.info is not None:
                self.info.append(text.decode("utf-8", "replace").strip())

        self._callback = receive  # C keeps only the address, so Python must keep the object
        llama_cpp.llama_log_set(receive, None)
        llama_cpp.llama_backend_init()

    def cause(self) -> str:
        """The first error line since `errors` was cleared: later ones only pass it on."""
        return self.errors[0].rstrip(".") if self.errors else "it gave no reason"

    @property
    def tells_of_memory(self) -> bool:
        """Whether an allocation failed."""
        return any(re.search(r"alloc|insufficient memory|mmap failed", line) for line in self.errors)


_log = _Log()


def start_backend() -> None:
    """Initialise llama.cpp once and silence its log."""
    _log.install()


@contextmanager
def info_lines() -> Iterator[list[str]]:
    """What llama.cpp logs meanwhile, line by line; one thread at a time may ask."""
    start_backend()
    lines = _log.info = []
    try:
        yield lines
    finally:
        _log.info = None


def build_identity() -> str:
    """Names the llama.cpp build, the CPU features it uses and the kernel layouts in use.

    These are what the rounding and the speed of arithmetic depend on.

    Raises:
        UsageError: EDGESPEC_KERNELS cannot be obeyed.
    """
    start_backend()
    features = llama_cpp.llama_print_system_info().decode()
    return f"{llama_cpp.__version__} {sys.platform} {features} {kernels_identity()}"


class AbortFlag:
    """Ends running decodes from outside, within one graph node; safe from threads and signal handlers.

    llama.cpp asks its abort callback once a graph node. C code that reads one byte keeps that free, where
    a Python callback would take the interpreter lock a thousand times a pass: strlen("") is 0, false, and
    strlen("x") is 1, true.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    def set(self) -> None:
        """End what runs, and what is started before `clear`."""
        self._text[0] = b"x"

    def clear(self) -> None:
        """Let decodes run again."""
        self._text[0] = b"\x00"

    @property
    def is_set(self) -> bool:
        """Whether decodes are being ended."""
        return self._text[0] != b"\x00"

    def install(self, params: Any) -> None:
        """Have a context's decodes obey this flag, where there is a C library with a strlen."""
        try:
            library = ctypes.CDLL(None) if os.name == "posix" else ctypes.CDLL("msvcrt")
            address: Any = ctypes.cast(library.strlen, ctypes.c_void_p).value
        except (OSError, AttributeError):
            return  # decodes then end at the next pass
        params.abort_callback = llama_cpp.ggml_abort_callback(address)
        params.abort_callback_data = ctypes.addressof(self._text)


class Model:
    """The weights of one GGUF file.

    Args:
        gpu_layers: layers to hand to the GPU, where the llama.cpp build has one.
        memory_map: let the system page the weights in and out instead of reading them into memory. A file
            that changes is then an error in the next pass; if it is cut during one, the system ends the
            process.
        may_be_rewritten: somebody writes to the mapped file on purpose.
        repack: copy weights into the kernel layouts in use (see offload.kernels).
        on_progress: told the fraction that is loaded.
        weights: where the weights are; None leaves them all to llama.cpp. Closed with the model, or by the
            caller if the model cannot be loaded.
        vocabulary_only: load the vocabulary and no weights; nothing can be computed.
        allocate: False plans memory instead of taking it, for the model and its contexts; nothing can be
            computed.

    Attributes:
        states: of the model's files, as they were loaded.

    Raises:
        ModelFileError: llama.cpp cannot load the file, or it changes meanwhile.
        MemoryLimitError: there is not enough memory.
        UsageError, BackendError: EDGESPEC_KERNELS cannot be obeyed, or llama.cpp does not work here.
        BackendError: llama.cpp cannot compute in this process, as it was forked from one where it had.
    """

    def __init__(
        self,
        path: Path,
        *,
        gpu_layers: int = 0,
        memory_map: bool = False,
        may_be_rewritten: bool = False,
        repack: bool = True,
        on_progress: Callable[[float], None] | None = None,
        weights: Residency | None = None,
        vocabulary_only: bool = False,
        allocate: bool = True,
    ) -> None:
        if not vocabulary_only:
            forks.check_computing()
        start_backend()
        self.path = path
        self.weights: Residency = weights or AllInMemory()
        self._handle: Any = None
        self._files = tuple(part.absolute() for part in parts_by_name(path))
        self.states = _states_now(self._files)
        self._mapped = memory_map and not may_be_rewritten and not vocabulary_only
        self._forked = False
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        _log.errors.clear()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if memory_map else llama_cpp.LLAMA_LOAD_MODE_NONE
        patterns: list[tuple[str, int]] = []
        if repack and not vocabulary_only:
            params.use_extra_bufts = offer_to_loader()
            patterns = directed(path, gpu_layers)
        else:
            params.use_extra_bufts = False
        params.vocab_only = vocabulary_only
        params.no_alloc = not allocate
        failed: list[BaseException] = []
        signals = SignalsWait()

        @llama_cpp.llama_progress_callback  # type: ignore[untyped-decorator]
        def report(fraction: float, _data: object) -> bool:
            try:
                if on_progress is not None:
                    on_progress(fraction)
            except BaseException as error:  # ctypes would swallow it
                failed.append(error)
                return False
            return not signals.interrupted

        params.progress_callback = report
        try:
            with signals, self.weights.loading(path, params, patterns) as load_path:
                self._handle = llama_cpp.llama_model_load_from_file(os.fsencode(load_path), params)
            if failed:
                raise failed[0]
        except BaseException:
            self.close()
            raise
        if not self._handle and _log.tells_of_memory:
            raise MemoryLimitError(f"The system refused memory for '{path.name}': {_log.cause()}.")
        if not self._handle:
            raise ModelFileError(
                f"llama.cpp cannot load '{path}': {_log.cause()}.",
                "The file may be damaged, or its architecture newer than this llama.cpp build.",
            )
        try:
            if not may_be_rewritten and _states_now(self._files) != self.states:
                raise ModelFileError(
                    f"'{path}' was changed while it was being loaded.",
                    "Let its download or copy finish first.",
                )
            self.vocabulary = Vocabulary(llama_cpp.llama_model_get_vocab(self._handle))
            self.weights.loaded()
        except BaseException:
            self.close()
            raise
        forks.watch(self)

    def change(self) -> ModelFileError | None:
        """What is wrong if the files of a mapped model are not what was loaded; None if they are.

        Weights that were read into memory do not change with their file.
        """
        if not self._mapped or _states_now(self._files) == self.states:
            return None
        return ModelFileError(
            f"'{self.path}' was changed, moved or removed while the model was in use.",
            "Its weights were not in memory, so they may be others now: load the model again.",
        )

    @property
    def handle(self) -> Any:
        """The llama_model pointer.

        Raises:
            BackendError: the model is closed, or was loaded before this process was forked.
        """
        if not self._handle:
            if self._forked:
                raise forks.refusal()
            raise BackendError(f"The model '{self.path.name}' is closed.", "Load it again.")
        return self._handle

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(llama_cpp.llama_model_size(self.handle))

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors."""
        return int(llama_cpp.llama_model_n_params(self.handle))

    @property
    def n_context_trained(self) -> int:
        """Positions the model was trained for."""
        return int(llama_cpp.llama_model_n_ctx_train(self.handle))

    @property
    def keeps_recurrent_state(self) -> bool:
        """Whether some layers keep a running state instead of cells (recurrent and hybrid models)."""
        return bool(
            llama_cpp.llama_model_is_recurrent(self.handle) or llama_cpp.llama_model_is_hybrid(self.handle)
        )

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template in the file."""
        template = llama_cpp.llama_model_chat_template(self.handle, None)
        return template.decode("utf-8", "replace") if template else None

    def forked(self) -> None:
        """Let go of what belongs to the process that this one was forked from."""
        if self._handle:
            self._handle, self._forked = None, True
            self.vocabulary.close(forks.refusal)

    def add_context(self, context: Context) -> None:
        """Have a context closed before the weights are freed, if nobody has closed it until then."""
        self._contexts.add(context)

    def close(self) -> None:
        """Free the weights, and the contexts that use them; a second time, nothing happens."""
        if self._handle:
            for context in list(self._contexts):
                context.close()
            if hasattr(self, "vocabulary"):
                self.vocabulary.close()
            handle, self._handle = self._handle, None
            llama_cpp.llama_model_free(handle)
            self.weights.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _states_now(paths: tuple[Path, ...]) -> tuple[FileState, ...]:
    """The states of a model's files; none if one is gone."""
    try:
        return states_of(paths)
    except OSError:
        return ()


class Context:
    """One llama.cpp context: a key-value cache, compute buffers, and the last logits.

    Attributes:
        n_cells: cells in the cache; a token takes one.
        n_rows: most rows in one decode call, and in one physical batch.
        n_outputs: most rows of one decode call whose logits can be read.
        n_sequences: sequence ids, 0 .. n_sequences - 1.
        n_threads: CPU threads.
        graph: what is told of the nodes that are computed.

    Raises:
        MemoryLimitError: llama.cpp cannot allocate the context.
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
    ) -> None:
        self.model = model
        self.n_rows = n_rows
        self.n_sequences = n_sequences
        self.n_threads = n_threads
        self._handle: Any = None
        self._memory_handle: Any = None
        self._forked = False
        self._n_outputs = 0
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
        params.n_threads = params.n_threads_batch = n_threads
        params.no_perf = True
        if abort is not None:
            abort.install(params)
        model.weights.amend_context(params)
        self.graph = GraphCallback(model.weights.observers)
        self.graph.install(params)
        _log.errors.clear()
        self._handle = llama_cpp.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise MemoryLimitError(
                f"llama.cpp cannot set up a context of {n_cells} cells for '{model.path.name}': "
                f"{_log.cause()}."
            )
        model.add_context(self)
        forks.watch(self)
        self._memory_handle = llama_cpp.llama_get_memory(self._handle)
        self.n_cells = int(llama_cpp.llama_n_ctx(self._handle))

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
    def _memory(self) -> Any:
        if not self._memory_handle:
            raise self._closed()
        return self._memory_handle

    def _closed(self) -> BackendError:
        return forks.refusal() if self._forked else BackendError("The engine is closed.", "Load it again.")

    def set_threads(self, n_threads: int) -> None:
        """Compute with so many CPU threads from now on."""
        llama_cpp.llama_set_n_threads(self.handle, n_threads, n_threads)
        self.n_threads = n_threads

    def decode(self, batch: Batch) -> None:
        """Run the model over the batch; its tokens enter the cache, its logits can be read.

        Raises:
            DecodeAborted: the abort flag was set; nothing of the batch is in a cache of cells. A running
                state may have been overwritten.
            NoRoomInCache: too few free cells.
            BackendError: llama.cpp refused the batch, or a kernel failed; or the context is closed.
            StreamError: weights could not be read; as for DecodeAborted.
            ModelFileError: the model's file was changed; as for DecodeAborted.
        """
        handle = self.handle
        if (change := self.model.change()) is not None:  # reading what was cut off would end the process
            raise change
        forks.has_computed()
        struct, keep_alive = batch.to_llama()
        _log.errors.clear()
        error: BaseException | None = None
        if not self.graph.installed:
            code = llama_cpp.llama_decode(handle, struct)
        else:
            with SignalsWait(self._interrupt):
                self.graph.begin(self._stopped)
                try:
                    code = llama_cpp.llama_decode(handle, struct)
                finally:
                    error = self.graph.end()
        error = error or self.model.change()
        del keep_alive
        if error is not None or code == 2:
            self._forget(batch)
        if error is not None:
            raise error
        if code == 1:
            raise NoRoomInCache(self.n_cells)
        if code == 2:
            raise DecodeAborted
        if code != 0:
            raise BackendError(f"llama.cpp failed to decode (code {code}): {_log.cause()}.")
        self._n_outputs = batch.n_outputs

    @property
    def waited_s(self) -> float:
        """Seconds that decodes have waited for weights from disk, in all."""
        return self.model.weights.waited_s

    def _stopped(self) -> bool:
        return self._abort is not None and self._abort.is_set

    def _interrupt(self) -> None:
        """End the pass that runs: KeyboardInterrupt is to follow it."""
        if self._abort is not None:
            self._abort.set()

    def _forget(self, batch: Batch) -> None:
        """Take a batch that was not computed to its end out of the cache.

        llama.cpp only takes a row out of the first of its sequences.
        """
        positions = np.repeat(batch.positions, np.diff(batch.offsets))
        for sequence in np.unique(batch.sequence_ids).tolist():
            self.remove(sequence, int(positions[batch.sequence_ids == sequence].min()))

    def logits(self) -> FloatArray:
        """(rows that wanted logits, n_vocab) of the last decode: a view, valid until the next one or `close`.

        Raises:
            BackendError: there are none, or the context is closed.
        """
        llama_cpp.llama_synchronize(self.handle)
        start = ctypes.cast(llama_cpp.llama_get_logits(self.handle), ctypes.c_void_p).value
        n_vocab = self.model.vocabulary.n_tokens
        if not start:
            raise BackendError("llama.cpp has no logits to read.")
        memory = (ctypes.c_float * (self._n_outputs * n_vocab)).from_address(start)
        return np.frombuffer(memoryview(memory), dtype=np.float32).reshape(self._n_outputs, n_vocab)

    def copy(self, source: int, destination: int, start: int, end: int) -> None:
        """Let `destination` share the cells of `source` at positions start .. end - 1."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, destination, start, end)

    def remove(self, sequence: int, start: int = 0, end: int = -1) -> bool:
        """Take the sequence out of its cells at positions start .. end - 1; -1 means to the end.

        Returns:
            False if this kind of memory cannot forget a part.
        """
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, end))

    def clear(self) -> None:
        """Forget everything."""
        llama_cpp.llama_memory_clear(self._memory, False)

    def save(self, sequence: int) -> ctypes.Array[ctypes.c_uint8]:
        """The state of one sequence as bytes, exact."""
        size = llama_cpp.llama_state_seq_get_size(self.handle, sequence)
        buffer: ctypes.Array[ctypes.c_uint8] = (ctypes.c_uint8 * size)()
        written = llama_cpp.llama_state_seq_get_data(self.handle, buffer, size, sequence)
        if written != size:
            raise BackendError("llama.cpp could not read the state of the conversation.")
        return buffer

    def restore(self, sequence: int, state: ctypes.Array[ctypes.c_uint8]) -> None:
        """Put a saved state back, in consecutive cells."""
        if llama_cpp.llama_state_seq_set_data(self.handle, state, len(state), sequence) == 0:
            raise BackendError("llama.cpp could not put the state of the conversation back.")

    def forked(self) -> None:
        """Let go of what belongs to the process that this one was forked from."""
        if self._handle:
            self._handle = self._memory_handle = None
            self._forked = True

    def close(self) -> None:
        """Free the cache and the buffers; a second time, nothing happens.

        No other thread may use the context meanwhile.
        """
        if self._handle:
            handle, self._handle, self._memory_handle = self._handle, None, None
            llama_cpp.llama_free(handle)
