"""Stops of a graph, and calls of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.watch import Gate, Watch, can_watch

Calls = list[tuple[str, str]]

_ON_NODE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)

pytestmark = pytest.mark.skipif(not can_watch(), reason="not compiled")


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


def called(graph: Graph, watches: list[Watch], answer: Callable[[str, int], int] = lambda *_: 1) -> Calls:
    """Calls in a pass, as (ask or done, node)."""
    calls: Calls = []

    def handler(node: Address, number: int, ask: int) -> int:
        calls.append(("ask" if ask else "done", graph.names[node]))
        return answer(graph.names[node], ask)

    gate = Gate(handler)
    gate.set_watches(watches)
    run(gate, graph.nodes)
    return calls


def test_names_stop_the_graph_without_a_question(graph: Graph) -> None:
    for name in ("embd", "l_out-0", "l_out-1", "ffn_norm-1", "l_out-11", "x" * 63):
        graph.add(name)
    one, other = Watch(), Watch()
    one.stop_after(b"l_out-1")
    one.stop_after(b"x" * 63)
    other.stop_after(b"ffn_", prefix=True)
    assert called(graph, [one, other]) == [
        ("done", "l_out-1"),
        ("done", "ffn_norm-1"),
        ("done", "x" * 63),
    ]
    assert called(graph, []) == []


def test_operations_are_asked_about_from_some_number_of_rows_on(graph: Graph) -> None:
    for rows in (1, 60, 61, 62):
        graph.add(f"product-{rows}", 0)
    seen = Watch()
    seen.ask_about_operation(ggml.product(), 1)
    assert [name for _, name in called(graph, [seen], lambda *_: 0)] == list(graph.names.values())
    many = Watch()
    many.ask_about_operation(ggml.product(), 33)  # a weight has 32
    assert called(graph, [many]) == []


def test_numbers_are_asked_about_once_in_a_row(graph: Graph) -> None:
    for name in ("embd", "norm-0", "Qcur-0", "Qcur-0 (view)", "l_out-0", "norm-1", "a-b", "-", "x-1", "y-0"):
        graph.add(name)
    numbered = Watch()
    numbered.ask_about_numbers()
    calls = called(graph, [numbered], lambda *_: 0)
    assert calls == [("ask", "norm-0"), ("ask", "norm-1"), ("ask", "y-0")]


def test_readers_are_asked_about_until_they_are_marked_and_their_group_is_there(
    graph: Graph,
) -> None:
    graph.add("embd")
    graph.add("q-0", 0)
    graph.add("k-0", 1)
    graph.add("sum-0")
    graph.add("q-1", 2)
    graph.add_view("part", graph.weights[3])
    layers = Watch()
    for weight, group in ((0, 0), (1, 0), (2, 1)):
        layers.ask_about_readers(graph.weights[weight], group)
    asked = called(graph, [layers], lambda *_: 0)
    assert asked == [("ask", "q-0"), ("ask", "k-0"), ("ask", "q-1")]
    found = [(reader.at, reader.name, reader.before) for reader in layers.readers()]
    assert found == [(1, b"q-0", b"embd"), (2, b"k-0", b"q-0"), (4, b"q-1", b"sum-0")]
    assert [reader.tensor for reader in layers.readers()] == graph.weights[:3]

    layers.mark(1, b"q-0", False)
    layers.mark(2, b"k-0", True)
    layers.mark(4, b"another node", False)
    layers.set_current(0)
    assert called(graph, [layers]) == [("done", "k-0"), ("ask", "q-1"), ("done", "q-1")]
    assert not layers.pending
    layers.set_current(1)
    asked = called(graph, [layers], lambda *_: 0)
    assert ("ask", "q-0") in asked, "its weights are not there"
    layers.mark(2, b"k-0", None)
    layers.set_current(0)
    assert ("ask", "k-0") in called(graph, [layers], lambda *_: 0)
    assert layers.pending, "q-0 was passed over, and nothing has stopped since"
    layers.unmark()
    layers.ask_about_readers(graph.weights[3], 1)
    assert ("ask", "part") in called(graph, [layers], lambda *_: 0)
    layers.forget_tensor(graph.weights[3])
    assert ("ask", "part") not in called(graph, [layers], lambda *_: 0)


def test_readers_of_copies_are_asked_about_until_their_mark_holds_for_copies(graph: Graph) -> None:
    graph.add("embd")
    graph.add("q-0", copied=b"CUDA0#blk.0.q.weight#0")
    graph.add("k-0", copied=b"CUDA0#blk.0.k.weight#0")
    graph.add("mask", copied=b"CUDA0#KQ_mask#0")
    graph.add("odd", copied=b"blk.0.q.weight#0")
    layers = Watch()
    for weight, name in ((0, b"blk.0.q.weight"), (1, b"blk.0.k.weight")):
        layers.ask_about_readers(graph.weights[weight], 0)
        layers.ask_about_copies(name, graph.weights[weight])
    layers.set_current(0)
    asked = called(graph, [layers], lambda *_: 0)
    assert asked == [("ask", "q-0"), ("ask", "k-0")]
    assert [(r.at, r.tensor) for r in layers.readers()] == [(1, graph.weights[0]), (2, graph.weights[1])]
    layers.mark(1, b"q-0", False)
    layers.mark(2, b"k-0", True)
    assert called(graph, [layers], lambda *_: 0) == asked, "the marks hold for the tensors alone"
    layers.mark(1, b"q-0", False, of_copies=True)
    layers.mark(2, b"k-0", True, of_copies=True)
    assert called(graph, [layers]) == [("done", "k-0")]
    layers.set_current(1)
    assert called(graph, [layers], lambda *_: 0) == asked, "its weights are not there"


def test_products_are_redirected_once_their_choice_is_known(graph: Graph) -> None:
    stack = graph.tensor(ggml.F32, (32, 8, 4))
    chosen, ours, foreign = (graph.tensor(ggml.I32, (2, 1)) for _ in range(3))
    graph.add("topk-0")
    product = graph.add_indexed("up-0", stack, chosen)
    experts = Watch()
    experts.stop_after(b"topk-0")
    experts.redirect(ggml.indexed_product(), stack, 0, ours)

    def choose(name: str, ask: int) -> int:
        if name == "topk-0":
            experts.set_choice(0, chosen)
        return 0

    assert called(graph, [experts], lambda *_: 0) == [("done", "topk-0"), ("ask", "up-0")]
    assert ggml.indices_of(product) == chosen
    for _ in range(2):  # the second time, the graph has the indices of the first
        assert called(graph, [experts], choose) == [("done", "topk-0")]
        assert ggml.indices_of(product) == ours
    assert ("ask", "up-0") in called(graph, [experts], lambda *_: 0), "a choice holds for one pass"
    ggml.set_indices(product, foreign)
    assert ("ask", "up-0") in called(graph, [experts], choose)


def test_a_failure_ends_the_pass_and_only_that(graph: Graph) -> None:
    for name in ("a", "b", "c", "d"):
        graph.add(name)
    both = [Watch(), Watch()]
    for each in both:
        for name in (b"b", b"c"):
            each.stop_after(name)
    failing = [True]
    calls: Calls = []

    def handler(node: Address, number: int, ask: int) -> int:
        calls.append((str(number), graph.names[node]))
        return -1 if failing[0] else 1

    gate = Gate(handler)
    gate.set_watches(both)
    assert run(gate, graph.nodes) == graph.nodes[1:2]
    assert calls == [("0", "b")], "nobody is called after the failure"
    failing[0] = False
    assert run(gate, graph.nodes) == graph.nodes[1:3]
