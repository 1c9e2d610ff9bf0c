"""The CPU's kernel layouts: which weights ggml can rearrange for its fastest kernels, and rearranging them.

ggml is asked whether a layout can hold a weight in the same way as llama.cpp asks when it loads a model. So
weights rearranged here are, byte for byte, those of a model that is loaded the usual way.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from edgespec.errors import BackendError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.report_store import (
    ensure_report,
    faulty_with_sequences,
    layouts_in_use,
    stored_report,
)
from edgespec.kernels.setting import PLAIN

_EXPERTS = re.compile(r"exps\.")
_ROWS = 512  # of activations when asking for support; any number would do


@dataclass(frozen=True)
class KernelLayout:
    """An extra CPU buffer type, with ggml's name for it."""

    name: str
    address: Address

    def packed_bytes(self, type_id: int, shape: tuple[int, ...]) -> int:
        """Bytes of a weight in this layout."""
        with ggml.ScratchContext() as scratch:
            tensor = scratch.tensor(type_id, shape)
            return int(ggml.functions()["ggml_backend_buft_get_alloc_size"](self.address, tensor))

    def pack(self, type_id: int, shape: tuple[int, ...], weights: Address, n_bytes: int) -> bytes:
        """A weight's bytes in this layout, from its `n_bytes` bytes in the file's layout."""
        with self.packed(type_id, shape, weights, n_bytes) as view:
            return bytes(view)

    @contextmanager
    def packed(
        self, type_id: int, shape: tuple[int, ...], weights: Address, n_bytes: int
    ) -> Iterator[memoryview]:
        """The same without a copy: a view that is valid during the block."""
        f = ggml.functions()
        with ggml.ScratchContext() as scratch:
            tensor = scratch.tensor(type_id, shape)
            size = f["ggml_backend_buft_get_alloc_size"](self.address, tensor)
            # Some layouts leave their last bytes unset, which would make the packed file's bytes vary.
            buffer = f["ggml_backend_buft_alloc_buffer"](self.address, size + 4096)
            if not buffer:
                raise MemoryError(f"cannot allocate {size} bytes to rearrange a weight")
            try:
                base = f["ggml_backend_buffer_get_base"](buffer)
                ctypes.memset(base, 0, size)
                f["ggml_backend_tensor_alloc"](buffer, tensor, base)
                f["ggml_backend_tensor_set"](tensor, weights, 0, n_bytes)
                with memoryview((ctypes.c_uint8 * size).from_address(base)).cast("B") as view:
                    yield view
            finally:
                f["ggml_backend_buffer_free"](buffer)


@cache
def available_layouts() -> tuple[KernelLayout, ...]:
    """The layouts that llama.cpp has kernels for on this processor, in ggml's order."""
    return tuple(
        KernelLayout(ggml.functions()["ggml_backend_buft_name"](address).decode(), address)
        for address in ggml.extra_buffer_types()
    )


@cache
def supporting_layouts(type_id: int, shape: tuple[int, ...]) -> tuple[KernelLayout, ...]:
    """The available layouts that can hold a matrix, in ggml's order.

    A matrix multiplies activations; a stack of matrices, as experts have, is multiplied by index.
    """
    if len(shape) not in (2, 3):
        return ()
    f = ggml.functions()
    with ggml.ScratchContext() as scratch:
        weight = scratch.tensor(type_id, shape)
        if len(shape) == 2:
            rows = scratch.tensor(ggml.F32, (shape[0], _ROWS))
            product = f["ggml_mul_mat"](scratch.handle, weight, rows)
        else:
            rows = scratch.tensor(ggml.F32, (shape[0], 1, _ROWS))
            indices = scratch.tensor(ggml.I32, (1, _ROWS))
            product = f["ggml_mul_mat_id"](scratch.handle, weight, rows, indices)

        def supports(layout: KernelLayout) -> bool:
            buffer = f["ggml_backend_buft_alloc_buffer"](layout.address, 0)
            ggml.set_buffer(weight, buffer)
            answer = bool(f["ggml_backend_dev_supports_op"](ggml.cpu_device(), product))
            ggml.set_buffer(weight, None)
            f["ggml_backend_buffer_free"](buffer)
            return answer

        return tuple(layout for layout in available_layouts() if supports(layout))


def kernel_layouts() -> tuple[KernelLayout, ...]:
    """The layouts in use, in ggml's order: those that are allowed and not known to fail.

    Raises:
        UsageError: EDGESPEC_KERNELS names a layout that is not available.
        BackendError: it names a layout that does not work here.
    """
    if _only is not None:
        return _only
    names = layouts_in_use([layout.name for layout in available_layouts()], stored_report())
    return tuple(
        layout for layout in available_layouts() if layout.name in names and layout.name not in _left_out
    )


