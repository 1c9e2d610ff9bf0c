"""Client libraries by their own calls, each in an environment of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import edgespec
from tests.clients import libraries
from tests.clients.environments import output_of, python_with
from tests.clients.model import scripted_model
from tests.clients.running import scripted_server
from tests.clients.script import question
from tests.conftest import TEST_MODELS
from tests.serving import load, serving

pytestmark = pytest.mark.slow  # what they send is also sent by test_good_faith.py and test_serve_scoring.py

SCRIPTS = Path(libraries.__file__).parent
WORD = "heron-01234567"
TASKS = Path(__file__).parents[1] / "data" / "lm_eval"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    records = folder / "records.jsonl"
    records.touch()
    with scripted_server(scripted_model(TEST_MODELS, None), folder, records) as url:
        yield url
    refused = [line for line in records.read_text().splitlines() if json.loads(line)["kind"] == "refused"]
    assert refused == []


@pytest.fixture
def asked(tmp_path: Path) -> str:
    """The question for the word in a file."""
    note = tmp_path / "note-1.txt"
    note.write_text(f"The word is {WORD}.\n")
    return question(note)


def test_litellm_through_three_apis(url: str, asked: str, tmp_path: Path) -> None:
    python = python_with("litellm")
    found = json.loads(output_of(python, SCRIPTS / "with_litellm.py", url, asked, home=tmp_path))
    assert set(found) == {"openai", "anthropic", "ollama_chat"}
    for each in found.values():
        assert (each["said"], each["streamed"]) == ("A note.", "A note.")
        assert (each["called"], each["told"]) == ("read_file", f"The word is {WORD}.")
        assert 0 <= each["points"] <= 9


def test_instructor_in_the_modes_that_bind_answers(url: str, tmp_path: Path) -> None:
    python = python_with("instructor")
    found = json.loads(output_of(python, SCRIPTS / "with_instructor.py", url, home=tmp_path))
    assert set(found) == {"TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"}
    for each in found.values():
        for form in each.values():
            assert form["team"] in ("red", "blue")
            assert 0 <= form["points"] <= 9


def test_agents_of_pydantic_ai(url: str, asked: str, tmp_path: Path) -> None:
    python = python_with("pydantic-ai-slim[openai]")
    found = json.loads(output_of(python, SCRIPTS / "with_pydantic_ai.py", url, asked, home=tmp_path))
    assert set(found) == {"OpenAIChatModel", "OpenAIResponsesModel"}
    for each in found.values():
        assert each["told"] == each["streamed"] == f"The word is {WORD}."
        assert each["called"] == 2
        assert {each["by tool"], each["by form"]} <= {"red", "blue"}


def test_tasks_of_lm_eval(short_path: Path, tmp_path: Path) -> None:
    """Its log-likelihoods are those of the library, for every choice of every document."""
    python = python_with("lm-eval[api]")
    with serving(lambda: load(short_path, 512), parallel=4) as server:
        model = {
            "model": "model",
            "base_url": f"http://127.0.0.1:{server.port}/v1/completions",
            "tokenizer_backend": "remote",
            "num_concurrent": "2",
            "max_retries": "1",
        }
        output_of(
            python,
            *("-m", "lm_eval", "run", "--model", "local-completions", "--include_path", TASKS),
            *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
            *("--tasks", "tea_choice,tea_likelihood,tea_rolling", "--log_samples", "--batch_size", "4"),
            *("--output_path", tmp_path / "results"),
            home=tmp_path,
            HF_HUB_OFFLINE="1",
        )
    samples = {path.name.split("_20")[0]: path for path in (tmp_path / "results").rglob("samples_*.jsonl")}
    assert set(samples) == {"samples_tea_choice", "samples_tea_likelihood", "samples_tea_rolling"}
    with load(short_path, 512) as engine:
        for path in samples.values():
            _compare(engine, path)


def _compare(engine: edgespec.Engine, samples: Path) -> None:
    """Compare the log-likelihoods of a task's samples with those of the library."""
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert lines
    for line in lines:
        requests = [request for _, request in sorted(line["arguments"].items())]
        for request, answer in zip(requests, line["resps"], strict=True):
            texts = [text for _, text in sorted(request.items())]
            found = answer[0][0] if isinstance(answer[0], list) else answer[0]
            assert float(found) == pytest.approx(_expected(engine, texts), abs=1e-3)


def _expected(engine: edgespec.Engine, texts: Sequence[Any]) -> float:
    """The log-likelihood of the last text after the one before it, or after the token that begins texts."""
    *context, _ = texts
    tokens = engine.encoder.encode("".join(texts), raw=True)
    if context:
        n_context = len(engine.encoder.encode(context[0], raw=True))
    else:
        tokens, n_context = [engine.target.model.vocabulary.bos, *tokens], 1
    (score,) = engine.score([tokens])
    return sum(found.logprob for found in score.token_logprobs[n_context:] if found is not None)
