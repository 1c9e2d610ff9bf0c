"""The child process of `kernels.trial`: computes with every kernel layout, and compares with the plain one.

Its last argument is a JSON list of layouts (ggml's names) to leave out; with `sequences` before it, only
several sequences of a model with a running state are tried. Prints one JSON object per line, and announces
each step before taking it: if the process dies, the last line shows where.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import EdgeSpecError
from edgespec.kernels.attention import Attention
from edgespec.kernels.ggml import F16, F32
from edgespec.kernels.layouts import KernelLayout, available_layouts, only, supporting_layouts, use_own
from edgespec.kernels.native import library
from edgespec.kernels.products import FloatArray, Processor, Product, quantized, type_name
from edgespec.kernels.report import ROWS
from edgespec.kernels.setting import OWN, PLAIN
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.llama.trials.tiny_hybrid import WIDTH, write_tiny_hybrid
from edgespec.machine.cores import usable_cores
from edgespec.machine.probe import available_memory
from edgespec.models.gguf.types import BLOCK_SIZES
from edgespec.models.hub import catalog

_LENGTH, _HEIGHT = 2048, 1024  # of the matrix; every block size and tile size divides them
_STACK = 4  # matrices in a stack, as experts have
_DISTINCT = 64  # different rows, which are repeated: quantizing takes longer than multiplying
_MANY = 130  # rows, of which own kernels take some at a time: nothing is timed with so many
_ROUNDS = 5  # of which the fastest counts
_HALVES = (F16, 30)  # and brain floats
_TYPES = [
    type_id
    for type_id, (block, _bytes) in BLOCK_SIZES.items()
    if (block > 1 and type_id not in (9, 15)) or type_id in _HALVES
]
_MAX_CPU_S, _MAX_CPU_S_PER_CORE = 60, 4  # of processor time; a trial takes two to ten
_DECODE_MEMORY = 1 << 30  # bytes that must be free for the real model

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

# Models with a running state: of texts that share a pass.
_SEQUENCES, _TEXT = 3, 6
_SEQUENCE_TYPES = (1, *_TYPES)  # F16 first

# Through the layers of a model the difference grows; unrelated logits have a cosine near 0.
_LEAST_COSINE = 0.9


def main() -> None:
    """Try everything, or several sequences alone."""
    _limit_process()
    *kind, skipped_names = sys.argv[1:]
    skipped = set(json.loads(skipped_names))
    _plug_in(skipped)
    start_backend()
    names = [layout.name for layout in available_layouts()]
    _say("layouts", names=names)
    layouts = [layout for layout in available_layouts() if layout.name not in skipped]
    if kind:
        _try_sequences(layouts)
        _say("done")
        return
    with Processor(usable_cores()) as processor, Processor(1) as core:
        layouts = _try_unpacked(processor, _try_products(processor, core, layouts))
    _try_decoding(layouts)
    _say("done")


def _plug_in(skipped: set[str]) -> None:
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
            trial = _Trial(processor, *given)
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
        shape = (_LENGTH, _DISTINCT, _STACK)
        for layout in supporting_layouts(type_id, shape):
            trial = _Trial(processor, type_id, shape, part * _STACK, activations[: max(ROWS)])
            if layout in layouts and not trial.is_right(layout):
                layouts = [other for other in layouts if other != layout]
    return layouts


def _try_unpacked(processor: Processor, layouts: list[KernelLayout]) -> list[KernelLayout]:
    """Try the nodes without packed weights that EdgeSpec's own kernels compute.

    Returns:
        The layouts whose results are right.
    """
    own = library.loaded()
    if own is None or all(layout.name != OWN for layout in layouts):
        return layouts
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
        return [layout for layout in layouts if layout.name != OWN]
    return layouts


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
    """A product of one quantization type and one number of rows, in any layout."""

    def __init__(
        self,
        processor: Processor,
        type_id: int,
        shape: tuple[int, ...],
        data: bytes,
        activations: FloatArray,
    ) -> None:
        self._given = (processor, type_id, shape, data)
        self._activations = activations
        kind = "by index " if len(shape) == 3 else ""
        self._what = f"multiplying {type_name(type_id)} {kind}with {_rows(len(activations))}"
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
        _say("at", layout=layout.name if layout else PLAIN, what=self._what)
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


def _try_decoding(layouts: list[KernelLayout]) -> None:
    """Decode with the default model, if it is installed and there is enough memory."""
    try:
        path = catalog.find(catalog.DEFAULT, fetch=False)
    except EdgeSpecError:
        return
    if not path.exists() or available_memory() < _DECODE_MEMORY:
        return
    plain = _decoded(path, None)
    if not np.all(np.isfinite(plain)):
        _say("wrong", layout=PLAIN, what="computes nonsense decoding a small model")
        sys.exit(1)
    for layout in layouts:
        if not _least_cosine(_decoded(path, layout), plain) > _LEAST_COSINE:  # true of NaN too
            _say("wrong", layout=layout.name, what="they compute nonsense decoding a small model")


def _decoded(path: Path, layout: KernelLayout | None) -> FloatArray:
    """Logits of a chain of tokens, decoded in batches of each number of rows."""
    _say("at", layout=layout.name if layout else PLAIN, what="decoding a small model")
    found = []
    with only([layout] if layout else []), Model(path) as model:
        context = Context(
            model,
            n_cells=256,
            n_rows=max(ROWS),
            n_outputs=max(ROWS),
            n_sequences=1,
            n_threads=1,  # several were tried above, and on a busy machine threads wait long for each other
        )
        rng = np.random.default_rng(0)
        start = 0
        for rows in ROWS:
            tokens = rng.integers(0, model.vocabulary.n_tokens, rows, dtype=np.int32)
            context.decode(TokenBatch.run(tokens, start, n_sequences=1, logits="all"))
            found.append(context.logits().copy())
            start += rows
        context.close()
    return np.concatenate(found)


def _try_sequences(layouts: list[KernelLayout]) -> None:
    """Decode several sequences of a tiny hybrid in a batch, and one at a time, with every quantization."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((_DISTINCT, WIDTH), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        for type_id in _SEQUENCE_TYPES:
            able = [layout for layout in supporting_layouts(type_id, (WIDTH, WIDTH)) if layout in layouts]
            if not able or quantized(type_id, weights) is None:
                continue
            path = write_tiny_hybrid(Path(folder) / f"{type_id}.gguf", type_id, partial(quantized, type_id))
            what = f"computing several sequences of a model with a running state in {type_name(type_id)}"
            for layout in [None, *able]:
                name = layout.name if layout else PLAIN
                _say("at", layout=name, what=what)
                if not sequences_agree(path, layout):
                    _say("wrong", layout=name, what=f"they compute nonsense {what}")
                    layouts = [other for other in layouts if other != layout]
            path.unlink()


