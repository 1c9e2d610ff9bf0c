"""Times of passes with the weights in one place: python -m tests.card.passes JSON

The JSON object has the fields of `Placement`. Prints JSON: what loading took and where the weights are,
seconds of passes by number of rows, and a sample of logits, to be compared between placements.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.kernels import ggml
from edgespec.llama.runtime.backend import log_lines, start_backend
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.device_layers import ON_PROCESSOR, DeviceLayers
from edgespec.llama.runtime.model import Model
from edgespec.llama.runtime.weight_store import AllInMemory, BufferTypes
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.layout import plain_store
from edgespec.offload.weights import StreamedWeights
from tests.card.device import card, free_bytes

_FFN = r"blk\.{layer}\.ffn_(up|down|gate)\."  # as llama.cpp's --n-cpu-ffn has it
_COMPARED = 8  # rows
_SAMPLE = 256  # logits of each
_FEWEST, _MOST = 3, 20  # passes to time


@dataclass(frozen=True)
class Placement:
    """A place of a model's weights, and what to time there.

    Attributes:
        device: ggml's name of the card; empty for the processor alone.
        layers: on the card, the last ones, with the output; llama.cpp's -ngl counts it as one more.
        cpu_ffn: layers whose feed-forward weights are not there all the same, the first ones.
        streamed: these are read from disk in every pass, and not kept in memory.
        memory_map: weights in memory are those of the mapped file.
        pinned: they are in memory that is pinned for the card.
        rearranged: they are in EdgeSpec's layouts for the processor, as far as they are not pinned.
        offload: products of many rows are sent to the card, from so many rows on; 0 for never.
        rows: of the passes.
        seconds: to be spent at most on each number of rows; once a pass takes longer, no larger ones follow.
        depth: tokens in the cache before the pass.
    """

    model: str
    device: str = ""
    layers: int = 0
    cpu_ffn: int = 0
    streamed: bool = False
    memory_map: bool = False
    pinned: bool = True
    rearranged: bool = False
    offload: tuple[int, ...] = (32,)
    rows: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256)
    seconds: float = 3.0
    depth: int = 0
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)


def main() -> None:
    """Load, time and print."""
    order = json.loads(sys.argv[1])
    print(
        json.dumps(
            measure(Placement(**{k: tuple(v) if isinstance(v, list) else v for k, v in order.items()}))
        )
    )


def measure(placement: Placement) -> dict[str, Any]:
    """The times of a placement, for each bound of sending products to the card."""
    device = card(placement.device) if placement.device else None
    start_backend()
    before = free_bytes(device) if device else 0
    weights = streamed_weights(placement, device) if placement.streamed else PlacedWeights(placement)
    begun = time.perf_counter()
    with log_lines() as log:
        model = Model(
            Path(placement.model),
            devices=DeviceLayers.of([(device, placement.layers)], output=True) if device else ON_PROCESSOR,
            memory_map=placement.memory_map,
            repack=placement.rearranged,
            weights=weights,
            vetted=False,
            sent_from=1 if placement.streamed else None,
        )
    found: dict[str, Any] = {
        "load_s": time.perf_counter() - begun,
        "buffers": [line.partition(":")[2].strip() for line in log.info if "model buffer size" in line],
        "passes": {},
    }
    # The bound is read when ggml starts. Products of fewer rows are not sent, and a context can send none at
    # all: so a bound of 1 and contexts that send and do not show both sides of every other bound.
    for sends in sorted({bool(bound) for bound in placement.offload}):
        weights.sends = sends
        rows = max(placement.rows)
        context = Context(
            model,
            n_cells=placement.depth + rows + 256,
            n_rows=rows,
            n_outputs=rows,
            n_sequences=1,
            n_threads=placement.threads,
        )
        found["card_bytes"] = before - free_bytes(device) if device else 0
        label = os.environ.get("GGML_OP_OFFLOAD_MIN_BATCH", "32") if sends and device else "never"
        found["passes"][label], found["logits"] = _times(placement, context)
        context.close()
    model.close()
    return found


class PlacedWeights(AllInMemory):
    """Weights in memory and on a card, as a placement says.

    Attributes:
        sends: whether products of many rows are sent to the card, in the next context.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.sends = True

    @contextmanager
    def loading(self, path: Path, params: Any, buffer_types: BufferTypes) -> Iterator[Path]:
        """Keep feed-forward weights in memory, as llama.cpp's --n-cpu-ffn does."""
        # llama.cpp takes this type to be the first one in its list for the processor: pinned memory, then
        # rearranged, then plain.
        here = ggml.functions()["ggml_backend_cpu_buffer_type"]()
        ffn = [(_FFN.format(layer=layer), here) for layer in range(self._placement.cpu_ffn)]
        params.no_host = not self._placement.pinned
        with super().loading(path, params, buffer_types + ffn) as where:
            yield where

    def amend_context(self, params: Any, **_: bool) -> None:
        """Let products be sent, or not."""
        params.op_offload = self.sends


class StreamedFeedForward(StreamedWeights):
    """Feed-forward weights that are read from disk in every pass.

    Attributes:
        sends: as for `PlacedWeights`.
    """

    sends = True

    def amend_context(self, params: Any, **device: bool) -> None:
        """Let products be sent, or not."""
        super().amend_context(params, **device)
        params.op_offload = params.op_offload and self.sends


def streamed_weights(placement: Placement, device: Any) -> StreamedFeedForward:
    """The streamed weights of a placement."""
    files = ModelFiles.of(read_header(Path(placement.model)))
    layers = [
        replace(layer, tensors=tuple(t for t in layer.tensors if re.match(_FFN.format(layer=index), t.name)))
        for index, layer in enumerate(files.layers()[: placement.cpu_ffn])
    ]
    store = plain_store(files, layers)
    return StreamedFeedForward(files, store, list(store.layers), n_slots=2, sent_to=device)


def _times(placement: Placement, context: Context) -> tuple[dict[str, float], list[list[float]]]:
    """Seconds of passes by rows, the best of some each; and a sample of the logits of some rows."""
    n_vocab, depth = context.model.vocabulary.n_tokens, placement.depth
    tokens = np.random.default_rng(0).integers(300, n_vocab, depth + max(placement.rows)).tolist()
    for start in range(0, depth, max(placement.rows)):
        piece = tokens[start : min(start + max(placement.rows), depth)]
        context.decode(TokenBatch.run(piece, start, 1, "last"))
    context.decode(TokenBatch.run(tokens[depth : depth + _COMPARED], depth, 1, "all"))
    sample = [[float(x) for x in logits[:: max(n_vocab // _SAMPLE, 1)]] for logits in context.logits()]
    found: dict[str, float] = {}
    for rows in placement.rows:
        batch = TokenBatch.run(tokens[depth : depth + rows], depth, 1, "all")
        taken: list[float] = []
        while len(taken) < _FEWEST or (sum(taken) < placement.seconds / 3 and len(taken) < _MOST):
            context.remove(0, depth)
            begun = time.perf_counter()
            context.decode(batch)
            context.logits()
            taken.append(time.perf_counter() - begun)
            if sum(taken) > placement.seconds and len(taken) > 1:
                break
        found[str(rows)] = min(taken[1:])  # the first one sets up its number of rows
        if found[str(rows)] > placement.seconds:
            break
    return found, sample


if __name__ == "__main__":
    main()
