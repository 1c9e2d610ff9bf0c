"""Scores of given texts: the log-softmax of a plain pass, whatever shares passes, in memory and streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import GenerationConfig
from edgespec.engine.engine import Engine
from edgespec.engine.sequence import TextSequence
from edgespec.errors import ContextLengthError, UsageError
from edgespec.generation.result import TokenLogprob
from edgespec.generation.score import Score
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from tests.least_memory import load_in_least_memory
from tests.tiers import slow_except
from tests.tiny import write_tiny
from tests.tiny_hybrids import HYBRIDS
from tests.tiny_mamba import write_mamba

CONTEXT = 512
QUESTION = "Tea was first drunk in the south-west of China, where the plant grows wild in the hills. Where?"
ANSWERS = [" In China.", " In India, some say", " In the hills", " In Ceylon"]
TEXT = "\n".join(f"The harvest of {year} was {year % 97} chests of tea." for year in range(1800, 1816))


@pytest.fixture(scope="module")
def engine(short_path: Path) -> Iterator[Engine]:
    with edgespec.load(short_path, draft="lookup", exact=True, context=CONTEXT, threads=1) as engine:
        yield engine


def plain_logprobs(path: Path, tokens: Sequence[int]) -> list[float]:
    """What a pass of llama.cpp with all logits says about each token but the first."""
    with Model(path) as model:
        sizes: dict[str, Any] = {"n_cells": CONTEXT, "n_rows": CONTEXT, "n_outputs": CONTEXT}
        context = Context(model, **sizes, n_sequences=1, n_threads=1)
        try:
            context.decode(TokenBatch.run(tokens, 0, n_sequences=1, logits="all"))
            logits = context.logits().astype(np.float64)
        finally:
            context.close()
    total = np.logaddexp.reduce(logits, axis=1)
    return [float(row[token] - whole) for row, whole, token in zip(logits, total, tokens[1:], strict=False)]


def values(score: Score) -> list[float | None]:
    return [None if found is None else found.logprob for found in score.token_logprobs]


def check_is_plain(engine: Engine, path: Path, tokens: list[int]) -> None:
    (score,) = engine.score([tokens])
    first, *others = values(score)
    assert first is None
    assert score.tokens == tuple(tokens)
    assert score.complete
    assert others == pytest.approx(plain_logprobs(path, tokens), abs=1e-4)


def test_scores_are_those_of_a_plain_pass(engine: Engine, short_path: Path) -> None:
    tokens = engine.encoder.encode(TEXT, raw=True)
    assert len(tokens) > 3 * engine.target.max_nodes
    check_is_plain(engine, short_path, tokens)


@pytest.mark.parametrize("kind", ["qwen35", "lfm2", "mamba"])
def test_models_with_a_running_state(smol_path: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"{kind}.gguf"
    if kind == "mamba":
        write_mamba(path, smol_path)
    else:
        write_tiny(path, kind, smol_path, kind=HYBRIDS[kind])
    with edgespec.load(path, draft="none", context=CONTEXT, threads=1) as engine:
        tokens = [40 + i % 7 for i in range(engine.target.max_nodes + 9)]
        check_is_plain(engine, path, tokens)
        alone = engine.score([tokens[:20], [*tokens[:20], 3, 4]])
        assert values(alone[1])[:20] == pytest.approx(values(alone[0]))


def test_scores_are_those_that_answers_report(engine: Engine) -> None:
    asked = engine.encoder.encode("Once upon a time", raw=True)
    answer = engine.generate(asked, GenerationConfig(max_tokens=40, logprobs=3))
    (score,) = engine.score([asked], [answer.tokens], top=3)
    assert list(score.token_logprobs) == answer.logprobs
    assert score.is_greedy
    assert score.logprob == pytest.approx(sum(found.logprob for found in answer.logprobs))
    sampled = engine.generate(asked, GenerationConfig(max_tokens=20, logprobs=0, temperature=2, seed=1))
    (score,) = engine.score([asked], [sampled.tokens])
    assert list(score.token_logprobs) == sampled.logprobs
    assert not score.is_greedy


def test_texts_that_share_passes_score_as_each_alone(engine: Engine) -> None:
    texts = [QUESTION, TEXT, *(QUESTION + answer for answer in ANSWERS), "Tea", TEXT]
    together = engine.score(texts, top=2)
    engine.forget_texts()
    alone = [engine.score([text], top=2)[0] for text in texts]
    assert [score.token_logprobs for score in together] == [score.token_logprobs for score in alone]


def rows_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each pass from now on."""
    rows: list[int] = []
    decode = Context.decode

    def noted(context: Context, batch: TokenBatch) -> None:
        rows.append(len(batch) - batch.padding)
        decode(context, batch)

    monkeypatch.setattr(Context, "decode", noted)
    return rows


