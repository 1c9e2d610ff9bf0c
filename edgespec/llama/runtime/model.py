"""A loaded GGUF model: its weights, its vocabulary, and the contexts that are closed with it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from edgespec.errors import BackendError, DeviceLostError, EdgeSpecError, MemoryLimitError, ModelFileError
from edgespec.files.state import FileState, states_of
from edgespec.kernels.bindings import llama_cpp
from edgespec.kernels.layouts import ModelKernels
from edgespec.kernels.native.guard import call_guard
from edgespec.kernels.native.offload import SentProducts, keep_views, sent_products
from edgespec.kernels.report_store import ensure_report
from edgespec.llama.runtime import forks
from edgespec.llama.runtime.backend import log_lines, start_backend
from edgespec.llama.runtime.device_failures import LossWatch, device_error
from edgespec.llama.runtime.device_layers import ON_PROCESSOR, DeviceLayers
from edgespec.llama.runtime.layout_overrides import layout_overrides, output_override
from edgespec.llama.runtime.signals import DeferredSignals
from edgespec.llama.runtime.vetting import require_survived
from edgespec.llama.runtime.weight_store import AllInMemory, WeightStore
from edgespec.llama.tokenizer.vocabulary import Vocabulary
from edgespec.machine.memory import trim_heap
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import mtp_layers
from edgespec.models.gguf.split_files import parts_by_name
from edgespec.models.gguf.types import GGUFHeader


class Closable(Protocol):
    """A resource that must be closed, such as a context before the weights of its model are freed."""

    def close(self) -> None: ...


_READING = 0.7  # of a model's loading, where its weights are packed afterwards
_ROPES_OF_PARTS = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE)


class Model:
    """The weights of one GGUF file.

    Args:
        devices: which layers are on devices.
        memory_map: let the system page the weights in and out instead of reading them into memory. A file
            that changes is then an error in the next pass; if it is cut during one, the system ends the
            process.
        repack: copy weights into the kernel layouts in use (see kernels.layouts).
        on_progress: called with the fraction that is loaded.
        weights: where the weights are held; None leaves them all to llama.cpp. Closed with the model, or by
            the caller if the model cannot be loaded.
        vocabulary_only: load the vocabulary and no weights; nothing can be computed.
        token_texts: if False, load weights and no vocabulary: tokens have ids only, and no text can be
            tokenized, which saves tens of megabytes. Only for a file that lists its tokens.
        allocate: if False, plan the memory of the model and its contexts without allocating it; nothing can
            be computed.
        vetted: if False, load a header that no child process has survived: for such a child.
        sent_from: weights that no device holds are sent to devices for passes of so many rows (see
            `costs.sending`), unless they are rearranged and not read again; None leaves that to ggml.
        mtp: load the layers for multi-token prediction, too, for a context that drafts with them.
        drafts: the model drafts and does nothing else, so its output head may be packed in 5 bits.

    Attributes:
        states: of the model's files, as they were loaded.
        devices: ggml's devices that hold layers.
        sent: decides which weights are sent to these; None if ggml does.
        keeps_views: whether what reads views of weights is computed where the weights are.
        guard: for calls in which these may fail; None if there are none, or nothing can be caught here.
        kernels: what computes it.
        layouts: ggml's names of the kernel layouts that its weights may be in.
        mtp: as given.

    Raises:
        ModelFileError: llama.cpp cannot load the file or would not survive it, or the file changes while it
            is loaded.
        MemoryLimitError: there is not enough memory.
        UsageError, BackendError: EDGESPEC_KERNELS cannot be obeyed, or llama.cpp does not work here.
        BackendError: llama.cpp cannot compute in this process, because it had computed before the fork.
    """

    def __init__(
        self,
        path: Path,
        *,
        devices: DeviceLayers = ON_PROCESSOR,
        memory_map: bool = False,
        repack: bool = True,
        on_progress: Callable[[float], None] | None = None,
        weights: WeightStore | None = None,
        vocabulary_only: bool = False,
        token_texts: bool = True,
        allocate: bool = True,
        vetted: bool = True,
        mtp: bool = False,
        sent_from: int | None = None,
        drafts: bool = False,
    ) -> None:
        if not vocabulary_only:
            forks.check_computing()
        start_backend()
        if vetted:
            require_survived(path, mtp=mtp)
        self.path = path
        self.mtp = mtp
        self.weights: WeightStore = weights or AllInMemory()
        self.devices = devices.devices
        self._losses = LossWatch(self.devices)
        self.guard = call_guard() if self.devices else None
        self.keeps_views = keep_views(self.devices)
        self.sent: SentProducts | None = None
        self._failure: EdgeSpecError | None = None
        self._handle: Any = None
        self._files = tuple(part.absolute() for part in parts_by_name(path))
        self.states = _states_now(self._files)
        self._mapped = memory_map and not vocabulary_only
        self._forked = False
        self._contexts: weakref.WeakSet[Closable] = weakref.WeakSet()
        params = llama_cpp.llama_model_default_params()
        further = mtp_layers(path) if devices.devices and not vocabulary_only else ()
        patterns, keep_alive = devices.amend(params, further)
        params.load_mtp = mtp
        overrides: Any = None  # llama.cpp borrows it while loading
        if not token_texts:
            overrides = _without_token_texts(read_header(path))
            params.kv_overrides = overrides
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if memory_map else llama_cpp.LLAMA_LOAD_MODE_NONE
        self.kernels = ModelKernels()
        if repack and not vocabulary_only:
            ensure_report()
        if not vocabulary_only:
            self.kernels = ModelKernels.chosen()
        layouts = self.kernels.layouts if repack else ()
        self.layouts = tuple(layout.name for layout in layouts)
        if sent_from is not None:
            rereads = [layout.address for layout in layouts] if self.weights.rereads else []
            self.sent = sent_products(self.devices, sent_from, rereads)
        params.use_extra_bufts = bool(layouts)
        # Beside a device, llama.cpp would put weights into memory that is pinned for it, before any layout.
        params.no_host = bool(layouts)
        if layouts:
            patterns = layout_overrides(path, params.n_gpu_layers, layouts, devices.kept_names) + patterns
        elif self.sent is not None and not devices.output:
            outputs = output_override(path, self.kernels.layouts)  # which is never sent
            self.layouts = tuple(layout.name for layout in self.kernels.layouts if outputs)
            patterns = outputs + patterns
        params.vocab_only = vocabulary_only
        params.no_alloc = not allocate
        failed: list[BaseException] = []
        signals = DeferredSignals()

        @llama_cpp.llama_progress_callback  # type: ignore[untyped-decorator]
        def report(fraction: float, _data: object) -> bool:
            try:
                if on_progress is not None:
                    on_progress(_READING * fraction if layouts and self.kernels.are_own else fraction)
            except BaseException as error:  # ctypes would swallow the exception
                failed.append(error)
                return False
            return not signals.interrupted

        params.progress_callback = report
        try:
            with (
                self.kernels.loading(narrow_head=drafts) if layouts else nullcontext(lambda: 0) as pack_next,
                nullcontext() if self.guard is None else self.guard.entered(),
                log_lines() as log,
                signals,
                self.weights.loading(path, params, patterns) as load_path,
            ):
                self._handle = llama_cpp.llama_model_load_from_file(os.fsencode(load_path), params)
                most = left = pack_next() if self._handle else 0
                while left and not signals.interrupted:
                    if on_progress is not None:
                        on_progress(1 - (1 - _READING) * (left - 1) / most)
                    left = pack_next()
            del keep_alive, overrides
            if failed:
                raise failed[0]
        except BaseException:
            self.close()
            raise
        if not self._handle and (failure := self.weights.failure()) is not None:
            raise failure
        if not self._handle and log.memory_ran_out:
            raise MemoryLimitError(f"Not enough memory for '{path.name}': {log.cause()}.")
        if not self._handle and self.guard is not None and self.guard.stopped(log.errors):
            raise device_error(self.devices, log.cause(), log)
        if not self._handle:
            raise ModelFileError(
                f"llama.cpp cannot load '{path}': {log.cause()}.",
                "The file may be damaged, or its architecture newer than this llama.cpp build.",
            )
        try:
            if _states_now(self._files) != self.states:
                raise ModelFileError(
                    f"'{path}' was changed while it was being loaded.",
                    "Wait until its download or copy has finished.",
                )
            # llama.cpp has freed its copy of the header, with a string for every token. Malloc would keep
            # these megabytes beside the weights that are read next.
            trim_heap()
            self.vocabulary = Vocabulary(llama_cpp.llama_model_get_vocab(self._handle))
            self.weights.loaded()
        except BaseException:
            self.close()
            raise
        forks.notify_of_forks(self)

    def change(self) -> EdgeSpecError | None:
        """An error if a device has failed, weights are out of reach, or the files of a mapped model have
        changed since they were loaded; else None.

        Weights that were read into memory do not change with their file.
        """
        if (failure := self.failure) is not None:
            return failure
        if not self._mapped or _states_now(self._files) == self.states:
            return None
        return ModelFileError(
            f"'{self.path}' was changed, moved or removed while the model was in use.",
            "Its weights are read from that file; load the model again.",
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

    def fail(self, error: EdgeSpecError) -> None:
        """Raise this error wherever the model is to compute from now on: a device has failed."""
        self._failure = error

    @property
    def failure(self) -> EdgeSpecError | None:
        """An error if a device has failed, or weights are out of reach; else None."""
        return self._failure or self.weights.failure()

    @property
    def lost(self) -> bool:
        """True if a device that holds layers is lost, so that nothing there may be freed.

        It may have failed in another model's pass.
        """
        return self._losses.lost or isinstance(self._failure, DeviceLostError)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(llama_cpp.llama_model_size(self.handle))

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors."""
        return int(llama_cpp.llama_model_n_params(self.handle))

    @property
    def keeps_recurrent_state(self) -> bool:
        """True if some layers keep a recurrent state instead of cells (recurrent and hybrid models)."""
        return bool(
            llama_cpp.llama_model_is_recurrent(self.handle) or llama_cpp.llama_model_is_hybrid(self.handle)
        )

    @property
    def keeps_cells(self) -> bool:
        """True if some layers keep cells, one for each token (all but purely recurrent models)."""
        return not llama_cpp.llama_model_is_recurrent(self.handle)

    @property
    def width(self) -> int:
        """Elements of a hidden state."""
        return int(llama_cpp.llama_model_n_embd(self.handle))

    @property
    def input_width(self) -> int:
        """Elements of a row of an image: a hidden state, and what enters further layers (deepstack)."""
        return int(llama_cpp.llama_model_n_embd_inp(self.handle))

    @property
    def output_width(self) -> int:
        """Elements of what the model gives for a row: an embedding, or the feature of an assistant."""
        return int(llama_cpp.llama_model_n_embd_out(self.handle))

    @property
    def n_scores(self) -> int:
        """Scores that a reranker gives to a text; the first one counts."""
        return int(llama_cpp.llama_model_n_cls_out(self.handle))

    @property
    def has_position_parts(self) -> bool:
        """True if a position has four parts, of which texts use the first three (M-RoPE)."""
        return llama_cpp.llama_model_rope_type(self.handle) in _ROPES_OF_PARTS

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template in the file."""
        return self._chat_template(None)

    @property
    def tools_template(self) -> str | None:
        """The Jinja chat template for conversations with tools, where the file has one of its own."""
        return self._chat_template(b"tool_use")

    @property
    def ranking_template(self) -> str | None:
        """The text with places for {query} and {document} that a reranker reads, where the file has one."""
        return self._chat_template(b"rerank")

    def _chat_template(self, name: bytes | None) -> str | None:
        template = llama_cpp.llama_model_chat_template(self.handle, name)
        return template.decode("utf-8", "replace") if template else None

    def forked(self) -> None:
        """Forget handles that belong to the process that this one was forked from."""
        if self._handle:
            self._handle, self._forked = None, True
            self.vocabulary.close(forks.refusal)

    def add_context(self, context: Closable) -> None:
        """Register a context, to be closed before the weights are freed."""
        self._contexts.add(context)

    def close(self) -> None:
        """Free the weights and the contexts that use them; a second call does nothing."""
        if self._handle:
            for context in list(self._contexts):
                context.close()
            if hasattr(self, "vocabulary"):
                self.vocabulary.close()
            handle, self._handle = self._handle, None
            if not self.lost:
                llama_cpp.llama_model_free(handle)
            self.weights.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _without_token_texts(header: GGUFHeader) -> Any:
    """Return overrides of metadata by which llama.cpp knows the size of the vocabulary and no tokens."""
    overrides: Any = (llama_cpp.llama_model_kv_override * 3)()  # an entry without a key ends them
    overrides[0].key = b"tokenizer.ggml.model"
    overrides[0].tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR
    overrides[0].value.val_str = b"none"
    overrides[1].key = f"{header.architecture}.vocab_size".encode()
    overrides[1].tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT
    overrides[1].value.val_i64 = header.n_vocab
    return overrides


def _states_now(paths: tuple[Path, ...]) -> tuple[FileState, ...]:
    """The states of a model's files; empty if one no longer exists."""
    try:
        return states_of(paths)
    except OSError:
        return ()


def load_adapter(model: Model, path: Path) -> Any:
    """An adapter's handle, for `Context.adapt`; llama.cpp frees it with the model.

    Raises:
        ModelFileError: llama.cpp cannot apply it to this model.
    """
    # Adapters go to plain memory where a matrix is in one of the layouts that are offered.
    with log_lines() as log, model.kernels.offered():
        handle = llama_cpp.llama_adapter_lora_init(model.handle, os.fsencode(path))
    if not handle:
        raise ModelFileError(
            f"The LoRA adapter '{path}' cannot be applied to '{model.path.name}': {log.cause()}.",
            "Use an adapter made for this model.",
        )
    return handle
