"""Many answers in shared passes are those that each request gets alone, whatever joins, leaves or waits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec import GenerationConfig
from edgespec.engine.engine import Engine
from edgespec.engine.requests import Request, RequestList, RequestSource
from edgespec.engine.scheduler import Scheduler
from edgespec.errors import ContextLengthError, GrammarError, UsageError
from edgespec.generation.result import Chunk, FinishReason, Generation, PassRecord
from edgespec.llama.runtime.abort import AbortFlag
from edgespec.speculation.drafters.base import NoDrafter
from tests.tiers import examples
from tests.unit.fakes import CONTEXT, FakeCache, FakeDrafter, fake_engine

PREFIXES = ((), tuple(range(1, 21)), tuple([3] * 40))

prompts = st.builds(
    lambda prefix, rest: [*prefix, *rest],
    st.sampled_from(PREFIXES),
    st.lists(st.integers(1, 23), min_size=1, max_size=30),
)
configs = st.builds(
    GenerationConfig,
    max_tokens=st.integers(0, 30),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    seed=st.integers(0, 3),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    stop=st.sampled_from([(), ("b",), ("cd",)]),
)


def alone(prompt: list[int], config: GenerationConfig, seed: int) -> Generation:
    engine, _ = fake_engine(NoDrafter(), seed)
    with engine:
        return engine.generate(prompt, config)


@settings(max_examples=examples(150), deadline=None)
@given(
    requests=st.lists(st.tuples(prompts, configs), min_size=1, max_size=14),
    parallel=st.integers(1, 9),
    n_cells=st.sampled_from([200, 300, 1 << 20]),
    accuracy=st.sampled_from([0.0, 0.8]),
    exact=st.booleans(),
    seed=st.integers(0, 3),
)
def test_every_answer_is_that_of_the_request_alone(
    requests: list[tuple[list[int], GenerationConfig]],
    parallel: int,
    n_cells: int,
    accuracy: float,
    exact: bool,
    seed: int,
) -> None:
    engine, target = fake_engine(FakeDrafter(seed, accuracy), seed, exact=exact, n_cells=n_cells)
    with engine:
        told: dict[int, str] = {}
        answers: dict[int, Generation] = {}
        wanted = [Request(p, c, raw=True, key=i) for i, (p, c) in enumerate(requests)]
        for event in engine.stream_many(wanted, parallel=parallel):
            assert event.error is None
            assert event.chunk is not None
            told[event.request.key] = told.get(event.request.key, "") + event.chunk.text
            if event.chunk.generation is not None:
                answers[event.request.key] = event.chunk.generation
        assert target.sequences == [target.own], "all places are given back"
        for index, (prompt, config) in enumerate(requests):
            expected = alone(prompt, config, seed)
            assert answers[index].tokens == expected.tokens
            assert answers[index].finish_reason == expected.finish_reason
            assert told[index] == answers[index].text == expected.text


def test_a_request_for_no_tokens_gets_none_beside_one_with_its_prompt() -> None:
    engine, _ = fake_engine(NoDrafter(), 2, never_ends=True)
    prompt = [*range(1, 21)]
    with engine:
        wanted = [Request(prompt, GenerationConfig(max_tokens=n), raw=True, key=n) for n in (5, 0)]
        events = list(engine.stream_many(wanted, parallel=2))
    answers = {e.request.key: e.chunk.generation for e in events if e.chunk and e.chunk.generation}
    assert {n: len(answer.tokens) for n, answer in answers.items()} == {0: 0, 5: 5}


def test_texts_share_passes_and_wait_when_cells_run_out() -> None:
    config = GenerationConfig(max_tokens=60)
    texts = [[n + 1] * 8 for n in range(7)]
    alone_engine, one = fake_engine(NoDrafter(), 1, never_ends=True)
    with alone_engine:
        expected = [alone_engine.generate(text, config).tokens for text in texts]
    engine, target = fake_engine(NoDrafter(), 1, never_ends=True)
    with engine:
        assert [a.tokens for a in engine.generate_many(texts, config)] == expected
    assert target.passes < one.passes / 4
    engine, target = fake_engine(NoDrafter(), 1, never_ends=True, n_cells=300)
    with engine:
        assert [a.tokens for a in engine.generate_many(texts, config)] == expected
    assert target.states, "some texts had to wait"


def test_what_waited_on_disk_is_gone_as_soon_as_it_continues_or_is_given_up() -> None:
    engine, target = fake_engine(NoDrafter(), 1, never_ends=True, n_cells=300)
    config = GenerationConfig(max_tokens=60)

    class Server(RequestSource):
        """Requests in two bursts, with an idle time after each."""

        def __init__(self) -> None:
            self.left = [Request([n + 1] * 8, config) for n in range(7)]
            self.idle = 0

        def pop(self) -> Request | None:
            return self.left.pop() if self.left else None

        def wait(self) -> bool:
            assert target.states, "some texts had to wait"
            assert all(state.closed for state in target.states)
            self.idle += 1
            target.states.clear()
            self.left = [Request([n + 8] * 8, config) for n in range(7)]
            return self.idle < 2

    source = Server()
    with engine:
        for event in engine.stream_many(source):
            if source.idle and target.states:  # clients leave while their texts wait
                event.request.cancelled = True
        assert source.idle == 2
        for _ in engine.stream_many([Request([n + 1] * 8, config) for n in range(7)]):
            if target.states:
                engine.cancel()
        assert all(state.closed for state in target.states)


def test_rows_that_no_text_needs_are_drafted() -> None:
    """A good drafter makes the passes of a few texts fewer, and one that is never right hardly more."""
    config = GenerationConfig(max_tokens=40)
    texts = [[n + 1] * 8 for n in range(3)]
    passes = []
    for accuracy in (1.0, 0.0):
        drafter = FakeDrafter(1, accuracy)
        engine, target = fake_engine(drafter, 1, never_ends=True, tree_budget=4)
        with engine:
            answers = engine.generate_many(texts, config)
        assert drafter.drafted_together > 0
        assert sum(len(a.tokens) for a in answers) == 120
        assert len(drafter.learned) > 30
        passes.append(target.passes)
    assert passes[0] < passes[1] / 1.5


def test_a_rule_by_which_the_text_depends_on_the_drafts_takes_no_part() -> None:
    """The size of its trees would depend on the other texts."""
    drafter = FakeDrafter(1, 0.5)
    engine, _ = fake_engine(drafter, 1, never_ends=True, tree_budget=4)
    with engine:
        lossy = GenerationConfig(max_tokens=20, verify="typical", temperature=0.7)
        exact = GenerationConfig(max_tokens=20)
        answers = {
            event.request.key: event.chunk.generation
            for event in engine.stream_many([Request([1, 2], lossy, key=1), Request([3, 4], exact, key=2)])
            if event.chunk is not None and event.chunk.generation is not None
        }
    shared = len(answers[2].passes)
    assert all(record.nodes == 1 for record in answers[1].passes[:shared])
    assert any(record.nodes > 1 for record in answers[2].passes)


def test_a_request_that_fails_concerns_no_other() -> None:
    engine, _ = fake_engine(NoDrafter(), 0)
    with engine:
        good = [Request([4, n], GenerationConfig(max_tokens=5), key=n) for n in (1, 2)]
        bad = Request([1] * CONTEXT, GenerationConfig(), key="long")
        events = list(engine.stream_many([good[0], bad, good[1]]))
        errors = {event.request.key: event.error for event in events if event.error}
        assert set(errors) == {"long"}
        assert isinstance(errors["long"], ContextLengthError)
        done = [e.request.key for e in events if e.is_last and e.error is None]
        assert sorted(done) == [1, 2]


@pytest.mark.parametrize("place", ["begin", "accept", "add", "finish"])
@pytest.mark.parametrize("kind", [GrammarError, KeyError])
def test_a_text_that_fails_concerns_no_other(
    place: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether an error or a bug, and whether in its beginning, in the choice or in the reading of tokens."""
    engine, _ = fake_engine(NoDrafter(), 3, never_ends=True)
    with engine:
        config = GenerationConfig(max_tokens=9)
        expected = engine.generate([5, 6], config).tokens
        begin = engine.maker.for_prompt

        def fragile(prompt: list[int], *more: Any) -> object:
            sequence = begin(prompt, *more)
            if prompt[0] != 7:
                return sequence
            if place == "begin":
                raise kind("it is stuck")
            accept, add, finish = sequence.method.accept, sequence.add, sequence.answer.finish

            def failing(drafted: object, logits: object, text: list[int]) -> object:
                if len(text) > 4 and place == "accept":
                    text.append(1)
                    raise kind("it is stuck")
                return accept(drafted, logits, text)  # type: ignore[arg-type]

            def failing_too(record: PassRecord, *more: Any) -> Chunk:
                if len(sequence.tokens) > 4 and place == "add":
                    raise kind("it is stuck")
                return add(record, *more)

            def failing_again(reason: FinishReason) -> Chunk:
                if place in ("add", "finish"):
                    raise kind("it is stuck")
                return finish(reason)

            monkeypatch.setattr(sequence.answer, "finish", failing_again)
            monkeypatch.setattr(sequence.method, "accept", failing)
            monkeypatch.setattr(sequence, "add", failing_too)
            return sequence

        monkeypatch.setattr(engine.maker, "for_prompt", fragile)
        events = list(
            engine.stream_many([Request([7, 8], config, key="bad"), Request([5, 6], config, key="good")])
        )
        last = {event.request.key: event for event in events if event.is_last}
        assert isinstance(last["bad"].error, kind)
        assert last["good"].chunk is not None
        assert last["good"].chunk.generation is not None
        assert last["good"].chunk.generation.tokens == expected


