"""A process in which a worker's device looks like a graphics card: python -m tests.card_session JSON

llama.cpp shows both as devices of the same kind. Devices cannot be taken back, and ggml ends a process that
asks one that is gone, so this is a process of its own. The JSON object has "address", "model" and "drafter",
and either tiny models ("mixture", and "target" with "head" and "adapter"), or, for the case of too little
memory, "server" (the worker's process that computes), or "pins" to load with a device that pins memory, or
"views", a tiny model that reads views of weights, for weights that are sent where something is in the way, or
"fails" for a device that fails in the middle of an answer: one of the library, or of a "command". The answers
are printed as JSON, by case.
"""

from __future__ import annotations

import ctypes
import io
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

import edgespec
from edgespec import GenerationConfig
from edgespec.base.progress import no_progress
from edgespec.cli.main import main as cli_main
from edgespec.config import Config, DevicesConfig
from edgespec.costs.curves import Curve
from edgespec.costs.sending import NEVER
from edgespec.engine.decoding import Decoder
from edgespec.engine.engine import Engine
from edgespec.errors import EdgeSpecError, StreamError
from edgespec.kernels import ggml
from edgespec.kernels.device_speed import measure_speeds, refuses_to_pin, transfer_times
from edgespec.kernels.ggml import rpc
from edgespec.kernels.ggml.buffer_types import device_named
from edgespec.kernels.ggml.functions import exported
from edgespec.kernels.ggml.structs import Buffer, BufferType
from edgespec.kernels.layouts import kernel_layouts
from edgespec.kernels.watch import Watch
from edgespec.llama.build import current_build
from edgespec.llama.runtime import device_failures
from edgespec.llama.runtime.backend import LogLines, log_lines
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.device_failures import device_error
from edgespec.llama.runtime.device_layers import DeviceLayers
from edgespec.llama.runtime.graph import GraphObserver
from edgespec.llama.runtime.model import Model
from edgespec.llama.runtime.weight_store import WeightStore
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.layout import plain_store
from edgespec.offload.reread import RereadWeights
from edgespec.offload.store_reader import StoreReader
from edgespec.offload.weight_memory import PinnedMemory
from edgespec.offload.weights import StreamedWeights
from edgespec.planning.devices.assignment import usual_type
from edgespec.planning.devices.cards import Card
from edgespec.planning.devices.finding import PlacementRequest, measured, remember
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.host_products import host_costs
from edgespec.planning.report.model_report import plan_for
from edgespec.profiles.figures import DeviceProfile
from edgespec.profiles.store import ProfileStore
from tests.least_memory import load_in_least_memory

PROMPT = "Why is the sky blue?"
ANSWER = GenerationConfig(max_tokens=16)
OPTIONS: dict[str, Any] = {"draft": "none", "context": 512, "threads": 1}
SOME = 200 << 20
FREE = Curve.through([(1 << 14, 1e-9), (1 << 24, 2e-9)])  # a link that takes no time
# In ggml's tables of a device's and of a backend's functions.
_GET_MEMORY, _INIT_BACKEND, _HOST_BUFFER_TYPE = 2, 5, 7
_GRAPH_COMPUTE = 13
_ALLOC_FAILED = -2  # of ggml_status
_FAILING_STEP = 4
_OPERATIONS = 128  # more than ggml has
MODELS = ("model", "drafter", "mixture", "target")


