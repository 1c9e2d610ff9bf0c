"""Passes of a model that never ran here, from how fast this processor multiplies by its types of weights.

A pass multiplies by every matrix of the model. The speed of that differs by type and number of rows (by four
times between Q4_1 and Q4_K on processors without kernels for the former), so it is measured for each type of
weights, once, in a fraction of a second. A small model measured as a whole would say less: its weights fit in
the processor's caches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from edgespec.base.progress import Progress
from edgespec.costs.curves import Curve
from edgespec.errors import BackendError, InconclusiveTrial
from edgespec.kernels.device_speed import DeviceFailed, measure_speeds
from edgespec.kernels.layouts import measured_products, weight_layout
from edgespec.kernels.report import ROWS
from edgespec.kernels.report_store import ensure_report, stored_report
from edgespec.kernels.setting import PLAIN
from edgespec.machine.contention import ContentionWatch
from edgespec.models.gguf.experts import multiplied
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import BLOCK_SIZES, GGUFHeader
from edgespec.profiles.store import Key, ProfileStore, machine_identity

_FEW = 0.02  # of a model's weights: a type with fewer is taken to be as fast as the usual one

# Attention, norms and the threads' waiting for each other, for each layer: seen from 0.14 to 0.24 ms with one
# row, and from 0.6 to 0.7 ms with 32.
_LAYER_S, _LAYER_ROW_S = 0.2e-3, 16e-6

_TRIED_WEIGHTS = 2048 * 1024  # of the matrix that the trial of the kernels multiplies by
_MEMORY_BYTE_S = 1 / 25e9  # for a byte of weights from a usual desktop's memory
_GUESSED = tuple(_MEMORY_BYTE_S * factor for factor in (1.0, 2.0, 6.0))  # of types that were never measured

Seconds = tuple[float, ...]


class DerivedPasses:
    """Seconds of passes by rows, from the types and sizes of a model's matrices.

    Args:
        threads: what passes compute with.

    Attributes:
        disturbed: whether other programs kept the processor busy meanwhile, or something could not be
            measured; such figures are not stored.
    """

    def __init__(self, store: ProfileStore, threads: int, on_progress: Progress) -> None:
        self.disturbed = False
        self._store = store
        self._threads = threads
        self._on_progress = on_progress
        self._measured: dict[int, Seconds] = {}

    def curve(self, headers: Sequence[GGUFHeader]) -> Curve:
        """Seconds of a pass in memory, by rows.

        Raises:
            BackendError: llama.cpp cannot multiply here.
        """
        if stored_report() is None:
            self._on_progress("Trying the processor's kernels (once)", 0.0)
        ensure_report()
        return _curve(headers, self._seconds)

    def _seconds(self, type_id: int, layout: str) -> Seconds:
        """Seconds for a byte of weights in a layout, for each of ROWS: those of the plain one, corrected."""
        plain = self._plain_seconds(type_id)
        report = stored_report()
        known = report.seconds.get(type_id, {}) if report else {}
        if layout not in known or PLAIN not in known:
            return plain
        return tuple(
            seconds * there / here
            for seconds, there, here in zip(plain, known[layout], known[PLAIN], strict=True)
        )

    def _plain_seconds(self, type_id: int) -> Seconds:
        known = self._measured.get(type_id) or self._store.products(self._key(type_id))
        if known is not None:
            return known
        watch = ContentionWatch(self._threads, computing=True)
        self._on_progress("Measuring how fast this processor multiplies (once)", 0.0)
        try:
            (speed,) = measure_speeds(type_id, self._threads)
        except InconclusiveTrial:
            self.disturbed = True
            guess = known_products(self._store, self._threads, type_id) or _GUESSED
            self._measured[type_id] = guess  # so that it is not tried for every file of a repository
            return guess
        except DeviceFailed as error:
            raise BackendError(
                f"llama.cpp cannot multiply on this processor: the trial failed ({error}).",
                "Find out more: edgespec doctor",
            ) from error
        self._measured[type_id] = speed.seconds
        if watch.disturbed:
            self.disturbed = True
        else:
            self._store.put_products(self._key(type_id), speed.seconds)
        return speed.seconds

    def _key(self, type_id: int) -> Key:
        return machine_identity() | {"threads": str(self._threads), "type": str(type_id)}


def known_curve(headers: Sequence[GGUFHeader], store: ProfileStore, threads: int) -> Curve:
    """Seconds of a pass in memory, by rows, from what is known already; nothing is measured now."""
    return _curve(headers, lambda type_id, _layout: known_products(store, threads, type_id) or _GUESSED)


def _curve(headers: Sequence[GGUFHeader], seconds: Callable[[int, str], Seconds]) -> Curve:
    """Seconds of a pass in memory.

    Args:
        seconds: for a byte of weights of a type in a layout, for each of ROWS.
    """
    files = ModelFiles.of_headers(headers)
    alike: dict[tuple[str, int, tuple[int, ...]], float] = defaultdict(float)
    for tensor, share in multiplied(files):
        name = tensor.name.rpartition("blk.")[2].lstrip("0123456789")
        alike[name, tensor.type_id, tensor.shape] += share * tensor.n_bytes
    n_bytes: dict[tuple[int, str], float] = defaultdict(float)
    for (name, type_id, shape), size in alike.items():
        layout = weight_layout(name, type_id, shape)
        n_bytes[type_id, layout.name if layout else PLAIN] += size
    total = sum(n_bytes.values())
    usual = max(n_bytes, key=lambda kind: n_bytes[kind])
    products = [0.0] * len(ROWS)
    for kind, size in n_bytes.items():
        speed = seconds(*(kind if size >= _FEW * total else usual))
        products = [sum_s + size * byte_s for sum_s, byte_s in zip(products, speed, strict=True)]
    return pass_curve(products, files.headers[0].block_count or 0)


def pass_curve(products: Sequence[float], layers: int) -> Curve:
    """Seconds of passes by rows, from those of all products for each of ROWS."""
    return Curve.through(
        (rows, seconds + layers * (_LAYER_S + rows * _LAYER_ROW_S))
        for rows, seconds in zip(ROWS, products, strict=True)
    )


def known_products(store: ProfileStore, threads: int, type_id: int) -> Seconds | None:
    """Seconds for a byte of weights of a type, if something was measured of them; nothing is measured now.

    Weights that come from memory were measured if a plan needed them. Otherwise the trial of the kernels has
    measured products within one core's cache.
    """
    key = machine_identity() | {"threads": str(threads), "type": str(type_id)}
    stored = store.products(key)
    if stored is not None or (known := measured_products(type_id)) is None:
        return stored
    within, _ = known
    n_bytes = _TRIED_WEIGHTS * BLOCK_SIZES[type_id][1] // BLOCK_SIZES[type_id][0]
    alone = [seconds / n_bytes / threads for seconds in within]
    return tuple(max(seconds, _MEMORY_BYTE_S) for seconds in alone)
