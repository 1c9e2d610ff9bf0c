"""Drafting while a streamed pass waits: the real drafter's trees, and the real target's text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.drafters.model import ModelDrafter
from edgespec.engine.drafting_ahead import DraftingAhead
from edgespec.engine.engine import Engine
from edgespec.errors import BackendError, ModelFileError
from edgespec.generation.config import GenerationConfig
from edgespec.models.llama.runtime.residency import Meanwhile
from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.growth import Growth, TreeLimits
from edgespec.speculation.ranking import ByProbability
from edgespec.speculation.tree import TokenTree
from tests.integration.test_trees import assert_same_but_for_rounding
from tests.least_memory import load_in_least_memory
from tests.slow_disk import slow_down
from tests.unit.strategies import text_of, texts_of

PROMPT = "Write a short story about a fox and a crow who share a house."
CONFIGS = [GenerationConfig(max_tokens=24), GenerationConfig(max_tokens=24, temperature=0.8, seed=3)]


@pytest.fixture(scope="module")
def drafters(smol_path: Path, q4_drafter_path: Path) -> Iterator[list[Engine]]:
    """Two engines with the same drafter: one goes ahead, the other begins anew for every tree."""
    options: dict[str, Any] = {"draft": q4_drafter_path, "drafter": "model", "tree_budget": 12}
    with (
        edgespec.load(smol_path, context=256, **options) as one,
        edgespec.load(smol_path, context=256, **options) as other,
    ):
        yield [one, other]


def model_drafter(engine: Engine) -> ModelDrafter:
    assert isinstance(engine.drafter, ModelDrafter)
    return engine.drafter


def limits_of(engine: Engine) -> TreeLimits:
    return replace(engine.loop.sizer.limits(), growth=Growth())


def way_out(tree: TokenTree, wider: TokenTree) -> list[int]:
    """The tokens to the likeliest node outside a tree, whose parent is inside: what may be accepted next."""
    inside = texts_of(tree).keys()
    outside = [n for n in range(1, len(wider)) if text_of(wider, n) not in inside]
    best = max(outside, key=lambda n: (wider.logprobs[n], -n))
    return list(text_of(wider, best)[1:])


def test_what_was_read_ahead_begins_the_next_tree(drafters: list[Engine]) -> None:
    one, other = map(model_drafter, drafters)
    limits, ranking = limits_of(drafters[0]), ByProbability()
    text = drafters[0].encoder.encode(PROMPT)
    saved = 0
    for number in range(6):
        tree = one.draft(text, limits, ranking)
        taken = 0
        other.forget()
        fresh = other.draft(text, limits, ranking)
        assert_same_but_for_rounding(tree, fresh, rounding=0.5)
        saved += other.steps - one.steps
        while taken < 2 + 3 * number and one.draft_ahead():
            taken += 1
        assert taken
        text = text + way_out(tree, other.draft(text, replace(limits, budget=40), ranking))
    assert saved >= 6  # a step for each tree


def test_a_text_that_goes_on_otherwise_finds_nothing_of_it(drafters: list[Engine]) -> None:
    one, other = map(model_drafter, drafters)
    limits, ranking = limits_of(drafters[0]), ByProbability()
    text = drafters[0].encoder.encode(PROMPT)
    one.draft(text, limits, ranking)
    while one.draft_ahead():
        pass
    for unlikely in ([*text, 17, 4000], text[:-5], [*text[:-5], 9, 9]):
        other.forget()
        expected = other.draft(unlikely, limits, ranking)
        assert_same_but_for_rounding(one.draft(unlikely, limits, ranking), expected, rounding=0.5)
        one.draft_ahead()


def test_steps_ahead_leave_room_for_the_next_tree(smol_path: Path, q4_drafter_path: Path) -> None:
    with edgespec.load(smol_path, draft=q4_drafter_path, tree_budget=12, context=64) as engine:
        drafter, ranking = model_drafter(engine), ByProbability()
        limits = replace(limits_of(engine), width=32)
        text = engine.encoder.encode(PROMPT)[:40]
        cells = drafter._context.n_cells
        for _ in range(24):
            tree = drafter.draft(text, limits, ranking)
            assert len(tree) > 1
            while drafter.draft_ahead():
                pass
            held = len(drafter._drafted[0].read) + drafter._drafted[0].n_branch_cells
            assert held <= cells - 200
            text = [*text, *text_of(tree, int(tree.leaves[0]))[1:]]


class Always(DraftingAhead):
    """Uses every wait."""

    taken = 0

    def __init__(self, on_step: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._on_step = on_step

    def begin(self, drafter: Drafter, *, resting: bool = False) -> Meanwhile:
        del resting

        def use(read_ahead_s: float, left: float) -> bool:
            assert read_ahead_s >= 0
            assert 0 < left <= 1
            self._on_step()
            took_one = drafter.draft_ahead()
            self.taken += took_one
            return took_one

        return use


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are waited for."""
    slow_down(monkeypatch)


