"""The first pass of an answer: the last rows of the prompt and the first tree together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.engine.engine import Engine
from edgespec.engine.target import Target
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from edgespec.llama.cache.states import BLOCK
from edgespec.llama.row_rule import ANY_ROWS
from tests.interrupting import Intruder
from tests.least_memory import load_in_least_memory
from tests.tiers import slow_except

PROMPT = "Name the planets."
CONFIG = GenerationConfig(max_tokens=20)


def open_streamed(model: Path, **options: Any) -> Engine:
    engine = load_in_least_memory(model, context=512, **options)
    if engine.target.rule != ANY_ROWS:
        engine.close()
        pytest.skip("the number of rows changes bits here, so prompts are read alone")
    return engine


def apart(engine: Engine, monkeypatch: pytest.MonkeyPatch, config: GenerationConfig = CONFIG) -> Generation:
    """The answer if the prompt is read before the first tree."""
    with monkeypatch.context() as patch:
        patch.setattr(Target, "max_unread", 0)
        engine.target.rewind(0)
        return engine.generate(PROMPT, config)


ENGINES: list[dict[str, Any]] = [{"draft": "none"}, {"draft": "lookup"}, {"tree_budget": 8}, {}]


@pytest.fixture(scope="module", params=slow_except([ENGINES[2]], ENGINES))
def engine(request: pytest.FixtureRequest, short_path: Path, short_q4_path: Path) -> Iterator[Engine]:
    """Plain, drafted for by lookup, by trees of one size, and by trees sized by cost."""
    options = {"draft": short_q4_path, **request.param}
    with open_streamed(short_path, **options) as engine:
        yield engine


@pytest.mark.parametrize("config", [CONFIG, GenerationConfig(max_tokens=20, temperature=0.9, seed=4)])
def test_it_saves_a_pass_and_changes_no_token(
    engine: Engine, config: GenerationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = apart(engine, monkeypatch, config)
    engine.target.rewind(0)
    answer = engine.generate(PROMPT, config)
    assert answer.tokens == expected.tokens
    assert expected.passes[0].prompt_rows == 0
    assert answer.passes[0].prompt_rows == answer.prompt_tokens - 1


def test_a_single_request_saves_a_pass_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = apart(engine, monkeypatch)
    for prompt in (PROMPT, "one two three four five " * 40):
        engine.target.rewind(0)
        (answer,) = engine.generate_many([prompt], CONFIG)
        assert 0 < answer.passes[0].prompt_rows <= answer.prompt_tokens - 1
        if prompt == PROMPT:
            assert answer.tokens == expected.tokens
            assert answer.passes[0].prompt_rows == answer.prompt_tokens - 1
    first, second = engine.generate_many([PROMPT, "Name the rivers."], CONFIG)
    assert first.tokens == expected.tokens
    assert second.tokens == engine.generate("Name the rivers.", CONFIG).tokens


def test_it_counts_as_reading_the_prompt(engine: Engine) -> None:
    engine.target.rewind(0)
    answer = engine.generate(PROMPT, CONFIG)
    first, *others = answer.passes
    assert first.prompt_rows > 0
    assert answer.timings.prefill_s > first.verify_s
    assert answer.timings.decode_s == pytest.approx(sum(record.seconds for record in others))
    later = len(answer.tokens) - first.accepted - 1
    assert answer.tokens_per_second == pytest.approx(later / answer.timings.decode_s)


def test_a_long_prompt_leaves_its_last_piece(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.integration.test_first_pass.PROMPT", "one two three four five " * 40)
    expected = apart(engine, monkeypatch)
    engine.target.rewind(0)
    seen: list[tuple[int, int]] = []
    answer = engine.generate(PROMPT, CONFIG, on_prefill=lambda read, missing: seen.append((read, missing)))
    assert answer.tokens == expected.tokens
    assert seen[-1][0] + answer.passes[0].prompt_rows == seen[-1][1]


def test_an_interrupted_one_changes_no_later_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = apart(engine, monkeypatch)
    short = GenerationConfig(max_tokens=1)
    engine.target.rewind(0)
    counter = Intruder()
    counter.run(lambda: engine.generate(PROMPT, short))
    for tenth in range(1, 10):
        engine.target.rewind(0)
        Intruder(counter.lines * tenth // 10).run(lambda: engine.generate(PROMPT, short))
        assert engine.generate(PROMPT, CONFIG).tokens == expected.tokens


def test_a_later_turn_is_read_with_its_first_tree(engine: Engine) -> None:
    first = [{"role": "user", "content": PROMPT}]
    engine.generate(first, CONFIG)
    answered = {"role": "assistant", "content": "No."}  # nonsense would be read as other tokens
    turns = [*first, answered, {"role": "user", "content": "And the last?"}]
    answer = engine.generate(turns, CONFIG)
    assert 0 < answer.passes[0].prompt_rows < answer.prompt_tokens // 2
    engine.target.rewind(0)
    assert engine.generate(turns, CONFIG).tokens == answer.tokens


def test_blocks_of_the_prompt_are_saved(short_path: Path) -> None:
    prompt = "one two three four five six seven eight nine ten " * 30
    missing: list[int] = []
    answers = []
    for _ in range(2):
        with open_streamed(short_path, prompt_cache=True) as engine:
            answers.append(
                engine.generate(prompt, CONFIG, raw=True, on_prefill=lambda _read, of: missing.append(of))
            )
    assert answers[0].tokens == answers[1].tokens
    assert missing[-1] < BLOCK < missing[0]


def test_a_short_prompt_in_memory_is_read_with_its_first_tree(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with edgespec.load(short_path, draft="lookup", context=512) as engine:
        if engine.target.rule != ANY_ROWS:
            pytest.skip("the number of rows changes bits here, so prompts are read alone")
        expected = apart(engine, monkeypatch)
        engine.target.rewind(0)
        answer = engine.generate(PROMPT, CONFIG)
        assert answer.tokens == expected.tokens
        assert answer.passes[0].prompt_rows == answer.prompt_tokens - 1
        assert engine.generate("one two three four five " * 40, CONFIG).passes[0].prompt_rows == 0


def test_all_of_a_prompt_is_read_where_nothing_is_answered(short_path: Path) -> None:
    with edgespec.load(short_path, draft="lookup", context=512) as engine:
        answer = engine.generate(PROMPT, GenerationConfig(max_tokens=0))
        assert len(engine.target.tokens) == answer.prompt_tokens - 1
