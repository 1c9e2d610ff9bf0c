"""Engines on the nodes of a cluster, which answer the requests of one batch like a single engine."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from edgespec.cli.batch.cluster.address import RayAddress
from edgespec.cli.batch.cluster.dispatch import MAX_LOSSES, ClusterTask, Dispatch
from edgespec.cli.batch.cluster.node import NodeFacts, RequestOutcome
from edgespec.cli.batch.cluster.ray_cluster import EngineSlot, RayCluster, WorkerLost, opened
from edgespec.cli.batch.cluster.sharing import options_for_nodes
from edgespec.cli.screen.formatting import count
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import Config
from edgespec.engine.requests import Event, Request, RequestList, RequestSource
from edgespec.errors import EdgeSpecError
from edgespec.generation.result import Chunk, Generation
from edgespec.progress import Progress
from edgespec.version import __version__

_LOOK_S = 0.1  # how often it is checked whether waiting is to end
_RECRUIT_S = 2.0  # how often it is looked for nodes that have joined
_MAX_STARTS = 3  # in one slot
_PATIENT_S = 10.0  # for interrupted answers, and for engines to keep what they learned
_LONG_S = 10.0  # until people are told what is waited for
_AHEAD = 4  # of so many answers at once, one more waits on the node, so that its engine is never idle


@dataclass(eq=False)
class _NodeWorker:
    """The worker that runs in a slot.

    Attributes:
        facts: None while the engine is being loaded.
    """

    slot: EngineSlot
    actor: Any
    facts: NodeFacts | None = None


@dataclass(frozen=True)
class _Call:
    """A call that was made to a worker, and the task that it is about."""

    worker: _NodeWorker
    kind: str
    task: ClusterTask | None = None


class _Waiting(threading.Thread):
    """Waits for a request while others look after the nodes.

    Attributes:
        found: whether there may be one, when the thread has ended.
    """

    def __init__(self, source: RequestSource) -> None:
        super().__init__(daemon=True)
        self._source = source
        self.found = False
        self.start()

    def run(self) -> None:
        self.found = self._source.wait()


class ClusterEngine:
    """Gives requests to the engines of a cluster's nodes as they have room for them.

    An engine is loaded on every node, also on those that join later. When one is lost, others answer its
    requests, and it is started again if its node still exists.

    Args:
        loading: what each node loads.
    """

    def __init__(self, cluster: RayCluster, loading: Config, terminal: Terminal) -> None:
        self._cluster = cluster
        self._loading = loading
        self._terminal = terminal
        self._workers: dict[EngineSlot, _NodeWorker] = {}
        self._starts: Counter[EngineSlot] = Counter()
        self._calls: dict[Any, _Call] = {}
        self._dispatch: Dispatch[_NodeWorker] = Dispatch(RequestList([]))
        self._facts: NodeFacts | None = None
        self._failure: EdgeSpecError | None = None  # of the latest node that failed
        self._cancelled = threading.Event()
        self._recruited = float("-inf")

    @property
    def facts(self) -> NodeFacts:
        """Facts from the first node to become ready; all nodes load the same model."""
        assert self._facts is not None, "the cluster was begun"
        return self._facts

    @property
    def has_chat_template(self) -> bool:
        """See `Engine.has_chat_template`."""
        return self.facts.has_chat_template

    @property
    def can_think(self) -> bool:
        """See `Engine.can_think`."""
        return self.facts.can_think

    @property
    def vocabulary_size(self) -> int:
        """See `Engine.vocabulary_size`."""
        return self.facts.vocabulary_size

    def begin(self, report: Progress) -> None:
        """Load engines on all nodes, and wait until the first of them is ready.

        Raises:
            EdgeSpecError: the cluster has no nodes, or one of them cannot load the model.
        """
        start, said = time.monotonic(), False
        while self._facts is None:
            self._recruit()
            self._check_workers()
            report(f"Loading on {count(len(self._workers), 'node')} of the Ray cluster", 0.0)
            for _ in self._take_in():
                pass  # there are no events, because nothing was asked yet
            if not said and time.monotonic() - start > _LONG_S and self._none_began():
                said = True
                self._terminal.note("Waiting: other programs use the processors of all nodes.")

    def stream_many(
        self, source: RequestSource | Iterable[Request], *, parallel: int | None = None
    ) -> Iterator[Event]:
        """Answer many requests; see `Engine.stream_many`. An answer comes as one piece, when it is finished.

        Args:
            parallel: has no effect; it was decided when the engines were loaded.

        Raises:
            EdgeSpecError: no node is left, or one cannot load the model.
        """
        requests = RequestList(source) if isinstance(source, Iterable) else source
        self._dispatch = Dispatch(requests)
        for worker in self._workers.values():
            self._join(worker)
        while not self._cancelled.is_set():
            self._recruit()
            self._hand_out()
            if not self._dispatch.busy and not self._dispatch.fetch():
                waiting = _Waiting(requests)
                while waiting.is_alive():
                    self._recruit()
                    self._check_workers()
                    yield from self._take_in()
                if not waiting.found:
                    return
                continue
            self._check_workers()
            yield from self._take_in()
        yield from self._cancelled_answers()

    def cancel(self) -> None:
        """End all answers; may be called from other threads and from signal handlers."""
        self._cancelled.set()

    def close(self) -> None:
        """Let the engines keep what they learned, and free them."""
        closing = [worker.actor.close.remote() for worker in self._workers.values() if worker.facts]
        end = time.monotonic() + _PATIENT_S
        while closing and time.monotonic() < end:
            for call in self._cluster.finished(closing, _LOOK_S):
                closing.remove(call)

    def _recruit(self) -> None:
        """Start what is missing on the nodes that there are."""
        if time.monotonic() - self._recruited < _RECRUIT_S:
            return
        for slot in self._cluster.slots():
            if slot not in self._workers and self._starts[slot] < _MAX_STARTS:
                self._starts[slot] += 1
                worker = self._workers[slot] = _NodeWorker(slot, self._cluster.start(slot))
                self._calls[worker.actor.version.remote()] = _Call(worker, "version")
        self._recruited = time.monotonic()

    def _check_workers(self) -> None:
        if self._workers or any(self._starts[slot] < _MAX_STARTS for slot in self._cluster.slots()):
            return
        if self._failure is not None:
            raise self._failure
        if not self._starts:
            raise EdgeSpecError(
                f"The Ray cluster {self._cluster.where} has no node with processors.",
                "Add one: ray start --address HOST:PORT",
            )
        raise EdgeSpecError(
            f"All nodes of the Ray cluster {self._cluster.where} have ended.",
            "The results in --output are kept; run the same command again to continue.",
        )

    def _none_began(self) -> bool:
        return all(call.kind == "version" for call in self._calls.values())

    def _join(self, worker: _NodeWorker) -> None:
        if worker.facts is not None:
            texts = worker.facts.texts
            self._dispatch.join(worker, texts + max(1, texts // _AHEAD))

    def _hand_out(self) -> None:
        while (given := self._dispatch.next()) is not None:
            worker, task = given
            request = task.request
            call = worker.actor.answer.remote(task.number, request.prompt, request.config, request.raw)
            self._calls[call] = _Call(worker, "answer", task)
        for worker, task in self._dispatch.unwanted():
            worker.actor.end.remote(task.number)

    def _take_in(self) -> Iterator[Event]:
        """Handle the results of calls that finish within a moment."""
        if not self._calls:
            time.sleep(_LOOK_S)
        for finished in self._cluster.finished(self._calls, _LOOK_S):
            call = self._calls.pop(finished, None)
            if call is None:  # its worker was lost meanwhile
                continue
            try:
                value = self._cluster.value(finished)
            except WorkerLost as error:
                yield from self._lose(call.worker, str(error))
                continue
            if call.kind == "version":
                self._load(call.worker, value)
            elif call.kind == "load":
                self._loaded(call.worker, value)
            elif call.task is not None:
                yield from self._answered(call.worker, call.task, value)

    def _load(self, worker: _NodeWorker, version: str) -> None:
        if version != __version__:
            raise EdgeSpecError(
                f"Node {worker.slot.name} has EdgeSpec {version}, but this machine has {__version__}.",
                "Install the same version everywhere.",
            )
        call = worker.actor.load.remote(self._loading)
        self._calls[call] = _Call(worker, "load")

    def _loaded(self, worker: _NodeWorker, facts: NodeFacts | EdgeSpecError) -> None:
        name = worker.slot.name
        if isinstance(facts, EdgeSpecError):
            facts.what = f"Node {name}: {facts.what}"
            raise facts
        if self._facts is None:
            self._facts = facts
        elif facts.model.digest != self._facts.model.digest:
            raise EdgeSpecError(
                f"The model of this name on node {name} differs from that of the other nodes.",
                "Copy the same file to every node.",
            )
        for line in facts.warnings:
            self._terminal.warn(f"Node {name}: {line}")
        for line in (facts.description, *facts.notes, f"{facts.texts} answers at once."):
            self._terminal.detail(f"Node {name}: {line}")
        worker.facts = facts
        self._join(worker)

    def _answered(self, worker: _NodeWorker, task: ClusterTask, outcome: RequestOutcome) -> Iterator[Event]:
        if outcome.fatal:
            self._failure = outcome.error
            self._starts[worker.slot] = _MAX_STARTS  # it would fail again
            yield from self._lose(worker, str(outcome.error))
        elif self._dispatch.done(worker, task):
            yield from _events(task, outcome)

    def _lose(self, worker: _NodeWorker, why: str) -> Iterator[Event]:
        """Give the tasks of a worker to others."""
        if self._workers.get(worker.slot) is not worker:
            return
        del self._workers[worker.slot]
        self._calls = {made: call for made, call in self._calls.items() if call.worker is not worker}
        self._cluster.kill(worker.actor)  # it may only be out of reach, and would keep working
        if worker.facts is None:
            self._check_start(worker, why)
        again, given_up = self._dispatch.leave(worker)
        others = f" Other nodes will answer its {count(len(again), 'line')}." if again else ""
        self._terminal.warn(f"Lost node {worker.slot.name}.{others}")
        self._terminal.detail(why)
        self._recruited = float("-inf")
        for task in given_up:
            error = f"{MAX_LOSSES} nodes crashed on this line."
            yield Event(task.request, error=EdgeSpecError(error))

    def _check_start(self, worker: _NodeWorker, why: str) -> None:
        if "ModuleNotFoundError" in why or "ImportError" in why:
            raise EdgeSpecError(
                f"Node {worker.slot.name} cannot import EdgeSpec.",
                f"Install version {__version__} in the Python that Ray runs there.",
            )

    def _cancelled_answers(self) -> Iterator[Event]:
        """Partial answers of cancelled requests."""
        for worker in self._workers.values():
            if worker.facts is not None:
                worker.actor.cancel.remote()
        end = time.monotonic() + _PATIENT_S
        while self._dispatch.busy and time.monotonic() < end:
            yield from self._take_in()
        for task in self._dispatch.open:
            yield from _events(task, RequestOutcome(Generation(finish_reason="cancelled")))


@contextmanager
def cluster_engine(address: RayAddress, loading: Config, terminal: Terminal) -> Iterator[ClusterEngine]:
    """The engines of a Ray cluster, with the first of them loaded.

    Raises:
        EdgeSpecError: Ray is missing, there is no such cluster, or a node cannot load the model.
    """
    options = options_for_nodes(loading, address.engines)
    with ExitStack() as stack:
        with terminal.working() as report:
            report("Starting Ray" if address.is_local else "Joining the Ray cluster", 0.0)
            cluster = stack.enter_context(opened(address))
        engine = ClusterEngine(cluster, options, terminal)
        stack.callback(engine.close)
        with terminal.working() as report:
            engine.begin(report)
        yield engine


def _events(task: ClusterTask, outcome: RequestOutcome) -> Iterator[Event]:
    """An outcome as what an engine yields: the tokens, and then the whole answer."""
    if outcome.answer is None:
        yield Event(task.request, error=outcome.error)
        return
    if outcome.answer.tokens:
        yield Event(task.request, Chunk("", tuple(outcome.answer.tokens)))
    yield Event(task.request, Chunk("", generation=outcome.answer))
