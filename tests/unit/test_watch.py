"""Stops of a graph, and calls of Python: the compiled watches, and those in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.kernels import ggml, watch
from edgespec.kernels.ggml import Address
from edgespec.kernels.native import gate as native
from edgespec.kernels.watch import Gate, Watch

Calls = list[tuple[str, str]]

_ON_NODE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
_KINDS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "compiled": (native.CompiledWatch, native.CompiledGate),
    "plain": (watch.PlainWatch, watch.PlainGate),
}
KINDS = [
    pytest.param(
        kind, marks=pytest.mark.skipif(kind == "compiled" and not native.compiled(), reason="not compiled")
    )
    for kind in _KINDS
]


class Graph:
    """Nodes of a graph: products of weights with the node before, and what they are called."""

    def __init__(self, n_weights: int = 4, n_nodes: int = 64) -> None:
        self._scratch = ggml.ScratchContext(n_tensors=2 * n_nodes + n_weights)
        self._f = ggml.functions()
        self.weights = [self._scratch.tensor(ggml.F32, (32, 32)) for _ in range(n_weights)]
        self.nodes: list[Address] = []
        self.names: dict[Address, str] = {}

    def add(
        self, name: str, weight: int | None = None, rows: int = 1, *, copied: bytes | None = None
    ) -> Address:
        """A product with a weight, or with a device's copy that has this name; or a node that reads none."""
        node = self._scratch.tensor(ggml.F32, (32, rows))
        if weight is not None or copied is not None:
            read = self.weights[weight] if weight is not None else self.tensor(ggml.F32, (32, 32), copied)
            node = self._f["ggml_mul_mat"](self._scratch.handle, read, node)
        return self._named(node, name)

    def add_view(self, name: str, of: Address) -> Address:
        return self._named(self._f["ggml_view_1d"](self._scratch.handle, of, 16, 0), name)

    def add_indexed(self, name: str, stack: Address, chosen: Address) -> Address:
        rows = self._scratch.tensor(ggml.F32, (32, 1, 1))
        node = self._f["ggml_mul_mat_id"](self._scratch.handle, stack, rows, chosen)
        return self._named(node, name)

    def tensor(self, type_id: int, shape: tuple[int, ...], name: bytes | None = b"") -> Address:
        return self._scratch.tensor(type_id, shape, name or b"")

    def _named(self, node: Address, name: str) -> Address:
        self._f["ggml_set_name"](node, name.encode())
        self.nodes.append(node)
        self.names[node] = name
        return node

    def close(self) -> None:
        self._scratch.__exit__()


@pytest.fixture
def graph() -> Iterator[Graph]:
    found = Graph()
    yield found
    found.close()


def run(gate: Gate, nodes: list[Address]) -> list[Address]:
    """Go through the nodes as llama.cpp does. Returns those that the graph stopped after."""
    on_node = _ON_NODE(gate.callback)
    gate.begin()
    stops = []
    for node in nodes:
        if on_node(node, True, gate.data):
            stops.append(node)
            if not on_node(node, False, gate.data):
                break
    return stops


def called(
    kind: str, graph: Graph, watches: list[Watch], answer: Callable[[str, int], int] = lambda *_: 1
) -> Calls:
    """Calls in a pass, as (ask or done, node)."""
    calls: Calls = []

    def handler(node: Address, number: int, ask: int) -> int:
        calls.append(("ask" if ask else "done", graph.names[node]))
        return answer(graph.names[node], ask)

    gate = _KINDS[kind][1](handler)
    gate.set_watches(watches)
    run(gate, graph.nodes)
    return calls


def new(kind: str) -> Watch:
    made: Watch = _KINDS[kind][0]()
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_names_stop_the_graph_without_a_question(kind: str, graph: Graph) -> None:
    for name in ("embd", "l_out-0", "l_out-1", "ffn_norm-1", "l_out-11", "x" * 63):
        graph.add(name)
    one, other = new(kind), new(kind)
    one.stop_after(b"l_out-1")
    one.stop_after(b"x" * 63)
    other.stop_after(b"ffn_", prefix=True)
    assert called(kind, graph, [one, other]) == [
        ("done", "l_out-1"),
        ("done", "ffn_norm-1"),
        ("done", "x" * 63),
    ]
    assert called(kind, graph, []) == []