def test_a_cancelled_request_ends_and_the_others_continue() -> None:
    engine, target = fake_engine(NoDrafter(), 2, never_ends=True)
    with engine:
        config = GenerationConfig(max_tokens=20)
        expected = engine.generate([2], config).tokens
        victim, other = Request([1], config, key="victim"), Request([2], config, key="other")
        reasons, tokens = {}, {}
        for count, event in enumerate(engine.stream_many([victim, other])):
            if count == 6:
                victim.cancelled = True
            assert event.chunk is not None
            if event.chunk.generation is not None:
                reasons[event.request.key] = event.chunk.generation.finish_reason
                tokens[event.request.key] = event.chunk.generation.tokens
        assert reasons == {"victim": "cancelled", "other": "length"}
        assert 0 < len(tokens["victim"]) < 20
        assert tokens["other"] == expected
        assert target.sequences == [target.own]


def test_cancelling_the_engine_ends_all_and_nothing_is_lost_afterwards() -> None:
    engine, target = fake_engine(NoDrafter(), 2, never_ends=True)
    with engine:
        config = GenerationConfig(max_tokens=20)
        expected = engine.generate([1], config).tokens
        events = []
        for event in engine.stream_many([Request([n], config, key=n) for n in (1, 2, 3)]):
            events.append(event)
            if len(events) == 7:
                engine.cancel()
        ends = [e.chunk.generation.finish_reason for e in events if e.chunk and e.chunk.generation]
        assert ends == ["cancelled"] * 3
        assert target.sequences == [target.own]
        assert engine.generate([1], config).tokens == expected


