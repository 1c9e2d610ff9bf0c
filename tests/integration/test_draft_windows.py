"""Drafters that leave out the middle of long texts: the target's text does not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.drafters.draft_sequence import WHOLE, DraftWindow
from edgespec.drafters.model import ModelDrafter
from edgespec.engine.engine import Engine
from edgespec.engine.requests import Request
from edgespec.engine.sessions.file import SessionFile
from edgespec.engine.sessions.session import Session
from edgespec.errors import ContradictionError
from edgespec.generation.config import GenerationConfig
from edgespec.llama.runtime.context import Context
from tests.tiny_mamba import write_mamba

STORY = "".join(
    f"On day {day} the keeper counted {day % 7} ships, and wrote their names down. " for day in range(28)
)
WINDOW = 48
GREEDY = GenerationConfig(max_tokens=56)
SAMPLED = GenerationConfig(max_tokens=32, temperature=0.8, top_p=0.95, seed=5)
DRAWN = GenerationConfig(max_tokens=24, temperature=0.8, seed=5, verify="recursive")
PROMPTS = [STORY, STORY[:900], STORY[:1700] + "Then", STORY + " The end. " * 9]


PlainText = Callable[[GenerationConfig, str], list[int]]


@pytest.fixture(scope="module")
def plain_text(short_path: Path) -> Iterator[PlainText]:
    with edgespec.load(short_path, draft="none", exact=True, context=1024, threads=1) as engine:
        yield cache(lambda config, prompt: engine.generate(prompt, config, raw=True).tokens)


@pytest.fixture(scope="module")
def engine(short_path: Path) -> Iterator[Engine]:
    with loaded(short_path, drafter="model", draft_window=WINDOW) as engine:
        yield engine


def loaded(path: Path, **more: Any) -> Engine:
    """A model that drafts for itself."""
    return edgespec.load(
        path, draft=path, exact=True, tree_budget=8, context=1024, learn=False, threads=1, **more
    )


def drafter_of(engine: Engine) -> ModelDrafter:
    assert isinstance(engine.drafter, ModelDrafter)
    return engine.drafter


@pytest.mark.slow
def test_texts_are_those_of_plain_decoding(
    engine: Engine, plain_text: PlainText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rewinds between prompts into the middle, the beginning and the window, which moves on the way."""
    shifts, most = [], 0
    shift = Context.shift

    def moved(context: Context, sequence: int, start: int, by: int) -> None:
        shifts.append(by)
        shift(context, sequence, start, by)

    monkeypatch.setattr(Context, "shift", moved)
    for config in (GREEDY, SAMPLED):
        for prompt in PROMPTS:
            answer = engine.generate(prompt, config, raw=True)
            assert answer.tokens == plain_text(config, prompt)
            assert answer.tokens_per_pass > 1.2
            (read,) = [len(sequence.read) for sequence in drafter_of(engine)._sequences]
            most = max(most, read)
    assert 0 < most <= DraftWindow(WINDOW).most
    assert set(shifts) == {-WINDOW // 2}


def test_moved_cells_predict_as_cells_that_were_read_there(engine: Engine) -> None:
    """The model drafts for itself: what it reads at once and what has moved up are hardly different."""
    drafter, config = drafter_of(engine), SAMPLED.with_(max_tokens=64)
    answer = engine.generate(STORY, config, raw=True)
    kept = answer.tokens_per_pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "can_shift", False)
        drafter.forget()
        again = engine.generate(STORY, config, raw=True)
    assert again.tokens == answer.tokens
    assert kept > 0.6 * again.tokens_per_pass  # without these cells it would be about 1


def test_batches_work_with_a_window(engine: Engine, plain_text: PlainText) -> None:
    answers = {}
    requests = [Request(prompt, GREEDY, raw=True, key=n) for n, prompt in enumerate(PROMPTS[:2])]
    for event in engine.stream_many(requests, parallel=2):
        assert event.error is None
        if event.chunk is not None and event.chunk.generation is not None:
            answers[event.request.key] = event.chunk.generation.tokens
    assert [answers[n] for n in range(2)] == [plain_text(GREEDY, prompt) for prompt in PROMPTS[:2]]


def test_trees_are_drawn_from_what_the_drafter_sees(short_path: Path) -> None:
    with edgespec.load(
        short_path, draft=short_path, draft_window=WINDOW, exact=False, tree_budget=6, context=1024, threads=1
    ) as engine:
        answer = engine.generate(STORY, DRAWN, raw=True)
        assert answer.tokens_per_pass > 1.2
        assert len(drafter_of(engine)._sequences[0].read) <= DraftWindow(WINDOW).most


def test_a_session_keeps_what_the_drafter_read(
    engine: Engine, short_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, questions = GenerationConfig(max_tokens=12), (STORY, "Go on. " + STORY[:200])
    session = Session(engine)
    for question in questions:
        list(session.ask(question, short))
    expected, path = session.messages, tmp_path / "talk.json"
    session.close()
    window, restored = DraftWindow(200), list[int]()
    recall = ModelDrafter.recall

    def recalled(drafter: ModelDrafter, sequence: Sequence[int], folder: Path) -> None:
        recall(drafter, sequence, folder)
        restored.append(len(drafter._sequences[0].read))

    monkeypatch.setattr(ModelDrafter, "recall", recalled)
    for question in questions:
        with loaded(short_path, draft_window=window.last, prompt_cache=True) as other:
            session = Session(other)
            session.resume(SessionFile(str(path)))
            list(session.ask(question, short))
            session.close()
    assert session.messages == expected
    # The second question moved the window by a step.
    assert restored[0] == 0
    assert restored[1] > window.first
    saved = [
        int(file.stem.partition("-")[2]) for file in (tmp_path / "talk.json.kv" / "drafter").glob("*.kv")
    ]
    assert 128 < sum(saved) <= window.most


def test_a_window_takes_fewer_cells(short_path: Path) -> None:
    cells = {}
    for window in (0, WINDOW):
        with edgespec.load(
            short_path, draft=short_path, draft_window=window, tree_budget=8, context=4096, learn=False
        ) as engine:
            cells[window] = drafter_of(engine)._context.n_cells
            assert drafter_of(engine)._window == (DraftWindow(window) if window else WHOLE)
    assert cells[WINDOW] < cells[0] / 3


def test_a_running_state_reads_whole_texts(smol_path: Path, tmp_path: Path) -> None:
    mamba = write_mamba(tmp_path / "tiny-mamba.gguf", smol_path)
    with edgespec.load(mamba, draft=mamba, draft_window=WINDOW, tree_budget=8, context=512) as engine:
        assert drafter_of(engine)._window == WHOLE
        assert any("reads whole texts" in note for note in engine.notes)


def test_a_window_of_nothing_is_refused(short_path: Path) -> None:
    with pytest.raises(ContradictionError, match="draft_window"):
        edgespec.load(short_path, draft="none", draft_window=WINDOW)


@pytest.mark.slow
def test_a_drafter_with_another_vocabulary_reads_a_window_of_its_own_tokens(
    short_path: Path, gemma_path: Path, plain_text: PlainText
) -> None:
    with edgespec.load(
        short_path, draft=gemma_path, draft_window=WINDOW, exact=True, tree_budget=8, context=1024, threads=1
    ) as engine:
        assert (
            engine.generate(STORY, GenerationConfig(max_tokens=24), raw=True).tokens
            == plain_text(GREEDY, STORY)[:24]
        )
        (sequence,) = drafter_of(engine)._sequences
        assert 0 < len(sequence.read) <= DraftWindow(WINDOW).most + 8
