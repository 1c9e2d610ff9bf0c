"""The engine around a fake target and a fake drafter: what it guarantees whatever they do."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.engine.requests import Request
from edgespec.engine.turn import Turn
from edgespec.errors import BackendError, ContextLengthError, UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.decisions import Decisions
from edgespec.generation.result import Generation
from edgespec.speculation.drafters.base import NoDrafter
from edgespec.speculation.drafters.proposing import lookup_drafter
from tests.unit.fakes import CONTEXT, END, N_VOCAB, FakeDrafter, fake_engine, logits_after

PROMPT = [5, 6, 7]

seeds = st.integers(0, 2**16)
prompts = st.lists(st.integers(1, N_VOCAB - 1), min_size=1, max_size=6)
configs = st.builds(
    GenerationConfig,
    max_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 5]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    stop=st.sampled_from([(), ("c",), ("gh", "b")]),
    seed=seeds,
)


def plain(seed: int, prompt: list[int], config: GenerationConfig) -> Generation:
    return fake_engine(NoDrafter(), seed)[0].generate(prompt, config)


@settings(max_examples=60)
@given(seeds, prompts, configs, st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.sampled_from([None, 1, 2, 4, 16]))
def test_the_text_is_that_of_plain_decoding(
    seed: int, prompt: list[int], config: GenerationConfig, accuracy: float, tree_budget: int | None
) -> None:
    expected = plain(seed, prompt, config)
    for drafter in (FakeDrafter(seed, accuracy), lookup_drafter()):
        engine, target = fake_engine(drafter, seed, tree_budget=tree_budget)
        answer = engine.generate(prompt, config)
        assert (answer.tokens, answer.text) == (expected.tokens, expected.text)
        assert answer.finish_reason == expected.finish_reason
        # The cache is left as plain decoding leaves it, so that a conversation continues from there.
        read = [*prompt, *answer.tokens]
        assert target.tokens == read[: len(target.tokens)]
        assert len(target.tokens) >= len(read) - 1


@settings(max_examples=30)
@given(seeds, configs, st.sampled_from([0.5, 1.0]))
def test_figures_count_the_tokens_of_the_answer(seed: int, config: GenerationConfig, accuracy: float) -> None:
    engine, target = fake_engine(FakeDrafter(seed, accuracy), seed, tree_budget=8)
    chunks = list(engine.stream(PROMPT, config))
    answer = chunks[-1].generation
    assert answer is not None
    assert len(answer.passes) == target.passes
    ended = len(target.tokens) == len(PROMPT) + len(answer.tokens)  # by an end token, which is counted
    yielded = sum(record.accepted + 1 for record in answer.passes)
    assert yielded in (len(answer.tokens), len(answer.tokens) + ended)
    assert [token for chunk in chunks for token in chunk.tokens] == answer.tokens
    assert "".join(chunk.text for chunk in chunks) == answer.text
    for name in ("verify_s", "draft_s"):
        assert getattr(answer.timings, name) == pytest.approx(sum(getattr(r, name) for r in answer.passes))
    again = engine.generate(PROMPT, config)
    assert (again.tokens, again.text) == (answer.tokens, answer.text)


def test_a_drafter_that_is_right_saves_passes() -> None:
    config = GenerationConfig(max_tokens=40)
    engine, _ = fake_engine(FakeDrafter(3, 1.0), 3, tree_budget=4, never_ends=True)
    answer = engine.generate(PROMPT, config)
    assert answer.tokens_per_pass == 4.0
    assert len(answer.passes) == 10


def test_a_drafter_is_told_what_the_target_chose() -> None:
    drafter = FakeDrafter(1, 0.7)
    engine, _ = fake_engine(drafter, 1, tree_budget=4, never_ends=True)
    answer = engine.generate(PROMPT, GenerationConfig(max_tokens=12))
    whole = [*PROMPT, *answer.tokens]
    assert len(drafter.learned) == len(answer.passes)
    assert all(text == whole[: len(text)] for text in drafter.learned)


@pytest.mark.parametrize("where", ["draft", "pass"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_what_ends_an_answer_does_not_touch_the_next(where: str, error: type[BaseException]) -> None:
    drafter = FakeDrafter(2, 0.8)
    engine, target = fake_engine(drafter, 2, tree_budget=4, never_ends=True)
    config = GenerationConfig(max_tokens=20)
    expected = engine.generate(PROMPT, config).tokens
    countdown = iter([False, False, True])

    def fail() -> None:
        if next(countdown):
            raise error

    setattr(*((drafter, "on_draft") if where == "draft" else (target, "on_pass")), fail)
    with pytest.raises(error):
        engine.generate(PROMPT, config)
    drafter.on_draft = target.on_pass = lambda: None
    assert engine.generate(PROMPT, config).tokens == expected


def test_a_cancelled_answer_is_the_beginning_of_the_whole_one() -> None:
    engine, _ = fake_engine(FakeDrafter(4, 0.8), 4, tree_budget=4, never_ends=True)
    config = GenerationConfig(max_tokens=30)
    whole = engine.generate(PROMPT, config).tokens
    stream = engine.stream(PROMPT, config)
    next(stream)
    engine.cancel()
    answer = list(stream)[-1].generation
    assert answer is not None
    assert answer.finish_reason == "cancelled"
    assert 0 < len(answer.tokens) < len(whole)
    assert answer.tokens == whole[: len(answer.tokens)]


@pytest.mark.parametrize(
    ("error", "reason"), [(KeyboardInterrupt, "cancelled"), (MemoryError, "error"), (ValueError, "error")]
)
def test_a_failure_is_not_reported_as_a_stop(error: type[BaseException], reason: str) -> None:
    engine, target = fake_engine(NoDrafter(), 2, never_ends=True)
    kept: list[Generation] = []
    stream = engine.stream_turn(lambda: Turn(PROMPT, on_end=kept.append), GenerationConfig(max_tokens=20))
    next(stream)

    def fail() -> None:
        raise error

    target.on_pass = fail
    with pytest.raises(error):
        next(stream)
    assert engine.last_generation is not None
    assert engine.last_generation.finish_reason == reason
    assert len(engine.last_generation.tokens) == 1
    assert kept == ([engine.last_generation] if reason == "cancelled" else [])


def test_few_frames_lead_to_a_pass() -> None:
    engine, target = fake_engine(NoDrafter(), 2, never_ends=True)
    frames: list[int] = []

    def count() -> None:
        names = [f.name for f in traceback.extract_stack() if Path(f.filename).parent.name == "engine"]
        frames.append(names.index("step"))

    target.on_pass = count
    config = GenerationConfig(max_tokens=2)
    list(engine.stream(PROMPT, config))
    list(engine.stream_many([Request(PROMPT, config, raw=True)]))
    assert max(frames) <= 4


def test_one_answer_at_a_time() -> None:
    engine, _ = fake_engine(FakeDrafter(4, 0.8), 4)
    first = engine.stream(PROMPT)
    next(first)
    with pytest.raises(UsageError, match="busy"):
        next(engine.stream(PROMPT))
    first.close()
    engine.generate(PROMPT)


def test_the_context_is_never_exceeded() -> None:
    engine, target = fake_engine(FakeDrafter(5, 0.9), 5, tree_budget=16, never_ends=True)
    answer = engine.generate(PROMPT)
    assert (answer.finish_reason, answer.context_full) == ("length", True)
    assert len(PROMPT) + len(answer.tokens) == CONTEXT
    assert len(target.tokens) < CONTEXT
    with pytest.raises(ContextLengthError, match=f"holds {CONTEXT}"):
        engine.generate([1] * CONTEXT)
    with pytest.raises(UsageError, match="empty"):
        engine.generate([])


def test_an_end_token_is_no_part_of_the_text() -> None:
    seed = next(s for s in range(1000) if np.argmax(logits_after(PROMPT, s)) == END)
    answer = fake_engine(FakeDrafter(seed, 1.0), seed)[0].generate(PROMPT)
    assert (answer.tokens, answer.text, answer.finish_reason) == ([], "", "stop")
    assert answer.tokens_per_pass == 1.0


def test_closing_from_another_thread_ends_the_answer() -> None:
    drafter = FakeDrafter(6, 0.8)
    engine, target = fake_engine(drafter, 6, never_ends=True)
    stream = engine.stream(PROMPT)
    next(stream)
    closer = threading.Thread(target=engine.close)
    closer.start()
    closer.join()
    with pytest.raises(BackendError, match="closed"):
        list(stream)
    assert target.closed
    assert drafter.closed
    with pytest.raises(BackendError, match="closed"):
        engine.generate(PROMPT)


def test_a_seed_fixes_sampled_text_and_another_seed_changes_it() -> None:
    config = GenerationConfig(max_tokens=40, temperature=1.0, top_p=0.95)
    texts = [plain(7, PROMPT, config.with_(seed=seed)).tokens for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    answer = plain(7, PROMPT, config)
    assert plain(7, PROMPT, config.with_(seed=answer.seed)).tokens == answer.tokens, "the seed is reported"


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_a_stop_string_that_spans_tokens_is_cut_exactly(accuracy: float) -> None:
    engine, _ = fake_engine(FakeDrafter(8, accuracy), 8, tree_budget=4, never_ends=True)
    whole = engine.generate(PROMPT, GenerationConfig(max_tokens=40)).text
    stop = whole[20:24]
    answer = engine.generate(PROMPT, GenerationConfig(max_tokens=40, stop=(stop,)))
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("rule", ["recursive", "block", "speculative", "spectr", "specinfer", "typical"])
def test_greedy_text_is_the_same_with_every_rule_that_compares_distributions(rule: str) -> None:
    engine, _ = fake_engine(FakeDrafter(9, 0.8), 9, tree_budget=8, never_ends=True)
    answer = engine.generate(PROMPT, GenerationConfig(max_tokens=24, verify=rule))
    assert answer.tokens == plain_without_end(9)
    assert (answer.verify, answer.lossy) == ("greedy", False)


def plain_without_end(seed: int) -> list[int]:
    return (
        fake_engine(NoDrafter(), seed, never_ends=True)[0]
        .generate(PROMPT, GenerationConfig(max_tokens=24))
        .tokens
    )


def test_a_rule_that_weighs_drafts_is_refused_where_the_text_must_be_exact() -> None:
    engine, _ = fake_engine(lookup_drafter(), 10, exact=True)
    config = GenerationConfig(temperature=1.0, seed=2, max_tokens=4)
    for rule in ("speculative", "typical"):
        with pytest.raises(UsageError, match=f"With the rule '{rule}' the text depends on the drafter"):
            engine.generate(PROMPT, config.with_(verify=rule))
    assert engine.generate(PROMPT, config).exact
    # At a temperature of 0 it comes down to the target's choice.
    assert engine.generate(PROMPT, config.with_(temperature=0.0, verify="speculative")).exact


def test_a_rule_that_draws_needs_a_drafter_that_draws() -> None:
    engine, _ = fake_engine(lookup_drafter(), 11, never_ends=True)
    with pytest.raises(UsageError, match="The rule 'recursive' needs tokens sampled from a model"):
        engine.generate(PROMPT, GenerationConfig(temperature=1.0, verify="recursive"))
    assert engine.last_generation is None
    config = GenerationConfig(temperature=1.0, seed=2, max_tokens=8)
    for rule in ("block", "speculative"):  # the best guess counts as a draw from a distribution of one token
        answer = engine.generate(PROMPT * 3, config.with_(verify=rule))
        assert len(answer.tokens) == 8
        assert not answer.exact


@pytest.mark.parametrize("tree_budget", [None, 6])
@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("agreement", [0.0, 0.9])
def test_drafting_is_forced_whatever_it_costs(tree_budget: int | None, texts: int, agreement: float) -> None:
    """Also where it does not pay, and where it does."""
    config = GenerationConfig(max_tokens=30)
    prompts = [[1, 2, 3 + number] for number in range(texts)]
    plain, _ = fake_engine(NoDrafter(), 5, never_ends=True)
    expected = [plain.generate(prompt, config).tokens for prompt in prompts]
    for forced in (True, False):
        drafter = FakeDrafter(5, agreement)
        engine, _ = fake_engine(drafter, 5, tree_budget=tree_budget, never_ends=True)
        engine.speculator.decisions = Decisions(drafting=forced)
        if texts == 1:
            answers = [engine.generate(prompts[0], config)]
        else:
            answers = engine.generate_many(prompts, config)
        assert [answer.tokens for answer in answers] == expected
        sizes = [record.nodes for answer in answers for record in answer.passes[:-1]]
        assert (min(sizes) > 1) if forced and texts == 1 else (max(sizes) > 1) is forced


def test_what_is_read_while_the_drafter_works_is_noted() -> None:
    drafter = FakeDrafter(5, 0.5)
    engine, target = fake_engine(drafter, 5, tree_budget=6, never_ends=True)

    def read_ahead() -> None:
        target.read_s += 0.25

    drafter.on_draft = read_ahead
    target.on_pass = read_ahead
    target.waits = 1
    answer = engine.generate([1, 2, 3], GenerationConfig(max_tokens=20))
    drafted = [record for record in answer.passes if record.nodes > 1]
    assert len(drafted) >= len(answer.passes) - 1  # nothing can follow the last token
    assert [record.draft_read_s for record in drafted] == [0.25] * len(drafted)
    assert [record.hidden_draft_s for record in drafted] == [0.25] * len(drafted)
