"""The child process of `kernels.trial`: computes with every kernel layout, and compares with the plain one.

Its last argument is a JSON array of the layouts (ggml's names) to leave out. Prints one JSON object per line,
and announces each step before taking it: if the process dies, the last line shows where.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.kernels.attention import Attention
from edgespec.kernels.ggml import F32
from edgespec.kernels.layouts import (
    KernelLayout,
    available_layouts,
    looks_up_rows,
    supporting_layouts,
    use_own,
)
from edgespec.kernels.native import library
from edgespec.kernels.products import FloatArray, Processor, Product, quantized, type_name
from edgespec.kernels.report import ROWS
from edgespec.kernels.setting import OWN, PLAIN
from edgespec.machine.cores import usable_cores
from edgespec.processes.limits import limit_trial

_LENGTH, _HEIGHT = 2048, 1024  # of the matrix; every block size and tile size divides them
_STACK = 4  # matrices in a stack, as experts have
_DISTINCT = 64  # different rows, which are repeated: quantizing takes longer than multiplying
_MANY = 130  # rows, of which own kernels take some at a time: nothing is timed with so many
_ROUNDS = 5  # of which the fastest counts
# ggml's numbers of F16, BF16 and the quantizations that files have.
_TYPES = (1, 2, 3, *range(6, 9), *range(10, 15), *range(16, 24), 29, 30, 34, 35, *range(39, 43))
_MAX_CPU_S, _MAX_CPU_S_PER_CORE = 60, 4  # of processor time; a trial takes two to ten

_Q8_0 = 8
_ATTENTION = (
    Attention(64, 6, 2, 96),
    Attention(128, 8, 1, 70, cap=20.0),
    Attention(64, 2, 2, 70),
    Attention(64, 4, 2, 96, kept_as=_Q8_0),
)
_FLOAT_SHAPE = (_DISTINCT + 3, 37)  # of a router; neither is a multiple of a vector's width

# Layouts quantize activations and sum up in different ways, so results differ by rounding. llama.cpp's own
# comparison of backends allows this normalized squared error; wrong results have about 1 or 2. A single wrong
# element hardly changes the sum, so each element must also be within a fraction of the root mean square.
_MAX_ERROR = 5e-4
_MAX_DEVIATION = 0.25

# Plain products are compared with the unquantized matrix, which 2 bits per weight approximate only roughly.
_MAX_QUANTIZATION_ERROR = 0.5

# Models with a running state multiply by the rows of several sequences at once.
_SEQUENCES, _TEXTS = 3, (1, 6)  # and rows of each


def main() -> None:
    """Try everything, or several sequences alone."""
    with suppress(OSError, ValueError):  # the parent limits the time, too
        limit_trial(_MAX_CPU_S + _MAX_CPU_S_PER_CORE * usable_cores())
    skipped = json.loads(sys.argv[-1])
    _plug_in(skipped)
    names = [layout.name for layout in available_layouts()]
    _say("layouts", names=names)
    layouts = [layout for layout in available_layouts() if layout.name not in skipped]
    with Processor(usable_cores()) as processor, Processor(1) as core:
        # First, because a layout that crashes has everything tried again without it.
        layouts = _try_sequences(processor, layouts)
        layouts = _try_products(processor, core, layouts)
        _try_unpacked(processor, layouts)
    _say("done")


def _plug_in(skipped: list[str]) -> None:
    """Make ggml ask EdgeSpec's own kernels about every node before it computes any with other layouts.

    So a crash while it does is theirs.
    """
    if OWN in skipped:
        library.leave_out()
    if library.loaded() is None:
        return
    _say("layouts", names=[OWN])
    _say("at", layout=OWN, what="plugging them in")
    use_own()
    values = np.ones((1, _DISTINCT), dtype=np.float32)
    with Processor(1) as core, Product(core, F32, (_DISTINCT, 1), values.tobytes(), None, values) as made:
        made.compute()


def _try_products(processor: Processor, core: Processor, layouts: list[KernelLayout]) -> list[KernelLayout]:
    """Try products with all threads, and time them with one, which waits for no other on a busy machine.

    Returns:
        The layouts whose results are right.
    """
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((_DISTINCT, _LENGTH), dtype=np.float32)
    activations = rng.standard_normal((_MANY, _LENGTH), dtype=np.float32)
    exact = np.tile(activations @ weights.T, _HEIGHT // _DISTINCT)
    for type_id in _TYPES:
        shape: tuple[int, ...] = (_LENGTH, _HEIGHT)
        able = [layout for layout in supporting_layouts(type_id, shape) if layout in layouts]
        if not able or (part := quantized(type_id, weights)) is None:
            continue
        data = part * (_HEIGHT // _DISTINCT)
        seconds: dict[str, list[float]] = {PLAIN: []}
        own: list[FloatArray] = []
        for rows in (*ROWS, _MANY):
            if rows == _MANY and not any(layout.name == OWN for layout in able):
                continue
            given = (type_id, shape, data, activations[:rows])
            trial = _Trial(processor, *given, f"multiplying {type_name(type_id)} with {_rows(rows)}")
            if not trial.plain_is_right(exact[:rows]):
                sys.exit(1)  # there is nothing to compare with
            wrong = [layout for layout in able if not trial.is_right(layout)]
            if (found := trial.results.get(OWN)) is not None:
                own.append(found)
                right = [layout for layout in able if layout not in wrong]
                wrong += [layout for layout in right if layout.name == OWN and not _same_bits(own, type_id)]
            layouts = [layout for layout in layouts if layout not in wrong]
            able = [layout for layout in able if layout not in wrong]
            if rows != _MANY:
                for name, best in _fastest(core, able, *given).items():
                    seconds.setdefault(name, []).append(best)
        _say("seconds", type=type_id, seconds={n: s for n, s in seconds.items() if len(s) == len(ROWS)})
        stack = (_LENGTH, _DISTINCT, _STACK)
        if able := [layout for layout in supporting_layouts(type_id, stack) if layout in layouts]:
            what = f"multiplying {type_name(type_id)} by index"
            trial = _Trial(processor, type_id, stack, part * _STACK, activations[: max(ROWS)], what)
            layouts = [each for each in layouts if each not in able or trial.is_right(each)]
        shape = (_LENGTH, _DISTINCT)
        if able := [layout for layout in layouts if looks_up_rows(layout, type_id, shape)]:
            what = f"looking up rows of {type_name(type_id)}"
            trial = _Trial(processor, type_id, shape, part, np.arange(max(ROWS), dtype=np.int32), what)
            layouts = [each for each in layouts if each not in able or trial.is_right(each)]
    return layouts


def _try_unpacked(processor: Processor, layouts: list[KernelLayout]) -> None:
    """Try the nodes without packed weights that EdgeSpec's own kernels compute."""
    own = library.loaded()
    if own is None or all(layout.name != OWN for layout in layouts):
        return
    nodes: list[tuple[str, int, Callable[[int, library.NativeLibrary | None], FloatArray]]] = [
        (f"computing attention in heads of {each.size}", each.cells, partial(each.compute, processor))
        for each in _ATTENTION
    ]
    nodes.append((f"multiplying {type_name(F32)}", _MANY, partial(_float_product, processor)))
    for what, most, compute in nodes:
        _say("at", layout=PLAIN, what=what)
        expected = compute(most, None)
        _say("at", layout=OWN, what=what)
        found = {rows: compute(rows, own) for rows in (1, max(ROWS), most)}
        last = found[most]
        if not _error(last, expected) < _MAX_ERROR:
            _say("wrong", layout=OWN, what=f"they compute nonsense {what}")
        elif not all(np.array_equal(part, last[:rows]) for rows, part in found.items()):
            _say("wrong", layout=OWN, what=f"their results depend on the number of rows {what}")
        else:
            continue
        return


