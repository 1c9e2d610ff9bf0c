"""llama.cpp, owned: a model, its vocabulary and its contexts, freed when closed.

This file knows llama.cpp's C API and its return codes, and turns them into named errors. It knows
nothing of trees or drafters.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BackendError, MemoryLimitError, ModelFileError
from edgespec.models.batch import Batch
from edgespec.models.vocabulary import Vocabulary

FloatArray = NDArray[np.float32]

_ERROR_LEVEL = 4  # ggml_log_level
_KEPT_ERRORS = 8


class DecodeAborted(Exception):
    """The pass was stopped from outside; the cache is as it was before."""


class NoRoomInCache(Exception):
    """The cache has no cells for this batch."""


class _Log:
    """llama.cpp's log: silent, its first error lines kept for messages."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._callback: Any = None

    def install(self) -> None:
        if self._callback is not None:
            return

        @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
        def receive(level: int, text: bytes, _data: object) -> None:
            if level == _ERROR_LEVEL and len(self.errors) < _KEPT_ERRORS:
                self.errors.append(text.decode("utf-8", "replace").strip())

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


def build_identity() -> str:
    """Names the llama.cpp build and the CPU features it uses: what kernels' rounding depends on."""
    start_backend()
    features = llama_cpp.llama_print_system_info().decode()
    return f"{llama_cpp.__version__} {sys.platform} {features}"


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


class OutsideWeights(Protocol):
    """Weights that llama.cpp does not hold itself; see offload.weights."""

    @property
    def waited_s(self) -> float: ...
    def loading(self, params: Any) -> AbstractContextManager[Path]: ...
    def loaded(self) -> None: ...
    def attach(self, params: Any) -> None: ...
    def start_pass(self, stop: Callable[[], bool]) -> None: ...
    def end_pass(self) -> BaseException | None: ...
    def close(self) -> None: ...


class Model:
    """The weights of one GGUF file.

    Args:
        gpu_layers: layers to hand to the GPU, where the llama.cpp build has one.
        memory_map: let the system page the weights in and out instead of reading them into memory.
        repack: copy weights into the layout of the CPU's fastest kernels.
        on_progress: told the fraction that is loaded.
        weights: holds the layers' weights in llama.cpp's stead; closed with the model, or by the caller
            if the model cannot be loaded.
        vocabulary_only: load the vocabulary and no weights; nothing can be computed.
        allocate: False plans memory instead of taking it, for the model and its contexts; nothing can be
            computed.

    Raises:
        ModelFileError: llama.cpp cannot load the file.
        MemoryLimitError: there is not enough memory.
    """

    def __init__(
        self,
        path: Path,
        *,
        gpu_layers: int = 0,
        memory_map: bool = True,
        repack: bool = True,
        on_progress: Callable[[float], None] | None = None,
        weights: OutsideWeights | None = None,
        vocabulary_only: bool = False,
        allocate: bool = True,
    ) -> None:
        start_backend()
        self.path = path
        self.weights = weights
        self._handle: Any = None
        _log.errors.clear()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if memory_map else llama_cpp.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = repack
        params.vocab_only = vocabulary_only
        params.no_alloc = not allocate
        interrupted: list[BaseException] = []
        if on_progress is not None:

            @llama_cpp.llama_progress_callback  # type: ignore[untyped-decorator]
            def report(fraction: float, _data: object) -> bool:
                try:
                    on_progress(fraction)
                except BaseException as error:  # ctypes would swallow it, Ctrl-C too
                    interrupted.append(error)
                    return False
                return True

            params.progress_callback = report
        with weights.loading(params) if weights else nullcontext(path) as load_path:
            self._handle = llama_cpp.llama_model_load_from_file(os.fsencode(load_path), params)
        if interrupted:
            self.close()
            raise interrupted[0]
        if not self._handle and _log.tells_of_memory:
            raise MemoryLimitError(f"The system refused memory for '{path.name}': {_log.cause()}.")
        if not self._handle:
            raise ModelFileError(
                f"llama.cpp cannot load '{path}': {_log.cause()}.",
                "The file may be damaged, or its architecture newer than this llama.cpp build.",
            )
        self.vocabulary = Vocabulary(llama_cpp.llama_model_get_vocab(self._handle))
        if weights is not None:
            try:
                weights.loaded()
            except BaseException:
                self.close()
                raise

    @property
    def handle(self) -> Any:
        """The llama_model pointer.

        Raises:
            BackendError: the model is closed.
        """
        if not self._handle:
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

    def close(self) -> None:
        """Free the weights; contexts of this model must be closed before."""
        if self._handle:
            llama_cpp.llama_model_free(self._handle)
            self._handle = None
            if self.weights is not None:
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


