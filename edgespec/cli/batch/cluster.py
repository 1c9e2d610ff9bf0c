"""Batches on a Ray cluster: Ray Data hands requests to an engine on each node, and collects the answers."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import re
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.api.completion_request import check_tokens
from edgespec.base.option import naming_flags
from edgespec.base.progress import no_progress
from edgespec.cli.batch.answering import FATAL, BatchRequests, answer_all
from edgespec.cli.interrupt import Interruption
from edgespec.cli.origin import ModelIdentity, model_identity
from edgespec.cli.screen.formatting import count
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import NO_MODEL, Config
from edgespec.engine.requests import Event, Request, RequestQueue, RequestSource
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.files.user_folders import expanded
from edgespec.generation.result import Chunk, Generation
from edgespec.processes.children import environment_set
from edgespec.version import __version__

_USUAL_TEXTS = 16  # answers at once, where --parallel says nothing
_MAX_LOSSES = 3  # engines that may end with a request: it may be what ends them
_MAX_BLOCKS = 10_000
_LOOK_S = 0.1
_REACH_S = 5.0
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # engines see the devices that they would see without Ray
}


def ray_address(text: str) -> str:
    """The value of `--ray` as Ray takes it; "auto" is the cluster that this machine belongs to."""
    text = text.strip()
    if text != "auto" and not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/]+):\d{1,5}", text, re.ASCII):
        raise UsageError(f"--ray is '{text}'.", "Write the HOST:PORT of a cluster's head, or auto.")
    return text


@dataclass(frozen=True)
class _Outcome:
    """An engine's results for a request."""

    node: str
    answer: Generation | None = None
    error: EdgeSpecError | None = None  # why there is no answer
    is_fatal: bool = False  # the engine could not be loaded
    model: ModelIdentity = field(default_factory=ModelIdentity)  # the one that is loaded there


class _NodeEngine:
    """An engine in an actor of Ray Data, which makes concurrent calls. Their requests share passes.

    What a person can cause is returned, not raised: Ray would wrap it.
    """

    def __init__(self, loading: Config, version: str) -> None:
        from edgespec import open_engine

        self._naming = naming_flags()  # the process has no command line, but one shows its messages
        self._naming.__enter__()
        self._node = socket.gethostname()
        self._queue = RequestQueue()
        self._failure: EdgeSpecError | None = None
        try:
            if version != __version__:
                raise EdgeSpecError(
                    f"It has EdgeSpec {__version__}, not {version}.", "Install the same version."
                )
            self._engine = open_engine(loading, no_progress)
        except FATAL as error:
            self._failure = _told(error)
            return
        self._model = model_identity(loading.model)
        asked = loading.batching.parallel
        self._parallel = asked if isinstance(asked, int) else None
        threading.Thread(target=self._answer_all, daemon=True).start()

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        outcomes = [self._begin(*pickle.loads(request)) for request in rows["request"]]
        return {
            "number": rows["number"],
            "outcome": np.array([pickle.dumps(outcome.result()) for outcome in outcomes], dtype=object),
        }

    def _begin(self, *request: Any) -> Future[_Outcome]:
        outcome: Future[_Outcome] = Future()
        if self._failure is not None:
            outcome.set_result(_Outcome(self._node, error=self._failure, is_fatal=True))
            return outcome
        asked = Request(*request)
        asked.key = outcome
        try:
            check_tokens(asked.prompt, self._engine.vocabulary_size)
            self._queue.put(asked)
        except UsageError as error:
            outcome.set_result(_Outcome(self._node, error=error, model=self._model))
        return outcome

    def _answer_all(self) -> None:
        def taken() -> Iterator[Request | None]:
            while True:
                yield self._queue.pop()

        source = BatchRequests(taken(), self._queue.wait)
        try:
            for event in answer_all(
                source, self._engine, parallel=self._parallel, interruption=Interruption()
            ):
                if event.is_last:
                    answer = None if event.chunk is None else event.chunk.generation
                    error = None if event.error is None else _told(event.error)
                    event.request.key.set_result(_Outcome(self._node, answer, error, model=self._model))
        finally:
            os._exit(1)  # Ray Data starts another engine, and the requests are asked again