def _float_product(processor: Processor, rows: int, own: library.NativeLibrary | None) -> FloatArray:
    """(rows, matrix rows) the product of an F32 matrix; `own` computes it, or else ggml."""
    rng = np.random.default_rng(0)
    length, height = _FLOAT_SHAPE
    weights = rng.standard_normal((height, length), dtype=np.float32)
    activations = rng.standard_normal((_MANY, length), dtype=np.float32)[:rows]
    with ExitStack() as stack:
        if own is not None:
            stack.enter_context(own.new_planner())
        given = (processor, F32, _FLOAT_SHAPE, weights.tobytes(), None, activations)
        made = stack.enter_context(Product(*given))
        made.compute()
        return made.result()


class _Trial:
    """A product of one quantization type with given activations, in any layout.

    Args:
        what: is computed, for messages: "multiplying ...".
    """

    def __init__(
        self,
        processor: Processor,
        type_id: int,
        shape: tuple[int, ...],
        data: bytes,
        activations: NDArray[Any],
        what: str,
    ) -> None:
        self._given = (processor, type_id, shape, data)
        self._activations = activations
        self._what = what
        self.results: dict[str, FloatArray] = {}
        self._plain = self._result(None)

    def plain_is_right(self, exact: FloatArray) -> bool:
        """True if the plain product is near that of the unquantized matrix; reports it if not."""
        if _error(self._plain, exact) < _MAX_QUANTIZATION_ERROR:
            return True
        _say("wrong", layout=PLAIN, what=f"computes nonsense {self._what}")
        return False

    def is_right(self, layout: KernelLayout) -> bool:
        """True if a layout's product equals the plain one except for rounding; reports it if not."""
        found = self._result(layout)
        scale = float(np.sqrt(np.mean(self._plain**2)))
        deviation = float(np.max(np.abs(found - self._plain))) / scale
        if _error(found, self._plain) < _MAX_ERROR and deviation < _MAX_DEVIATION:
            return True
        _say("wrong", layout=layout.name, what=f"they compute nonsense {self._what}")
        return False

    def _result(self, layout: KernelLayout | None) -> FloatArray:
        name = layout.name if layout else PLAIN
        _say("at", layout=name, what=self._what)
        with Product(*self._given, layout, self._activations) as made:
            made.compute()
            result = made.result()
        if layout is not None:
            self.results[layout.name] = result
        return result