class Context:
    """One llama.cpp context: a key-value cache, compute buffers, and the last logits.

    Attributes:
        n_cells: cells in the cache; a token takes one.
        n_rows: most rows in one decode call, and in one physical batch.
        n_outputs: most rows of one decode call whose logits can be read.
        n_sequences: sequence ids, 0 .. n_sequences - 1.
        n_threads: CPU threads.

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
        if model.weights is not None:
            model.weights.attach(params)
        _log.errors.clear()
        self._handle = llama_cpp.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise MemoryLimitError(
                f"llama.cpp cannot set up a context of {n_cells} cells for '{model.path.name}': "
                f"{_log.cause()}."
            )
        self._memory = llama_cpp.llama_get_memory(self._handle)
        self.n_cells = int(llama_cpp.llama_n_ctx(self._handle))

    @property
    def handle(self) -> Any:
        """The llama_context pointer.

        Raises:
            BackendError: the context is closed.
        """
        if not self._handle:
            raise BackendError("The engine is closed.", "Load it again.")
        return self._handle

    def decode(self, batch: Batch) -> None:
        """Run the model over the batch; its tokens enter the cache, its logits can be read.

        Raises:
            DecodeAborted: the abort flag was set; nothing of the batch is in the cache.
            NoRoomInCache: too few free cells.
            BackendError: llama.cpp refused the batch, or a kernel failed.
            StreamError: weights could not be read; nothing of the batch is in the cache.
        """
        struct, keep_alive = batch.to_llama()
        _log.errors.clear()
        weights = self.model.weights
        if weights is not None:
            weights.start_pass(self._stopped)
        code = llama_cpp.llama_decode(self.handle, struct)
        error = weights.end_pass() if weights is not None else None
        del keep_alive
        if error is not None or code == 2:
            self._forget(batch)
        if error is not None:
            raise error
        if code == 1:
            raise NoRoomInCache
        if code == 2:
            raise DecodeAborted
        if code != 0:
            raise BackendError(f"llama.cpp failed to decode (code {code}): {_log.cause()}.")
        self._n_outputs = int(np.count_nonzero(batch.wants_logits))

    @property
    def waited_s(self) -> float:
        """Seconds that decodes have waited for weights from disk, in all."""
        return self.model.weights.waited_s if self.model.weights is not None else 0.0

    def _stopped(self) -> bool:
        return self._abort is not None and self._abort.is_set

    def _forget(self, batch: Batch) -> None:
        """Take a batch that was not computed to its end out of the cache.

        llama.cpp only takes a row out of the first of its sequences.
        """
        positions = np.repeat(batch.positions, np.diff(batch.offsets))
        for sequence in np.unique(batch.sequence_ids).tolist():
            self.remove(sequence, int(positions[batch.sequence_ids == sequence].min()))

    def logits(self) -> FloatArray:
        """(rows that wanted logits, n_vocab) of the last decode: a view, valid until the next one."""
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

    def close(self) -> None:
        """Free the cache and the buffers."""
        if self._handle:
            llama_cpp.llama_free(self._handle)
            self._handle = None