class Cluster:
    """Engines on the nodes of a Ray cluster, which answer requests like a single engine.

    Args:
        ray: the module, connected.

    Attributes:
        model: the one that all nodes have loaded; nameless until the first answer.
    """

    def __init__(self, ray: Any, loading: Config, terminal: Terminal) -> None:
        self.model = ModelIdentity()
        self._ray = ray
        self._loading = loading
        self._terminal = terminal
        self._cancelled = threading.Event()
        self._reason = ""  # of the latest failure of Ray

    def stream_many(self, source: RequestSource, *, parallel: int | None = None) -> Iterator[Event]:
        """Answer many requests; an answer comes as one piece, when it is finished."""
        while left := dict(enumerate(_all(source))):
            for lost in range(_MAX_LOSSES):
                if lost:
                    self._terminal.warn(f"Lost an engine. Asking {count(len(left), 'request')} again.")
                texts = parallel or _USUAL_TEXTS
                # The last time one by one: what ends an engine takes no others along.
                calls = 1 if lost == _MAX_LOSSES - 1 else texts + max(1, texts // 4)
                for number, outcome in self._outcomes(left, calls):
                    self._check(outcome)
                    yield from _events(left.pop(number), outcome)
                if not left or self._cancelled.is_set():
                    break
            lost_for_good = EdgeSpecError(f"{_MAX_LOSSES} engines crashed on this line.{self._reason}")
            for request in left.values():
                if self._cancelled.is_set():
                    yield Event(request, Chunk.cancelled())
                else:
                    yield Event(request, error=lost_for_good)

    def cancel(self) -> None:
        """End all answers; may be called from other threads and from signal handlers."""
        self._cancelled.set()

    def _outcomes(self, requests: dict[int, Request], calls: int) -> Iterator[tuple[int, _Outcome]]:
        """The outcomes of requests, as far as their engines do not end."""
        found: queue.Queue[tuple[int, _Outcome] | Exception | None] = queue.Queue()
        dataset = self._dataset(requests, calls)

        def collect() -> None:
            try:
                for row in dataset.iter_rows():
                    found.put((row["number"], pickle.loads(row["outcome"])))
                found.put(None)
            except Exception as error:
                found.put(error)

        threading.Thread(target=collect, daemon=True).start()
        while not self._cancelled.is_set():
            try:
                item = found.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if item is None:
                return
            if isinstance(item, Exception):
                self._reason = f" Ray says: {_last_line(item)}"
                return
            yield item

    def _dataset(self, requests: dict[int, Request], calls: int) -> Any:
        """A dataset of outcomes, each computed by an engine that has up to `calls` requests at a time."""
        nodes = [
            node["Resources"] for node in self._ray.nodes() if node["Alive"] and "CPU" in node["Resources"]
        ]
        if not nodes:
            raise EdgeSpecError(
                "The Ray cluster has no node with processors.", "Add one: ray start --address HOST:PORT"
            )
        rows = [
            {"number": number, "request": pickle.dumps((r.prompt, r.config, r.raw))}
            for number, r in requests.items()
        ]
        dataset = self._ray.data.from_items(rows, override_num_blocks=min(len(rows), _MAX_BLOCKS))
        warnings.filterwarnings("ignore", "`ray_remote_args`")  # the only way to give max_restarts
        return dataset.map_batches(
            _NodeEngine,
            fn_constructor_args=(self._loading, __version__),
            batch_size=None,
            batch_format="numpy",
            compute=self._ray.data.ActorPoolStrategy(
                min_size=1,
                max_size=len(nodes),
                initial_size=len(nodes),
                max_tasks_in_flight_per_actor=calls,
                max_concurrent_calls_per_actor=calls,
                enable_true_multi_threading=True,
            ),
            num_cpus=min(node["CPU"] for node in nodes),
            num_gpus=min(node.get("GPU", 0) for node in nodes),
            max_restarts=0,  # with a node that is gone, an engine would wait for it for ever
        )

    def _check(self, outcome: _Outcome) -> None:
        if outcome.is_fatal and outcome.error is not None:
            raise EdgeSpecError(f"Node {outcome.node}: {outcome.error.what}", outcome.error.hint)
        if not self.model.digest:
            self.model = outcome.model
        elif outcome.model.digest not in ("", self.model.digest):
            raise EdgeSpecError(
                f"The model of this name on node {outcome.node} differs from that of the other nodes.",
                "Copy the same file to every node.",
            )


@contextmanager
def open_cluster(address: str, loading: Config, terminal: Terminal) -> Iterator[Cluster]:
    """The engines of a Ray cluster, for as long as the block runs. They are loaded with the first requests.

    What Ray prints on standard output is discarded, as that is for results; so whoever writes there must
    have taken hold of `sys.stdout` before.
    """
    with ExitStack() as stack:
        settings = {name: os.environ.get(name, value) for name, value in _SETTINGS.items()}
        stack.enter_context(environment_set(settings))  # Ray reads it when it is imported
        ray = _imported()
        _check_head(address)
        stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        with terminal.working() as report:
            report("Joining the Ray cluster", 0.0)
            stack.callback(ray.shutdown)
            on_sigterm = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(address, log_to_driver=False, logging_level="CRITICAL")
            except Exception as error:
                raise EdgeSpecError(
                    f"The Ray cluster {address} cannot be joined: {_last_line(error)}",
                    "Run this on a machine of the cluster (ray start --address HOST:PORT), with the "
                    "cluster's versions of Ray and Python, and its token if it has one.",
                ) from error
            finally:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)  # Ray installs its own
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        context.max_errored_blocks = -1  # requests that are lost with an engine are asked again
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        yield Cluster(ray, options_for_nodes(loading), terminal)