@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_asked_about_from_some_number_of_rows_on(kind: str, graph: Graph) -> None:
    for rows in (1, 60, 61, 62):
        graph.add(f"product-{rows}", 0)
    seen = new(kind)
    seen.ask_about_operation(ggml.product(), 1)
    assert [name for _, name in called(kind, graph, [seen], lambda *_: 0)] == list(graph.names.values())
    many = new(kind)
    many.ask_about_operation(ggml.product(), 33)  # a weight has 32
    assert called(kind, graph, [many]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_asked_about_once_in_a_row(kind: str, graph: Graph) -> None:
    for name in ("embd", "norm-0", "Qcur-0", "Qcur-0 (view)", "l_out-0", "norm-1", "a-b", "-", "x-1", "y-0"):
        graph.add(name)
    numbered = new(kind)
    numbered.ask_about_numbers()
    calls = called(kind, graph, [numbered], lambda *_: 0)
    assert calls == [("ask", "norm-0"), ("ask", "norm-1"), ("ask", "y-0")]


@pytest.mark.parametrize("kind", KINDS)
def test_readers_are_asked_about_until_they_are_marked_and_their_group_is_there(
    kind: str, graph: Graph
) -> None:
    graph.add("embd")
    graph.add("q-0", 0)
    graph.add("k-0", 1)
    graph.add("sum-0")
    graph.add("q-1", 2)
    graph.add_view("part", graph.weights[3])
    layers = new(kind)
    for weight, group in ((0, 0), (1, 0), (2, 1)):
        layers.ask_about_readers(graph.weights[weight], group)
    asked = called(kind, graph, [layers], lambda *_: 0)
    assert asked == [("ask", "q-0"), ("ask", "k-0"), ("ask", "q-1")]
    found = [(reader.at, reader.name, reader.before) for reader in layers.readers()]
    assert found == [(1, b"q-0", b"embd"), (2, b"k-0", b"q-0"), (4, b"q-1", b"sum-0")]
    assert [reader.tensor for reader in layers.readers()] == graph.weights[:3]

    layers.mark(1, b"q-0", False)
    layers.mark(2, b"k-0", True)
    layers.mark(4, b"another node", False)
    layers.set_current(0)
    assert called(kind, graph, [layers]) == [("done", "k-0"), ("ask", "q-1"), ("done", "q-1")]
    assert not layers.pending
    layers.set_current(1)
    asked = called(kind, graph, [layers], lambda *_: 0)
    assert ("ask", "q-0") in asked, "its weights are not there"
    layers.mark(2, b"k-0", None)
    layers.set_current(0)
    assert ("ask", "k-0") in called(kind, graph, [layers], lambda *_: 0)
    assert layers.pending, "q-0 was passed over, and nothing has stopped since"
    layers.unmark()
    layers.ask_about_readers(graph.weights[3], 1)
    assert ("ask", "part") in called(kind, graph, [layers], lambda *_: 0)
    layers.forget_tensor(graph.weights[3])
    assert ("ask", "part") not in called(kind, graph, [layers], lambda *_: 0)


@pytest.mark.parametrize("kind", KINDS)
def test_readers_of_copies_are_asked_about_until_their_mark_holds_for_copies(kind: str, graph: Graph) -> None:
    graph.add("embd")
    graph.add("q-0", copied=b"CUDA0#blk.0.q.weight#0")
    graph.add("k-0", copied=b"CUDA0#blk.0.k.weight#0")
    graph.add("mask", copied=b"CUDA0#KQ_mask#0")
    graph.add("odd", copied=b"blk.0.q.weight#0")
    layers = new(kind)
    for weight, name in ((0, b"blk.0.q.weight"), (1, b"blk.0.k.weight")):
        layers.ask_about_readers(graph.weights[weight], 0)
        layers.ask_about_copies(name, graph.weights[weight])
    layers.set_current(0)
    asked = called(kind, graph, [layers], lambda *_: 0)
    assert asked == [("ask", "q-0"), ("ask", "k-0")]
    assert [(r.at, r.tensor) for r in layers.readers()] == [(1, graph.weights[0]), (2, graph.weights[1])]
    layers.mark(1, b"q-0", False)
    layers.mark(2, b"k-0", True)
    assert called(kind, graph, [layers], lambda *_: 0) == asked, "the marks hold for the tensors alone"
    layers.mark(1, b"q-0", False, of_copies=True)
    layers.mark(2, b"k-0", True, of_copies=True)
    assert called(kind, graph, [layers]) == [("done", "k-0")]
    layers.set_current(1)
    assert called(kind, graph, [layers], lambda *_: 0) == asked, "its weights are not there"


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_redirected_once_their_choice_is_known(kind: str, graph: Graph) -> None:
    stack = graph.tensor(ggml.F32, (32, 8, 4))
    chosen, ours, foreign = (graph.tensor(ggml.I32, (2, 1)) for _ in range(3))
    graph.add("topk-0")
    product = graph.add_indexed("up-0", stack, chosen)
    experts = new(kind)
    experts.stop_after(b"topk-0")
    experts.redirect(ggml.indexed_product(), stack, 0, ours)

    def choose(name: str, ask: int) -> int:
        if name == "topk-0":
            experts.set_choice(0, chosen)
        return 0

    assert called(kind, graph, [experts], lambda *_: 0) == [("done", "topk-0"), ("ask", "up-0")]
    assert ggml.indices_of(product) == chosen
    for _ in range(2):  # the second time, the graph has the indices of the first
        assert called(kind, graph, [experts], choose) == [("done", "topk-0")]
        assert ggml.indices_of(product) == ours
    assert ("ask", "up-0") in called(kind, graph, [experts], lambda *_: 0), "a choice holds for one pass"
    ggml.set_indices(product, foreign)
    assert ("ask", "up-0") in called(kind, graph, [experts], choose)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_ends_the_pass_and_only_that(kind: str, graph: Graph) -> None:
    for name in ("a", "b", "c", "d"):
        graph.add(name)
    both = [new(kind), new(kind)]
    for each in both:
        for name in (b"b", b"c"):
            each.stop_after(name)
    failing = [True]
    calls: Calls = []

    def handler(node: Address, number: int, ask: int) -> int:
        calls.append((str(number), graph.names[node]))
        return -1 if failing[0] else 1

    gate = _KINDS[kind][1](handler)
    gate.set_watches(both)
    assert run(gate, graph.nodes) == graph.nodes[1:2]
    assert calls == [("0", "b")], "nobody is called after the failure"
    failing[0] = False
    assert run(gate, graph.nodes) == graph.nodes[1:3]


marks = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([True, False, None]), st.booleans()),
    max_size=12,
)


