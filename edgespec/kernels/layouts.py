"""The CPU's kernel layouts: which weights can be rearranged for faster kernels, and rearranging them.

ggml has some, and EdgeSpec's own kernels are one more, which ggml finds before its own. ggml is asked whether
a layout can hold a weight in the same way as llama.cpp asks when it loads a model. So weights rearranged here
are, byte for byte, those of a model that is loaded the usual way.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache

from edgespec.errors import BackendError, UsageError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.native import library
from edgespec.kernels.native.build import sources_digest
from edgespec.kernels.native.library import NodePlanner
from edgespec.kernels.report_store import layouts_in_use, stored_report
from edgespec.kernels.setting import OWN, PLAIN, VARIABLE, instruction_set

_EXPERTS = re.compile(r"exps\.")
# ggml's layout for AMX is slower than EdgeSpec's own, and wrong for several sequences of a model with a
# running state and for stacks of matrices that are not chosen from by index.
_LEFT_OUT = ("AMX",)
_ROWS = 512  # of activations when asking for support; any number would do


@dataclass(frozen=True)
class KernelLayout:
    """An extra CPU buffer type, with ggml's name for it."""

    name: str
    address: Address

    def packed_bytes(self, type_id: int, shape: tuple[int, ...]) -> int:
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
        """Yield the packed bytes without a copy: a view that is valid during the block."""
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
    """The layouts that there are kernels for on this processor, in the order in which ggml finds them.

    The first call registers EdgeSpec's own, and must come before a model is loaded.
    """
    known = stored_report()
    if known is None or OWN not in known.problems:
        library.loaded()
    layouts = tuple(
        KernelLayout(name, address)
        for address in ggml.extra_buffer_types()
        if (name := ggml.functions()["ggml_backend_buft_name"](address).decode()) not in _LEFT_OUT
    )
    if any(layout.name == OWN for layout in layouts):
        # Whoever else loads models in this process would have ggml call into kernels that are not in use.
        with suppress(ggml.UnsupportedBuild):
            ggml.offer_buffer_types([layout.address for layout in layouts if layout.name != OWN])
    return layouts


def supporting_layouts(type_id: int, shape: tuple[int, ...]) -> tuple[KernelLayout, ...]:
    """The available layouts that can hold a matrix, in ggml's order.

    A matrix multiplies activations; a stack of matrices, as experts have, is multiplied by index. EdgeSpec's
    own layout can hold nothing until it is in use (see `use_own`).
    """
    asked = tuple(layout for layout in available_layouts() if layout.name != OWN or _own_in_use)
    return _supporting(type_id, shape, asked)


@cache
def _supporting(
    type_id: int, shape: tuple[int, ...], layouts: tuple[KernelLayout, ...]
) -> tuple[KernelLayout, ...]:
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

        return tuple(layout for layout in layouts if _supports(layout, weight, product))


@cache
def looks_up_rows(layout: KernelLayout, type_id: int, shape: tuple[int, ...]) -> bool:
    """True if embeddings can be looked up in a matrix that is in this layout."""
    with ggml.ScratchContext() as scratch:
        weight, indices = scratch.tensor(type_id, shape), scratch.tensor(ggml.I32, (_ROWS,))
        node = ggml.functions()["ggml_get_rows"](scratch.handle, weight, indices)
        return _supports(layout, weight, node)


def _supports(layout: KernelLayout, weight: Address, node: Address) -> bool:
    """True if ggml can compute a node whose weight is in this layout."""
    f = ggml.functions()
    buffer = f["ggml_backend_buft_alloc_buffer"](layout.address, 0)
    ggml.set_buffer(weight, buffer)
    answer = bool(f["ggml_backend_dev_supports_op"](ggml.cpu_device(), node))
    ggml.set_buffer(weight, None)
    f["ggml_backend_buffer_free"](buffer)
    return answer


def kernel_layouts() -> tuple[KernelLayout, ...]:
    """The layouts in use, in ggml's order: those that are allowed and not known to fail.

    EdgeSpec's own is used once it has been tried.

    Raises:
        UsageError: EDGESPEC_KERNELS names a layout that is not available.
        BackendError: it names a layout that does not work here.
    """
    report = stored_report()
    names = layouts_in_use([layout.name for layout in available_layouts()], report)
    names = tuple(name for name in names if not (name == OWN and report is None))
    if OWN in names:
        use_own()
    return tuple(layout for layout in available_layouts() if layout.name in names)


def use_own() -> None:
    """Have ggml ask EdgeSpec's own kernels about nodes from now on: they compute those with packed weights.

    Raises:
        UsageError: EDGESPEC_KERNELS names an instruction set that this processor or the library lacks.
    """
    global _own_in_use
    own = library.load()
    if (wanted := instruction_set()) and wanted not in own.instruction_sets():
        raise UsageError(
            f"{VARIABLE} asks for the instruction set {wanted}, which is not available here.",
            f"It can be {', '.join(own.instruction_sets())}.",
        )
    if not _own_in_use:
        own.activate()
        _own_in_use = True