@pytest.mark.parametrize("whole", [False, True], ids=["answers", "whole texts"])
def test_a_question_is_read_once_for_all_its_answers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    encode = engine.encoder.encode
    question = len(encode(QUESTION, raw=True))
    others = sum(len(encode(QUESTION + answer, raw=True)) - question for answer in ANSWERS)
    engine.target.rewind(0)
    rows = rows_read(engine, monkeypatch)
    if whole:
        scores = engine.score([QUESTION + answer for answer in ANSWERS])
    else:
        scores = engine.score([QUESTION] * len(ANSWERS), ANSWERS)
    shared = 16 * (len(ANSWERS) - 1)  # tokens that are not worth waiting for
    assert sum(rows) <= question + others + shared
    assert len({score.logprob for score in scores}) == len(ANSWERS)
    assert sum(score.cached_tokens for score in scores) > 2 * (question - 18)


def test_continuations_are_encoded_with_their_prompts(engine: Engine) -> None:
    tokens = engine.encoder.encode("Tea is hot", raw=True)
    (score,) = engine.score(["Tea is"], [" hot"])
    (whole,) = engine.score(["Tea is hot"])
    assert tokens[-len(score.tokens) :] == list(score.tokens)
    assert whole.token_logprobs[-len(score.tokens) :] == score.token_logprobs
    (split,) = engine.score(["Tea is h"], ["ot"])  # the token of the model's own text counts as a whole
    assert split == score
    (chat,) = engine.score([[{"role": "user", "content": "Tea?"}]], ["Yes."])
    assert b"".join(found.spelling for found in chat.token_logprobs if found) == b"Yes."
    (same,) = engine.score([engine.encoder.encode([{"role": "user", "content": "Tea?"}])], ["Yes."])
    assert same == chat


def test_progress_results_and_cancelling(engine: Engine) -> None:
    told: list[tuple[int, int]] = []
    done: dict[int, Score] = {}
    engine.target.rewind(0)
    scores = engine.score(
        [TEXT, "Tea"], on_prefill=lambda *seen: told.append(seen), on_result=done.__setitem__
    )
    assert [done[0], done[1]] == scores
    total = sum(len(score.tokens) - 1 for score in scores)
    assert told[-1] == (total, total)
    assert [read for read, _ in told] == sorted({read for read, _ in told})
    assert len(told) > 2

    def cancel(read: int, _total: int) -> None:
        if read:
            engine.cancel()

    engine.target.rewind(0)
    cut, never = engine.score([TEXT, TEXT[::-1]], parallel=1, on_prefill=cancel)
    assert not cut.complete
    assert not never.complete
    known = [found for found in cut.token_logprobs if found is not None]
    assert 0 < len(known) < len(cut.tokens) - 1
    assert list(cut.token_logprobs)[1 : len(known) + 1] == list(scores[0].token_logprobs)[1 : len(known) + 1]
    assert engine.score([TEXT])[0].token_logprobs == scores[0].token_logprobs