@pytest.mark.skipif(not native.compiled(), reason="not compiled")
@given(
    st.lists(st.one_of(st.none(), st.integers(0, 7)), min_size=1, max_size=10),
    marks,
    st.integers(-1, 2),
    st.integers(0),
)
def test_both_kinds_do_the_same(weights: list[int | None], marked: Any, current: int, answers: int) -> None:
    graph = Graph()
    for number, weight in enumerate(weights):
        copied = b"GPU#w%d#0" % (weight - 4) if weight is not None and weight > 3 else None
        name = f"n-{number // 2}" if number % 3 else f"out-{number}"
        graph.add(name, None if copied else weight, copied=copied)
    names = list(graph.names.values())
    seen = {}
    for kind in _KINDS:
        layers, others = new(kind), new(kind)
        for weight in range(3):
            layers.ask_about_readers(graph.weights[weight], weight // 2)
            layers.ask_about_copies(b"w%d" % weight, graph.weights[weight])
        layers.set_current(None if current < 0 else current)
        for at, name, stop, of_copies in marked:
            layers.mark(at, names[name % len(names)].encode(), stop, of_copies=of_copies)
        others.stop_after(b"out-3")
        others.ask_about_numbers()
        calls = called(kind, graph, [layers, others], lambda name, ask: answers >> names.index(name) & 1)
        readers = [tuple(reader) for reader in layers.readers()]
        seen[kind] = calls, readers, layers.at, layers.pending
    graph.close()
    assert seen["compiled"] == seen["plain"]
