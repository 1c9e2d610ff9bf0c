"""The store of a model's weights while it computes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from edgespec.errors import EdgeSpecError
from edgespec.generation.expert_use import ExpertUse
from edgespec.kernels.ggml import Address, overrides
from edgespec.llama.runtime.graph import GraphObserver

BufferTypes = list[tuple[str, Address]]  # regular expressions over weights' names, and their buffer types


class WeightStore(Protocol):
    """Holds the weights of one model, or leaves them to llama.cpp; `offload` has those that stream them.

    Attributes:
        paths: the files that weights are read from during a pass; none if nothing is read.
        resident_bytes: memory for the weights that this holds itself.
        streamed_bytes: read from disk in every pass.
        waited_s: total seconds that passes have waited for weights.
        setup_s: total seconds that passes have spent on one-time setup for their number of rows.
        read_bytes, reading_s: total bytes read for passes, and total seconds during which reads were under
            way.
        disk_rates: bytes per second that the disk of each file has read so far, if every file is on a disk of
            its own; otherwise empty.
        expert_use: hits and misses of experts so far; None if no single experts are streamed.
        experts_held: the share of a mixture's experts that is in memory at a time.
        observers: of the graph's nodes, in every context of the model.
        rereads: whether these provide rearranged weights that are sent to a device.
        unpinned: whether weights are sent from memory that could not be pinned.
    """

    @property
    def rereads(self) -> bool: ...
    @property
    def unpinned(self) -> bool: ...
    @property
    def paths(self) -> Sequence[Path]: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def streamed_bytes(self) -> int: ...
    @property
    def waited_s(self) -> float: ...
    @property
    def setup_s(self) -> float: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def reading_s(self) -> float: ...
    @property
    def disk_rates(self) -> Mapping[Path, float]: ...
    @property
    def expert_use(self) -> ExpertUse | None: ...
    @property
    def experts_held(self) -> float: ...
    @property
    def observers(self) -> Sequence[GraphObserver]: ...

    def loading(self, path: Path, params: Any, buffer_types: BufferTypes) -> AbstractContextManager[Path]:
        """Wraps llama_model_load_from_file: amends its parameters and yields the path to load.

        Args:
            path: the model's first file.
            buffer_types: for weights that are left to llama.cpp.
        """
        ...

    def loaded(self) -> None:
        """llama.cpp has loaded the model."""
        ...

    def amend_context(self, params: Any, *, sends: bool = False, keeps_views: bool = True) -> None:
        """Amend the parameters of a context of the model.

        Args:
            sends: EdgeSpec decides which products are sent to devices.
            keeps_views: what reads views of weights is computed where the weights are.
        """
        ...

    def keeping_last(self) -> AbstractContextManager[None]:
        """A block in which the last layer stays in memory until the end of a pass."""
        ...

    def failure(self) -> EdgeSpecError | None:
        """An error if weights are out of reach, so that nothing that was computed counts; else None."""
        ...

    def close(self) -> None:
        """Free everything, after the model has been freed."""
        ...


class AllInMemory:
    """All weights are llama.cpp's own: in memory, on a device, or mapped."""

    paths: Sequence[Path] = ()
    resident_bytes = streamed_bytes = read_bytes = 0
    waited_s = reading_s = 0.0
    disk_rates: Mapping[Path, float] = MappingProxyType({})
    expert_use: ExpertUse | None = None
    experts_held = 1.0
    observers: Sequence[GraphObserver] = ()
    rereads = unpinned = False

    @contextmanager
    def loading(self, path: Path, params: Any, buffer_types: BufferTypes) -> Iterator[Path]:
        """Override the buffer types of weights whose names match."""
        table = overrides(buffer_types)
        if buffer_types:
            params.tensor_buft_overrides = ctypes.cast(table, ctypes.c_void_p)
        yield path
        params.tensor_buft_overrides = None

    @property
    def setup_s(self) -> float:
        """Return zero: there is no set-up."""
        return 0.0

    def loaded(self) -> None:
        """Do nothing."""

    def amend_context(self, params: Any, *, sends: bool = False, keeps_views: bool = True) -> None:
        """Amend nothing."""

    def keeping_last(self) -> AbstractContextManager[None]:
        """Do nothing: all layers stay."""
        return nullcontext()

    def failure(self) -> EdgeSpecError | None:
        """Weights in memory do not get lost."""
        return None

    def close(self) -> None:
        """Free nothing."""