def main() -> None:
    """Run the cases."""
    order = json.loads(sys.argv[1])
    model = order["model"]
    become_card(
        order["address"],
        [order[name] for name in MODELS if name in order],
        measured="fails" not in order and "pins" not in order,
    )
    if "command" in order:
        print(json.dumps(failing_command(model, order["fails"], order["command"])))
    elif "fails" in order:
        print(json.dumps(failing(model, order["fails"])))
    elif "pins" in order:
        found = {"pinned": pinned(Path(model)), "sent": sent(Path(model), own_device())}
        found["sent from disk"] = sent(Path(model), own_device(), "disk")
        found |= {"taken": taken(model), "fast link": with_fast_link(model)}
        found["freed when lost"] = freed_when_lost(own_device())
        found["failed in loads"] = failed_in_loads(model)
        print(json.dumps(found))
    elif "views" in order:
        found = {"sent": sent(Path(model), own_device())}
        found["sent from file"] = sent(Path(model), own_device(), "file")
        found["interrupted"] = interrupted(Path(model), own_device())
        found["interrupted state"] = interrupted(Path(order["views"]), own_device(), seed=2)
        found["sent by ggml"] = sent_by_ggml(Path(model), own_device())
        found["views"] = sent_beside_views(Path(order["views"]), own_device())
        found |= {"reread": rereading(model), "layouts": [layout.name for layout in kernel_layouts()]}
        print(json.dumps(found))
    else:
        print(json.dumps(out_of_memory(model, order["server"]) if "server" in order else usual(model, order)))


def usual(model: str, order: dict[str, str]) -> dict[str, Any]:
    """Layers and drafters in all places."""
    tree = {"draft": order["drafter"], "tree_budget": 24}
    streamed = {"gpu_layers": 10, "draft_device": "none", "offload": "stream", "exact": True}
    mixture, target = order["mixture"], order["target"]
    head = {"draft": order["head"], "drafter": "model", "tree_budget": 12}
    return {
        "processor": case(model, gpu_layers=0),
        "exact": case(model, gpu_layers=0, exact=True),
        **attention(model, mixture),
        "half": case(model, gpu_layers=15),
        "all": case(model, gpu_layers="all"),
        "streamed": in_least_memory(model, **streamed),
        "streamed with trees": in_least_memory(model, **streamed, **tree),
        "drafter": case(model, gpu_layers=0, draft_device="RPC0", exact=True, **tree),
        "unknown": case(model, device="CUDA7"),
        "plan": plan(model),
        "mixture": case(mixture, gpu_layers=0),
        "single experts": in_least_memory(mixture, gpu_layers=2, offload="stream"),
        "target": case(target, gpu_layers=0),
        "head": case(target, gpu_layers=3, **head),
        "adapter here": case(target, gpu_layers=0, lora=[order["adapter"]]),
        "adapter": case(target, gpu_layers=3, lora=[order["adapter"]]),
        "head and streamed": in_least_memory(target, gpu_layers=3, offload="stream", **head),
    }


def attention(model: str, mixture: str) -> dict[str, Any]:
    """Attention on a device that has no room for all feed-forward weights."""
    with device_memory(Path(model).stat().st_size):
        some = case(model, gpu_layers="attention")
        long = case(model, gpu_layers="attention", context=4096)
        streamed = in_least_memory(model, gpu_layers="attention", draft_device="none", offload="stream")
    with device_memory(Path(mixture).stat().st_size):
        experts = case(mixture, gpu_layers="attention")
        single = in_least_memory(mixture, gpu_layers="attention", offload="stream")
    return {
        "attention": some,
        "attention, a long context": long,
        "attention, the rest streamed": streamed,
        "attention of a mixture": experts,
        "attention, single experts": single,
        "nothing left to stream": in_least_memory(mixture, gpu_layers="attention", offload="stream"),
    }


def out_of_memory(model: str, server: int) -> dict[str, Any]:
    """A device that has less memory than it says: room for the weights, but not for all cells too."""
    process = psutil.Process(server)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + SOME,) * 2)
    return {
        "out of memory": case(model, gpu_layers="all", context=8192),
        "attention out of memory": case(model, gpu_layers="attention", context=8192),
    }