def kernel_layout(type_id: int, shape: tuple[int, ...]) -> KernelLayout | None:
    """The fastest layout for a matrix of a layer; None if that is the file's own.

    Raises:
        UsageError, BackendError: as kernel_layouts.
    """
    layouts = kernel_layouts()
    able = {layout.name: layout for layout in supporting_layouts(type_id, shape) if layout in layouts}
    return able.get(_preferred(type_id, tuple(able)))


def weight_layout(name: str, type_id: int, shape: tuple[int, ...]) -> KernelLayout | None:
    """The layout for a weight of this name; None if that is the file's own.

    Of the stacks of matrices, only experts are multiplied by index. Others, such as DeepSeek's attn_k_b, are
    multiplied as they are, and llama.cpp's loader does not rearrange them.

    Raises:
        UsageError, BackendError: as kernel_layouts.
    """
    if len(shape) == 3 and not _EXPERTS.search(name):
        return None
    return kernel_layout(type_id, shape)


def kernels_identity() -> str:
    """The layouts in use, and the quantizations that do not take the first one that supports them.

    Kernels of different layouts round differently, so their results must not be mixed.

    Raises:
        UsageError, BackendError: as kernel_layouts.
    """
    names = tuple(layout.name for layout in kernel_layouts())
    return " ".join(["+".join(names) or PLAIN, *(f"{t}={name}" for t, name in _unusual(names))])


def follows_ggml() -> bool:
    """Whether each weight takes the first layout in use that can hold it, as llama.cpp's loader does."""
    return not _unusual(tuple(layout.name for layout in kernel_layouts()))


@contextmanager
def for_sequences_with_states() -> Iterator[None]:
    """Leave out layouts that compute several sequences of a model with a running state wrongly.

    Raises:
        BackendError, UsageError: as `report_store.faulty_with_sequences`.
    """
    global _left_out
    before, _left_out = _left_out, _left_out | _faulty()
    try:
        yield
    finally:
        _left_out = before


def check_sequences_with_states(layouts: Sequence[str]) -> None:
    """Refuse to compute several sequences of a model with a running state in layouts that are wrong there.

    Args:
        layouts: ggml's names of those that the model was loaded with.

    Raises:
        BackendError: one of them is.
        UsageError: as `report_store.faulty_with_sequences`.
    """
    faulty = [name for name in layouts if name in _faulty()]
    if faulty:
        raise BackendError(
            f"llama.cpp's {faulty[0]} kernels compute nonsense where several sequences of a model with a "
            "running state share a pass.",
            "Set EDGESPEC_KERNELS=plain.",
        )


def _faulty() -> frozenset[str]:
    """What is known of several sequences; nothing within the process that tries it."""
    return frozenset() if _only is not None else faulty_with_sequences()


def offer_to_loader() -> bool:
    """Restrict llama.cpp's loader to the layouts in use, which are tried first if they have not been yet.

    Returns:
        Whether there are any, which is the value for `use_extra_bufts`.

    Raises:
        UsageError: as kernel_layouts.
        BackendError: as kernel_layouts; or the loader cannot be restricted, or llama.cpp does not work here.
    """
    if _only is None:
        ensure_report()
    layouts = kernel_layouts()
    if layouts:
        try:
            ggml.offer_buffer_types([layout.address for layout in layouts])
        except ggml.UnsupportedBuild as error:
            raise BackendError(
                f"Kernel layouts cannot be chosen with this llama.cpp build: {error}.",
                "Set EDGESPEC_KERNELS=plain, or install the llama-cpp-python that EdgeSpec asks for.",
            ) from error
    return bool(layouts)


@contextmanager
def only(layouts: Sequence[KernelLayout]) -> Iterator[None]:
    """Use these layouts whatever is known and allowed; for trying them in a process of their own."""
    global _only
    before, _only = _only, tuple(layouts)
    try:
        yield
    finally:
        _only = before


_only: tuple[KernelLayout, ...] | None = None
_left_out: frozenset[str] = frozenset()


def _unusual(names: tuple[str, ...]) -> list[tuple[int, str]]:
    """Quantizations that do not take the first of these layouts that can hold them, and the one they take."""
    report = stored_report()
    if report is None or _only is not None:
        return []
    found = []
    for type_id, by_layout in sorted(report.seconds.items()):
        able = tuple(name for name in names if name in by_layout)
        if able and (best := report.fastest(type_id, able)) != able[0]:
            found.append((type_id, best))
    return found


def _preferred(type_id: int, able: tuple[str, ...]) -> str:
    report = stored_report()
    if _only is not None or report is None or not able:
        return able[0] if able else PLAIN
    return report.fastest(type_id, able)