def test_requests_join_while_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that has its second request only after the first one has begun."""

    class Trickle(RequestSource):
        def __init__(self) -> None:
            self.waits = 0
            self.steps: Iterator[Request | None] = iter(
                [None, request(1), None, None, request(2), None, request(3)]
            )

        def pop(self) -> Request | None:
            return next(self.steps, None)

        def wait(self) -> bool:
            self.waits += 1
            return self.waits < 4

    def request(n: int) -> Request:
        return Request([n], GenerationConfig(max_tokens=6), key=n)

    engine, _ = fake_engine(NoDrafter(), 2, never_ends=True)
    with engine:
        order = [e.request.key for e in engine.stream_many(Trickle())]
        first_end = len(order) - 1 - order[::-1].index(1)
        assert order.index(2) < first_end, "the second joined before the first had ended"
        assert sorted(set(order)) == [1, 2, 3]


def test_the_engine_is_busy_meanwhile() -> None:
    engine, _ = fake_engine(NoDrafter(), 2)
    with engine:
        answers = engine.stream_many([Request([1], GenerationConfig(max_tokens=5))])
        next(answers)
        with pytest.raises(UsageError, match="busy"):
            engine.generate([1])
        answers.close()
        engine.generate([1], GenerationConfig(max_tokens=2))
        with pytest.raises(UsageError, match="parallel"):
            engine.generate_many([[1]], parallel=0)


def test_one_engine_does_both(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine
    engine, _ = fake_engine(FakeDrafter(1, 0.9), 1)
    with engine:
        config = GenerationConfig(max_tokens=12)
        before = engine.generate([1, 2, 3], config).tokens
        (many,) = engine.generate_many([[1, 2, 3]], config)
        assert many.tokens == before == engine.generate([1, 2, 3], config).tokens


def test_a_pass_that_reads_prompts_has_no_more_rows_than_there_are_free_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where weights are streamed, with an answer beside two prompts that grows meanwhile."""
    engine, target = fake_engine(NoDrafter(), 1, never_ends=True, n_cells=300)
    target.context.n_rows = 1 << 20
    target.model.weights = SimpleNamespace(streamed_bytes=1)
    monkeypatch.setattr(target, "shared_rows", lambda wanted: wanted, raising=False)
    with engine:
        scheduler = Scheduler(
            engine.target,
            engine.drafter,
            RequestList([]),
            AbortFlag(),
            step=engine.decoder.step,
            begin=engine._begin,
            finish=engine.decoder.finish,
            max_sequences=3,
        )
        assert scheduler._limits_with(0, [250]).rows == 250
        target.own.tokens, target.own.cache = [1] * 100, FakeCache(100)  # type: ignore[assignment]
        assert scheduler._limits_with(0, [250]).rows == 200