def failing(model: str, how: str) -> dict[str, Any]:
    """Answers on a device that fails in the middle of one, and answers after that."""
    options: dict[str, Any] = {"gpu_layers": "all", "device": "RPC0"}
    said, before = [], ""
    beside = Model(Path(model), devices=DeviceLayers.of([(own_device(), 1)]))
    with computing_replaced(how) as fail, edgespec.load(model, **(OPTIONS | options)) as engine:
        try:
            for number, _ in enumerate(engine.stream(PROMPT, ANSWER)):
                if number == 2:
                    before = engine.memory.layers
                    fail()
        except EdgeSpecError as error:
            said.append(f"{type(error).__name__}: {error}")
        try:
            engine.generate(PROMPT, ANSWER)
        except EdgeSpecError as error:
            said.append(f"{type(error).__name__}: {error}")
    lost = beside.lost
    beside.close()
    found = {"again": case(model, **options), "processor": case(model, gpu_layers=0)}
    return {"said": said, "before": before, "lost": lost, **found}


def failing_command(model: str, how: str, arguments: list[str]) -> dict[str, Any]:
    """What `edgespec generate` returns and prints, with a device that fails in an answer."""
    options = ["--draft", "none", "--context", "512", "--threads", "1", "--max-tokens", "12", "--quiet"]
    command = ["generate", "--model", model, *options, *arguments]
    found = {}
    with computing_replaced(how) as fail:
        step, steps = Decoder.step, 0

        def failing_step(*given: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == _FAILING_STEP:
                fail()
            return step(*given)

        with patch.object(Decoder, "step", failing_step):
            found["code"], found["text"], found["said"] = _printed(
                [*command, "--gpu-layers", "all", "--device", "RPC0"]
            )
    _, found["processor"], _ = _printed([*command, "--gpu-layers", "0"])
    return found


def _printed(command: list[str]) -> tuple[int, str, str]:
    """A command's exit code, and what it prints."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as said:
        code = cli_main(command)
    return code, out.getvalue(), said.getvalue()


@contextmanager
def computing_replaced(how: str, *, at_once: bool = False) -> Iterator[Callable[[], None]]:
    """A block that yields what makes its models' device fail: to be "lost", or out of "memory".

    Args:
        at_once: it fails whenever it computes.
    """
    device = own_device()
    table = ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))
    init = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    begin = init(table[_INIT_BACKEND])
    begun = []

    def remembered(device: int, parameters: int) -> int:
        begun.append(begin(device, parameters))
        if at_once:  # those that were begun before may be freed
            break_computing(begun[-1])
        return int(begun[-1])

    # ggml's own function ends the process if it is called with a number as large as an address.
    ending = ctypes.cast(ctypes.CFUNCTYPE(None)(exported("ggml_backend_dev_get")), ctypes.c_void_p)
    no_memory = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: _ALLOC_FAILED)

    def fail() -> None:
        for backend in begun:
            break_computing(backend)

    def break_computing(backend: int) -> None:
        functions = ctypes.cast(backend, ctypes.POINTER(ctypes.c_void_p))
        functions[_GRAPH_COMPUTE] = (
            ending.value if how == "lost" else ctypes.cast(no_memory, ctypes.c_void_p).value
        )

    with replaced(device, _INIT_BACKEND, init(remembered)):
        yield fail


def pinned(model: Path) -> dict[str, Any]:
    """The memory of weights beside a device that pins memory for its transfers, as a graphics card does."""
    device = own_device()
    asked = []

    def host_buffer_type(device: int) -> int:
        asked.append(device)
        return ggml.plain_buffer_type()

    host = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(host_buffer_type)
    with replaced(device, _HOST_BUFFER_TYPE, host):
        transfers = transfer_times(device)
        measured = len(asked)
        refuses = refuses_to_pin(device)
    with log_lines() as log, replaced(device, _HOST_BUFFER_TYPE, host):
        Model(model, devices=DeviceLayers.of([(device, 15)])).close()
    kinds = [line.partition(":")[2].split()[0] for line in log.info if "model buffer size" in line]
    layouts = [layout.name for layout in kernel_layouts()]
    return {
        "kinds": kinds,
        "layouts": layouts,
        "transfers": list(transfers.values()),
        "measured": measured,
        "refuses": refuses,
    }


@contextmanager
def unpinnable_memory() -> Iterator[None]:
    """A block in which the device has a type of pinned memory, and plain memory is allocated instead."""
    plain = ggml.plain_buffer_type()
    kind = BufferType.from_buffer_copy(BufferType.from_address(plain))
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
        lambda _, size: ggml.functions()["ggml_backend_buft_alloc_buffer"](plain, size)
    )
    named = ctypes.create_string_buffer(b"Pinned")
    name = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: ctypes.addressof(named))
    kind.interface.alloc_buffer = ctypes.cast(allocate, ctypes.c_void_p).value
    kind.interface.get_name = ctypes.cast(name, ctypes.c_void_p).value
    host = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: ctypes.addressof(kind))
    with replaced(own_device(), _HOST_BUFFER_TYPE, host):
        yield


def sent(path: Path, device: int, source: str = "memory") -> dict[str, Any]:
    """Passes of 2 and of 4 rows, whose weights are sent never, from 3 rows on, or always.

    Each has the weights that were copied to the device, and some of its logits. Some come twice and more: the
    layers of a graph are handed over in another way once it is known.

    Args:
        source: of the weights: "memory"; "disk", from which they are streamed; or "file", from which they are
            read again while rearranged ones are in memory.
    """
    found: dict[str, Any] = {}
    n_layers = read_header(path).block_count or 0
    layers = n_layers // 2
    for name, least in {"never": NEVER, "from three": 3, "always": 1}.items():
        seen = CopiedWeights()
        model = Model(
            path,
            devices=DeviceLayers.of([(device, layers)]),
            repack=source == "file",
            sent_from=least,
            weights=weights_from(source, path, n_layers - layers, device),
        )
        sizes: dict[str, Any] = {"n_cells": 256, "n_rows": 8, "n_outputs": 8, "n_sequences": 1}
        context = Context(model, **sizes, n_threads=1, observers=[seen])
        found[name] = []
        for rows in (2, 4, 4, 2, 4):
            seen.names.clear()
            seen.views.clear()
            context.clear()
            context.decode(TokenBatch.run(range(rows), 0, n_sequences=1, logits="all"))
            logits = [[float(x) for x in row[:64]] for row in context.logits()]
            found[name].append({"copied": sorted(seen.names), "views": sorted(seen.views), "logits": logits})
        model.close()
    return found


def weights_from(source: str, path: Path, count: int, device: int) -> WeightStore | None:
    """A model's first layers, for `sent`."""
    if source == "file":
        files = ModelFiles.of(read_header(path))
        return RereadWeights(files, files.layers()[:count], device)
    return streamed_layers(path, count, device) if source == "disk" else None


def sent_by_ggml(path: Path, device: int) -> list[dict[str, Any]]:
    """Passes of `sent` with weights from disk, always sent, where EdgeSpec cannot say which products are."""
    with patch("edgespec.llama.runtime.model.sent_products", lambda *_: None):
        found: list[dict[str, Any]] = sent(path, device, "disk")["always"]
    return found


def sent_beside_views(path: Path, device: int) -> dict[str, Any]:
    """Passes of `sent` with a model that reads views of weights: in memory, from disk, and without the hook
    that keeps what reads views from devices.
    """
    found: dict[str, Any] = {source: sent(path, device, source) for source in ("memory", "disk", "file")}
    with patch("edgespec.llama.runtime.model.keep_views", lambda _devices: False):
        try:
            sent(path, device, "disk")
        except EdgeSpecError as error:
            found["refused"] = str(error)
    return found


def freed_when_lost(device: int) -> bool:
    """Close pinned memory of a lost device, which ends the process if it is freed; True if it was not."""
    with replaced(device, _HOST_BUFFER_TYPE, plain_memory_as_pinned()):
        memory = PinnedMemory.allocated(1 << 20, device)
    assert memory is not None
    ending = ctypes.cast(ctypes.CFUNCTYPE(None)(exported("ggml_backend_dev_get")), ctypes.c_void_p)
    Buffer.from_address(memory._buffer).interface.free_buffer = ending.value
    device_error([device], "it was unplugged", LogLines())
    memory.close()
    return True


def failed_in_loads(model: str) -> dict[str, Any]:
    """Loads with a device that fails while weights are copied to it, and while a context is set up there; and
    one whose drafter runs out of memory on its device each time.
    """
    found: dict[str, Any] = {}
    device = own_device()
    ending = ctypes.cast(ctypes.CFUNCTYPE(None)(exported("ggml_backend_dev_get")), ctypes.c_void_p)
    kind = BufferType.from_address(ggml.functions()["ggml_backend_dev_buffer_type"](device))
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    real = allocate(kind.interface.alloc_buffer)

    def without_transfers(type_: int, size: int) -> int:
        buffer = real(type_, size)
        Buffer.from_address(buffer).interface.set_tensor = ending.value
        return int(buffer)

    broken = allocate(without_transfers)
    with patch.object(device_failures, "_lost", set()):
        kind.interface.alloc_buffer = ctypes.cast(broken, ctypes.c_void_p).value
        found["weights"] = case(model, gpu_layers="all")
        kind.interface.alloc_buffer = ctypes.cast(real, ctypes.c_void_p).value
    with patch.object(device_failures, "_lost", set()), replaced(device, _INIT_BACKEND, ending):
        found["context"] = case(model, gpu_layers="all")
    with patch.object(device_failures, "_lost", set()), computing_replaced("memory", at_once=True):
        found["drafter"] = case(model, gpu_layers=0, draft=model, draft_device="RPC0")
    return found


def plain_memory_as_pinned() -> Any:
    """A device's function that gives the processor's memory for pinned memory."""
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    return kind(lambda _device: ggml.plain_buffer_type())


def interrupted(path: Path, device: int, seed: int = 0) -> dict[str, int]:
    """Passes of random sizes with layers from disk, sent for 5 rows or more; some fail and are repeated.

    Returns:
        how many passes there were, how many failed (in the graph or on the disk), and how many gave other
        logits than with layers in memory.
    """
    draw, fails, counts = (
        random.Random(seed),
        FailsInGraph(),
        dict.fromkeys(("passes", "failed", "differ"), 0),
    )
    count = (read_header(path).block_count or 0) - 1
    contexts = []
    for weights in (None, streamed_layers(path, count, device)):
        model = Model(
            path, devices=DeviceLayers.of([(device, 1)]), repack=False, sent_from=5, weights=weights
        )
        sizes: dict[str, Any] = {"n_cells": 512, "n_rows": 24, "n_outputs": 24, "n_sequences": 1}
        contexts.append(Context(model, **sizes, n_threads=1, observers=[fails] if weights else []))
    in_memory, from_disk = contexts
    reader = from_disk.model.weights._reader  # type: ignore[attr-defined]
    for _ in range(60):
        rows = draw.choice([1, 2, 4, 5, 8, 16, 24])
        batch = TokenBatch.run([draw.randrange(1000) for _ in range(rows)], 0, n_sequences=1, logits="all")
        for context in contexts:
            context.clear()
        in_memory.decode(batch)
        fails.at = draw.choice([0, 0, draw.randrange(1, 20)])
        disk = failing_once(reader) if draw.randrange(3) == 0 else nullcontext()
        with disk:
            while True:
                try:
                    from_disk.decode(batch)
                    break
                except StreamError:
                    fails.at = 0
                    counts["failed"] += 1
                    if from_disk.keeps_recurrent_state:
                        from_disk.clear()  # as caches do, since the state is unknown
        counts["passes"] += 1
        counts["differ"] += not np.array_equal(in_memory.logits(), from_disk.logits())
    for context in contexts:
        context.model.close()
    return counts


@contextmanager
def failing_once(reader: StoreReader) -> Iterator[None]:
    """A block in which the first read of a disk fails."""
    read, left = reader.read, [1]

    def failing(pieces: Any, memories: Any) -> None:
        if left and left.pop():
            raise StreamError("The disk has failed.")
        read(pieces, memories)

    with patch.object(reader, "read", failing):
        yield


class FailsInGraph(GraphObserver):
    """Fails at a product.

    Attributes:
        at: its number in the pass; 0 for none.
    """

    def __init__(self) -> None:
        self.at = self._products = 0
        self.watch = Watch()
        self.watch.ask_about_operation(ggml.product())

    def begin(self, stop: Callable[[], bool], padding: int) -> None:
        """A pass begins."""
        self._products = 0

    def reached(self, node: int) -> bool:
        """Count a product."""
        self._products += 1
        if self._products == self.at:
            raise StreamError("A product has failed.")
        return False


def streamed_layers(path: Path, count: int, device: int) -> StreamedWeights:
    """A model's first layers, all of them streamed, and sent to a device."""
    files = ModelFiles.of(read_header(path))
    layers = files.layers()[:count]
    numbers = [layer.index for layer in layers]
    return StreamedWeights(files, plain_store(files, layers), numbers, n_slots=2, sent_to=device)


class CopiedWeights(GraphObserver):
    """Remembers which weights ggml's scheduler has copied to another device for a product.

    Attributes:
        names: of the weights.
        views: of weights that were copied for any operation; their names.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.views: set[str] = set()
        self.watch = Watch()
        for operation in range(_OPERATIONS):
            self.watch.ask_about_operation(operation)

    def reached(self, node: int) -> bool:
        """Remember a node's weights that are copies."""
        copies = [name.decode() for name in ggml.copies_among(ggml.sources_of(node)).values()]
        weights = [name for name in copies if ".weight" in name]
        self.views.update(name for name in weights if "(" in name)
        if ggml.operation_of(node) == ggml.product():
            self.names.update(weights)
        return False


def with_fast_link(model: str) -> dict[str, Any]:
    """Answers with some layers on a device that takes next to no time, as does the link to it."""
    (known,) = current_build().gpus
    type_id = usual_type(ModelFiles.of(read_header(model)))
    profile = measured(known, type_id, PlacementRequest(DevicesConfig(), 1, ProfileStore())).profile
    fast = replace(
        profile,
        seconds=(1e-15,) * 3,
        own_seconds=tuple(1000 * seconds for seconds in profile.own_seconds),  # longer than the disk takes
        transfer=FREE,
    )
    remember(ProfileStore(), known, type_id, 1, fast)
    streamed: dict[str, Any] = {"offload": "stream", "draft_device": "none"}
    with unpinnable_memory():
        unpinned = {
            "half, unpinned": case(model, gpu_layers=2),
            "streamed, unpinned": in_least_memory(model, gpu_layers=1, **streamed),
            "refuses": refuses_to_pin(own_device()),
        }
    return {
        "here": case(model, gpu_layers=0),
        "half": case(model, gpu_layers=2),
        **unpinned,
        "streamed": in_least_memory(model, gpu_layers=1, **streamed),
        "streamed exactly": in_least_memory(model, gpu_layers=1, exact=True, **streamed),
        "streamed with trees": in_least_memory(model, gpu_layers=1, **streamed, draft="lookup"),
    }


def rereading(model: str) -> dict[str, Any]:
    """A long prompt, with a link over which weights are worth sending for hundreds of rows only.

    Has the load's notes, the bytes that were read from the model's file, and the bytes of its layers here.
    """
    (known,) = current_build().gpus
    files = ModelFiles.of(read_header(model))
    type_id = usual_type(files)
    (own,) = measure_speeds(type_id, 1)
    slow = [1000 * seconds for seconds in own.seconds]  # longer than the disk takes
    costs = host_costs(
        Card("", "", 0, 0, False, DeviceProfile(tuple(slow), tuple(slow), FREE)), type_id, 1 << 20
    )
    link_s = 0.4 * costs.usual.at(128)
    profile = DeviceProfile(
        (1e-15,) * 3, tuple(slow), Curve.through((n, 2 * n * link_s) for n in (1 << 14, 1 << 24))
    )
    remember(ProfileStore(), known, type_id, 1, profile)
    with edgespec.load(model, **OPTIONS, gpu_layers=2) as engine:
        answer = engine.generate(PROMPT * 40, GenerationConfig(max_tokens=4))
        ring = getattr(engine.target.model.weights, "_ring", None)
        read = 0 if ring is None else ring.slots.meter.n_bytes
        layers = sum(layer.n_bytes for layer in files.layers()[:2])
        return {"notes": engine.notes, "tokens": len(answer.tokens), "read": read, "layers": layers}


def taken(model: str) -> dict[str, Any]:
    """An answer with all layers on a device, most of whose memory is taken once layers are planned for it."""
    read = MachineSnapshot.read
    with ExitStack() as stack:

        def read_before(*arguments: Any) -> MachineSnapshot:
            snapshot = read(*arguments)
            stack.enter_context(device_memory(Path(model).stat().st_size, total=8 << 30))
            return snapshot

        with patch.object(MachineSnapshot, "read", read_before):
            return case(model, gpu_layers="all")


@contextmanager
def device_memory(n_bytes: int, total: int | None = None) -> Iterator[None]:
    """A block in which so much of the device's memory is free; all of it if there is no total."""
    size = ctypes.POINTER(ctypes.c_size_t)

    def little_memory(_device: Any, free: Any, total_bytes: Any) -> None:
        free[0], total_bytes[0] = n_bytes, total or n_bytes

    get_memory = ctypes.CFUNCTYPE(None, ctypes.c_void_p, size, size)(little_memory)
    with replaced(own_device(), _GET_MEMORY, get_memory):
        yield


def own_device() -> Any:
    """The worker's device."""
    device = device_named("RPC0")
    assert device is not None
    return device


@contextmanager
def replaced(device: Any, index: int, function: Any) -> Iterator[None]:
    """A block in which a device has another function at this place of ggml's table."""
    table = ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))
    before, table[index] = table[index], ctypes.cast(function, ctypes.c_void_p).value
    try:
        yield
    finally:
        table[index] = before