def options_for_nodes(loading: Config) -> Config:
    """The options for the engine of each node.

    Nodes run in folders of their own, so paths are made absolute. Names are left as they are: each node finds
    or fetches the model itself.
    """
    model, speculation = loading.model, loading.speculation
    return loading.with_(
        model=_absolute(model.name),
        mmproj=_absolute(model.mmproj),
        draft=_absolute(speculation.draft),
        draft_from=_absolute(speculation.draft_from),
        lora=[_absolute_adapter(name) for name in model.lora],
        pack_dir=[str(expanded(folder).absolute()) for folder in loading.memory.pack_dir],
    )


def _absolute(name: str | None) -> str | None:
    """A path as seen from everywhere; anything else is a name."""
    if name is None or name in NO_MODEL or not (_is_here(name) or name.lower().endswith(".gguf")):
        return name
    return str(expanded(name).absolute())  # links stay, as they may lead elsewhere on other nodes


def _absolute_adapter(name: str) -> str:
    path, colon, scale = name.rpartition(":")
    if colon and not _is_here(name) and _is_here(path):
        return f"{_absolute(path)}:{scale}"
    return str(_absolute(name))


def _is_here(name: str) -> bool:
    try:
        return expanded(name).exists()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have
        return False


def _all(source: RequestSource) -> Iterator[Request]:
    """Every request, after having waited for all of them; those that wait for others' results come later."""
    while True:
        while (request := source.pop()) is not None:
            yield request
        if not source.wait():
            return


def _events(request: Request, outcome: _Outcome) -> Iterator[Event]:
    """An outcome as what an engine yields: the tokens, and then the whole answer."""
    if outcome.answer is None:
        yield Event(request, error=outcome.error)
        return
    if outcome.answer.tokens:
        yield Event(request, Chunk("", tuple(outcome.answer.tokens)))
    yield Event(request, Chunk("", generation=outcome.answer))


def _told(error: BaseException) -> EdgeSpecError:
    """An error that arrives as it is in a process that may lack what raised it."""
    if isinstance(error, EdgeSpecError):
        return error
    return EdgeSpecError(f"{type(error).__name__}: {error}")


def _imported() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError(
            f"--ray needs the package ray, but importing it failed: {error}.",
            "Install it: pip install 'edgespec[ray]'. Install it on every machine of the cluster.",
        ) from error
    return ray


def _check_head(address: str) -> None:
    """Find out at once whether anything listens there; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or error
        raise EdgeSpecError(
            f"There is no Ray cluster at {address}: {said}.",
            "Give the HOST:PORT that 'ray start --head' printed.",
        ) from error


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