@pytest.fixture(scope="module")
def streamed(q4_drafter_path: Path, dropped_drafter_path: Path) -> Iterator[Engine]:
    with load_in_least_memory(
        q4_drafter_path, draft=dropped_drafter_path, tree_budget=12, exact=True, context=256
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(q4_drafter_path: Path) -> list[list[int]]:
    with edgespec.load(q4_drafter_path, draft="none", exact=True, context=256) as engine:
        return [engine.generate(PROMPT, config).tokens for config in CONFIGS]


@pytest.mark.usefixtures("slow_disk")
def test_the_text_is_the_same(streamed: Engine, expected: list[list[int]]) -> None:
    streamed.loop.ahead = ahead = Always()
    for config, tokens in zip(CONFIGS, expected, strict=True):
        taken = ahead.taken
        assert streamed.generate(PROMPT, config).tokens == tokens
        assert ahead.taken > taken


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("error", [ModelFileError("gone", "Look for it."), MemoryError()])
def test_a_step_that_fails_costs_nothing_but_itself(
    streamed: Engine, expected: list[list[int]], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = model_drafter(streamed)
    expand, during, failed = drafter._expand, False, 0

    def fail(*arguments: Any) -> Any:
        nonlocal failed
        if during:
            failed += 1
            expand(*arguments)
            raise error
        return expand(*arguments)

    def begin_failing() -> None:
        nonlocal during
        during = True

    class Failing(Always):
        def end(self, record: Any) -> None:
            nonlocal during
            during = False

    monkeypatch.setattr(drafter, "_expand", fail)
    streamed.loop.ahead = Failing(begin_failing)
    assert streamed.generate(PROMPT, CONFIGS[0]).tokens == expected[0]
    assert failed > 1


@pytest.mark.usefixtures("slow_disk")
def test_an_answer_can_be_cancelled_during_a_wait(streamed: Engine, expected: list[list[int]]) -> None:
    steps = 0

    def cancel_the_ninth() -> None:
        nonlocal steps
        steps += 1
        if steps == 9:
            streamed.cancel()

    streamed.loop.ahead = Always(cancel_the_ninth)
    answer = streamed.generate(PROMPT, CONFIGS[0])
    assert answer.finish_reason == "cancelled"
    assert answer.tokens == expected[0][: len(answer.tokens)]
    assert streamed.generate(PROMPT, CONFIGS[0]).tokens == expected[0]


@pytest.mark.usefixtures("slow_disk")
def test_an_engine_can_be_closed_during_a_wait(q4_drafter_path: Path, dropped_drafter_path: Path) -> None:
    with load_in_least_memory(
        q4_drafter_path, draft=dropped_drafter_path, tree_budget=12, context=256
    ) as engine:
        closing = threading.Thread(target=engine.close)

        def close() -> None:
            if not closing.is_alive() and not engine.closed:
                closing.start()
                while not engine.closed:
                    time.sleep(0.001)

        engine.loop.ahead = Always(close)
        with pytest.raises(BackendError, match="closed"):
            engine.generate(PROMPT, CONFIGS[0])
        closing.join()
        assert engine.target.closed