def sequences_agree(path: Path, layout: KernelLayout | None) -> bool:
    """True if a model gives each of several sequences in a batch what it gives that sequence alone."""
    with only([layout] if layout else []), Model(path) as model:
        rng = np.random.default_rng(0)
        tokens = rng.integers(3, model.vocabulary.n_tokens, (_SEQUENCES, _TEXT + 1), dtype=np.int32)
        together, alone = (
            Context(model, n_cells=256, n_rows=64, n_outputs=64, n_sequences=count, n_threads=1)
            for count in (_SEQUENCES, 1)
        )
        for start, end in ((0, _TEXT), (_TEXT, _TEXT + 1)):
            batches = [TokenBatch.run(text[start:end], start, n_sequences=1, logits="all") for text in tokens]
            ids = [np.full(len(batch), number, dtype=np.int32) for number, batch in enumerate(batches)]
            rows = [batch.with_sequences(own) for batch, own in zip(batches, ids, strict=True)]
            together.decode(TokenBatch.joined(rows))
            found = together.logits().copy()
            expected = []
            for text in tokens:
                alone.clear()
                alone.decode(TokenBatch.run(text[:end], 0, n_sequences=1, logits="all"))
                expected.append(alone.logits()[start:end].copy())
            if not _least_cosine(found, np.concatenate(expected)) > _LEAST_COSINE:  # true of NaN too
                return False
        return True


def _error(found: FloatArray, expected: FloatArray) -> float:
    """Mean squared difference over the mean square; infinite if it is not a number."""
    error = float(np.mean((found - expected) ** 2) / np.mean(expected**2))
    return error if np.isfinite(error) else float("inf")


def _least_cosine(found: FloatArray, expected: FloatArray) -> float:
    """The smallest cosine of corresponding rows, each minus its mean."""
    a, b = (values - values.mean(axis=1, keepdims=True) for values in (found, expected))
    return float(np.min(np.sum(a * b, axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)))


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _limit_process() -> None:
    """Write no core dump, and let SIGXCPU end a kernel that hangs, which the parent takes for a verdict."""
    if sys.platform == "win32":
        return  # the parent limits the time
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        seconds = _MAX_CPU_S + _MAX_CPU_S_PER_CORE * usable_cores()
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    except (ImportError, OSError, ValueError):
        pass  # the parent limits the time, too


def _say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)