def _same_bits(results: list[FloatArray], type_id: int) -> bool:
    """True if the last result, of more rows, has the bits of those before; reports it if not."""
    if all(np.array_equal(results[-1][: len(earlier)], earlier) for earlier in results):
        return True
    what = f"their results depend on the number of rows multiplying {type_name(type_id)}"
    _say("wrong", layout=OWN, what=what)
    return False


def _fastest(
    core: Processor,
    layouts: list[KernelLayout],
    type_id: int,
    shape: tuple[int, ...],
    data: bytes,
    activations: FloatArray,
) -> dict[str, float]:
    """Seconds of a product with the plain layout and these, in turns, because other programs may run."""
    with ExitStack() as stack:
        products = {}
        for layout in [None, *layouts]:
            made = Product(core, type_id, shape, data, layout, activations)
            products[layout.name if layout else PLAIN] = stack.enter_context(made)
        rounds = [{name: each.compute() for name, each in products.items()} for _ in range(_ROUNDS)]
    return {name: min(found[name] for found in rounds) for name in products}


def _try_sequences(processor: Processor, layouts: list[KernelLayout]) -> list[KernelLayout]:
    """Try products with rows of several sequences, which those of models with a running state are.

    Returns:
        The layouts whose results are right.
    """
    rng = np.random.default_rng(0)
    shape = (_DISTINCT * _STACK, _DISTINCT)
    weights = rng.standard_normal(shape[::-1], dtype=np.float32)
    for type_id in _TYPES:
        able = [layout for layout in supporting_layouts(type_id, shape) if layout in layouts]
        if not able or (data := quantized(type_id, weights)) is None:
            continue
        for rows in _TEXTS:
            values = rng.standard_normal((_SEQUENCES, rows, shape[0]), dtype=np.float32)
            what = f"multiplying {type_name(type_id)} with {_rows(rows)} of several sequences"
            trial = _Trial(processor, type_id, shape, data, values, what)
            if not trial.plain_is_right(values @ weights.T):
                sys.exit(1)
            wrong = [layout for layout in able if not trial.is_right(layout)]
            layouts = [layout for layout in layouts if layout not in wrong]
            able = [layout for layout in able if layout not in wrong]
    return layouts


def _error(found: FloatArray, expected: FloatArray) -> float:
    """Mean squared difference over the mean square; infinite if it is not a number."""
    error = float(np.mean((found - expected) ** 2) / np.mean(expected**2))
    return error if np.isfinite(error) else float("inf")


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)