def test_scores_beside_answers(engine: Engine) -> None:
    from edgespec.engine.requests import Request

    config = GenerationConfig(max_tokens=12)
    alone = engine.generate(QUESTION, config)
    (score,) = engine.score([TEXT])
    tokens = engine.encoder.encode(TEXT, raw=True)
    requests = [Request(QUESTION, config), Request(tokens, config, raw=True, scored_from=0)]
    answers = {
        event.request: event.chunk.generation
        for event in engine.stream_many(requests)
        if event.chunk is not None and event.chunk.generation is not None
    }
    assert answers[requests[0]].tokens == alone.tokens
    assert answers[requests[1]].tokens == engine.generate(TEXT, config, raw=True).tokens
    assert tuple(answers[requests[1]].prompt_logprobs) == score.token_logprobs


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.score(["Tea"], ["a", "b"]), UsageError, "1 prompts and 2 continuations"),
        (lambda e: e.score(["Tea"], [""]), UsageError, "continuation is empty"),
        (lambda e: e.score([""]), UsageError, "prompt is empty"),
        (lambda e: e.score([[1] * (CONTEXT + 1)]), ContextLengthError, "context holds"),
        (lambda e: e.score(["Tea"], top=21), UsageError, "from 0 to 20"),
    ],
)
def test_wrong_texts_are_refused(
    engine: Engine, call: Callable[[Engine], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(engine)
    (score,) = engine.score([[1] * CONTEXT])  # as long as the context
    assert isinstance(score.token_logprobs[-1], TokenLogprob)


@pytest.fixture(params=slow_except(["short", "qwen35"], ["short", "qwen35", "gemma"]))
def any_path(request: pytest.FixtureRequest, smol_path: Path, tmp_path: Path) -> Path:
    """Models whose passes end in different ways."""
    if request.param == "qwen35":
        return write_tiny(tmp_path / "qwen35.gguf", "qwen35", smol_path, kind=HYBRIDS["qwen35"])
    path: Path = request.getfixturevalue(f"{request.param}_path")
    return path


@pytest.mark.parametrize("kernels", slow_except([""], ["", "plain"]))
def test_a_streamed_model_reads_and_scores_a_document_in_one_pass(
    any_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """With no more rows of logits than any pass has."""
    if kernels:
        monkeypatch.setenv("EDGESPEC_KERNELS", kernels)
    monkeypatch.setattr("edgespec.planning.memory.rows.best_rows", lambda *_: CONTEXT)
    loading: dict[str, Any] = {"draft": "none", "context": CONTEXT, "threads": 1}
    few = GenerationConfig(max_tokens=4, logprobs=0)
    with edgespec.load(any_path, exact=True, **loading) as resident:
        tokens = resident.encoder.encode(TEXT, raw=True)
        (expected,) = resident.score([tokens], top=1)
        answer = resident.generate(TEXT[:400], few, raw=True)
    with load_in_least_memory(any_path, exact=True, **loading) as engine:
        assert engine.target.model.weights.streamed_bytes > 0
        if engine.target.pieces is not None:  # long pieces are tried first
            engine.target.prefill(TextSequence(tokens))
            engine.target.prefill(TextSequence(tokens[::-1]), len(tokens))
        engine.target.rewind(0)
        rows = rows_read(engine, monkeypatch)
        (score,) = engine.score([tokens], top=1)
        assert score.token_logprobs == expected.token_logprobs
        assert engine.target.context.n_outputs < len(tokens) / 3
        if not kernels:
            assert rows == [len(tokens) - 1]
        assert engine.generate(TEXT[:400], few, raw=True).logprobs == answer.logprobs


def test_a_graph_with_another_end_is_scored_in_more_passes(
    short_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.planning.memory.rows.best_rows", lambda *_: CONTEXT)
    monkeypatch.setattr("edgespec.llama.output_pieces._MAX_NODES", 2)
    (expected,) = engine.score([TEXT])
    with load_in_least_memory(short_path, exact=True, context=CONTEXT, threads=1) as streamed:
        assert streamed.score([TEXT])[0].token_logprobs == expected.token_logprobs


def test_a_streamed_model_scores_as_in_memory(engine: Engine, short_path: Path) -> None:
    (expected,) = engine.score([TEXT])
    with load_in_least_memory(short_path, draft="none", exact=True, context=CONTEXT, threads=1) as streamed:
        assert streamed.target.model.weights.streamed_bytes > 0
        (score,) = streamed.score([TEXT])
        assert score.token_logprobs == expected.token_logprobs
        assert streamed.score([TEXT, TEXT[:90], TEXT[::-1]])[:1] == [expected]