@dataclass(frozen=True)
class ModelKernels:
    """The kernels that compute a model, as they were chosen when it was loaded."""

    layouts: tuple[KernelLayout, ...] = ()  # that its weights may be in
    instruction_set: str | None = None  # of EdgeSpec's own kernels; None for the best

    @classmethod
    def chosen(cls) -> ModelKernels:
        """The kernels in use now."""
        return cls(kernel_layouts(), instruction_set())

    @property
    def are_own(self) -> bool:
        """True if weights may be packed for EdgeSpec's own kernels."""
        return any(layout.name == OWN for layout in self.layouts)

    def new_planner(self) -> NodePlanner | None:
        """Return a planner for a context of the model; None if EdgeSpec's own kernels are not plugged in."""
        if all(layout.name != OWN for layout in available_layouts()):
            return None
        own = library.load()
        if not self.are_own:
            return own.leave_to_ggml()
        return own.new_planner(self.instruction_set)

    @contextmanager
    def offered(self) -> Iterator[None]:
        """A block in which llama.cpp's loader has these layouts to choose from.

        Its list of layouts belongs to the process, so other loads wait meanwhile.

        Raises:
            BackendError: the loader cannot be restricted.
        """
        with _offering:
            try:
                ggml.offer_buffer_types([layout.address for layout in self.layouts])
            except ggml.UnsupportedBuild as error:
                raise BackendError(
                    f"Kernel layouts cannot be chosen with this llama.cpp build: {error}.",
                    "Set EDGESPEC_KERNELS=plain, or install the llama-cpp-python that EdgeSpec asks for.",
                ) from error
            yield

    @contextmanager
    def loading(self, *, narrow_head: bool = False) -> Iterator[Callable[[], int]]:
        """A block in which llama.cpp loads a model with these layouts to choose from; raises as `offered`.

        When the loader has returned, the weights are to be packed with the function that the block gets: see
        `NativeLibrary.loading`.
        """
        own = library.load().loading(narrow_head=narrow_head) if self.are_own else nullcontext(lambda: 0)
        with self.offered(), own as pack_next:
            yield pack_next


_offering = threading.RLock()


def kernel_layout(
    type_id: int, shape: tuple[int, ...], layouts: Sequence[KernelLayout] | None = None
) -> KernelLayout | None:
    """The fastest layout for a matrix of a layer; None if that is the file's own.

    Args:
        layouts: to choose from; None for those in use.
    """
    if layouts is None:
        layouts = kernel_layouts()
    able = {layout.name: layout for layout in supporting_layouts(type_id, shape) if layout in layouts}
    return able.get(_preferred(type_id, tuple(able)))


def weight_layout(
    name: str, type_id: int, shape: tuple[int, ...], layouts: Sequence[KernelLayout] | None = None
) -> KernelLayout | None:
    """The layout for a weight of this name; None if that is the file's own.

    Of the stacks of matrices, only experts are multiplied by index. Others, such as DeepSeek's attn_k_b, are
    multiplied as they are, and llama.cpp's loader does not rearrange them.
    """
    if len(shape) == 3 and not _EXPERTS.search(name):
        return None
    return kernel_layout(type_id, shape, layouts)


def measured_products(type_id: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Seconds of products with weights of a quantization, for each of `report.ROWS`, as they were tried.

    Returns:
        Those in the layout that such weights get, and those with weights as they are in files; None if the
        trial has none.
    """
    report = stored_report()
    by_layout = report.seconds.get(type_id, {}) if report is not None else {}
    if PLAIN not in by_layout:
        return None
    able = tuple(layout.name for layout in kernel_layouts() if layout.name in by_layout)
    return by_layout[_preferred(type_id, able)], by_layout[PLAIN]


def kernels_identity() -> str:
    """The layouts in use, and the quantizations that do not take the first one that supports them.

    Kernels of different layouts round differently, so their results must not be mixed.
    """
    names = tuple(layout.name for layout in kernel_layouts())
    versions = [f"{OWN}-{sources_digest()}" if name == OWN else name for name in names]
    return " ".join(["+".join(versions) or PLAIN, *(f"{t}={name}" for t, name in _unusual(names))])


def follows_ggml(layouts: Sequence[KernelLayout]) -> bool:
    """True if each weight takes the first of these layouts that can hold it, as llama.cpp's loader does."""
    return not _unusual(tuple(layout.name for layout in layouts))


def own_in_use() -> bool:
    """True if EdgeSpec's own kernels compute what they can hold."""
    return any(layout.name == OWN for layout in kernel_layouts())


_own_in_use = False


def _unusual(names: tuple[str, ...]) -> list[tuple[int, str]]:
    """Quantizations that do not take the first of these layouts that can hold them, and the one they take."""
    report = stored_report()
    if report is None:
        return []
    found = []
    for type_id, by_layout in sorted(report.seconds.items()):
        able = tuple(name for name in names if name in by_layout)
        if able and (best := report.fastest(type_id, able)) != able[0]:
            found.append((type_id, best))
    return found


def _preferred(type_id: int, able: tuple[str, ...]) -> str:
    report = stored_report()
    if report is None or not able:
        return able[0] if able else PLAIN
    return report.fastest(type_id, able)