def become_card(address: str, models: list[str], *, measured: bool) -> None:
    """Let a worker's device count as this machine's, with products of these models' types.

    Args:
        measured: how fast it and the processor are is measured, which takes seconds; else both are alike.
    """
    (device,) = rpc.connect(address)
    register = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(exported("ggml_backend_device_register"))
    register(device)
    (known,) = current_build().gpus
    types = {usual_type(ModelFiles.of(read_header(model))) for model in models}
    own, there = (
        (speed.seconds for speed in measure_speeds(min(types), 1, endpoints=[address]))
        if measured
        else [(1e-10,) * 3] * 2
    )
    transfer = Curve.through([(1 << 14, 1e-4), (1 << 20, 1e-3)])
    for type_id in types:
        remember(ProfileStore(), known, type_id, 1, DeviceProfile(there, own, transfer))


def case(model: str, **options: Any) -> dict[str, Any]:
    """An answer, and how the model was loaded; or the error."""
    try:
        with edgespec.load(model, **(OPTIONS | options)) as engine:
            return answered(engine)
    except EdgeSpecError as error:
        return {"error": f"{error.what} {error.hint}"}


def in_least_memory(model: str, **options: Any) -> dict[str, Any]:
    """An answer in as little memory as streaming needs, which errors tell."""
    with load_in_least_memory(Path(model), **(OPTIONS | options)) as engine:
        return answered(engine)


def answered(engine: Engine) -> dict[str, Any]:
    """An answer, and how the model was loaded."""
    answer = engine.generate(PROMPT, ANSWER)
    return {
        "tokens": list(answer.tokens),
        "exact": answer.exact,
        "passes": len(answer.passes),
        "layers": answer.memory.layers,
        "device_bytes": answer.memory.device_bytes,
        "streamed": answer.memory.streamed_bytes_per_pass,
        "misses": answer.experts.misses if answer.experts is not None else 0,
        "notes": engine.notes,
        "warnings": engine.warnings,
    }


def plan(model: str) -> dict[str, Any]:
    """The notes of a plan."""
    request = Config.of(model=model, gpu_layers=15, **OPTIONS)
    found = plan_for(request, no_progress)
    return {"notes": found.notes, "resident": found.chosen.holding.resident_bytes}


if __name__ == "__main__":
    main()
