"""Answers that go on where they stopped, and chats that change their model: what only real models show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec
from edgespec import Engine, GenerationConfig, Session
from edgespec.engine.sessions.file import SessionFile
from edgespec.errors import SessionError
from edgespec.text.encoding import Encoder
from edgespec.text.template import ChatTemplate
from tests.desk import Desk
from tests.unit import templates

SKY = "Why is the sky blue?"


@pytest.fixture(scope="module")
def engine(smol_path: Path) -> Iterator[Engine]:
    with edgespec.load(smol_path, draft="lookup", exact=True, context=512, threads=1) as engine:
        yield engine


def answer(session: Session) -> str:
    return session.messages[-1]["content"]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_an_answer_continues_as_if_it_had_not_stopped(engine: Engine, temperature: float) -> None:
    config = GenerationConfig(max_tokens=24, temperature=temperature, seed=3)
    whole = Session(engine)
    list(whole.ask(SKY, config))
    parts = Session(engine)
    list(parts.ask(SKY, config.with_(max_tokens=7)))
    for _ in range(2):
        assert len(answer(parts)) < len(answer(whole))
        list(parts.continue_answer(config.with_(max_tokens=5)))
    list(parts.continue_answer(config.with_(max_tokens=7)))
    assert answer(parts) == answer(whole)
    assert len(parts.messages) == 2
    continued = engine.last_generation
    list(parts.ask("And at night?", config))
    asked = engine.last_generation
    assert continued is not None
    assert asked is not None
    assert asked.cached_tokens >= continued.prompt_tokens, "only what is new is read"
    list(whole.ask("And at night?", config))
    assert answer(parts) == answer(whole)


def test_a_saved_answer_continues_too(engine: Engine, tmp_path: Path) -> None:
    config = GenerationConfig(max_tokens=8)
    first = Session(engine)
    first.save_to(SessionFile(str(tmp_path / "talk.json")))
    list(first.ask(SKY, config))
    first.close()
    second = Session(engine)
    second.resume(SessionFile(str(tmp_path / "talk.json")))
    list(second.continue_answer(config))
    second.close()
    uninterrupted = Session(engine)
    list(uninterrupted.ask(SKY, config.with_(max_tokens=16)))
    assert answer(second) == answer(uninterrupted)
    third = Session(engine)
    third.resume(SessionFile(str(tmp_path / "talk.json")))
    assert answer(third) == answer(uninterrupted)
    third.close()


def test_without_an_answer_there_is_nothing_to_continue_with(engine: Engine) -> None:
    with pytest.raises(SessionError, match="There is no answer to continue"):
        list(Session(engine).continue_answer())


def test_an_answer_after_a_thought_continues_without_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChatTemplate(templates.OPENED, "<|im_start|>", "<|im_end|>") as template:
        vocabulary = engine.target.model.vocabulary
        monkeypatch.setattr(engine, "encoder", Encoder(vocabulary, template, engine.context))
        session = Session(engine)
        list(session.ask(SKY, GenerationConfig(max_tokens=24, think="8")))
        begun = answer(session)
        assert begun
        chunks = list(session.continue_answer(GenerationConfig(max_tokens=6)))
        assert not any(chunk.reasoning for chunk in chunks)
        assert answer(session) == begun + "".join(chunk.text for chunk in chunks)
        assert "think>" not in answer(session)
        # Cut off in its thought, it has not begun, and thinks anew.
        session = Session(engine)
        list(session.ask(SKY, GenerationConfig(max_tokens=4, think="on")))
        assert answer(session) == ""
        chunks = list(session.continue_answer(GenerationConfig(max_tokens=24, think="8")))
        assert any(chunk.reasoning for chunk in chunks)
        assert answer(session)


@pytest.mark.slow
@pytest.mark.usefixtures("at_a_desk")
def test_editing_going_on_and_another_model_at_a_terminal(short_path: Path, tmp_path: Path) -> None:
    session = tmp_path / "talk.json"
    arguments = ["--draft", "none", "--max-tokens", "6", "--session", str(session), "--context", "512"]
    with contextlib.closing(Desk("chat", *arguments)) as desk:
        desk.ask(SKY, until="/continue resumes it")
        desk.ask("/continue", until=" tokens, ")
        desk.ask("/edit", until=f"/edit {SKY}")
        desk.type("\x15/edit Name a fruit.\r")  # Ctrl-U: all of it
        desk.wait_for(" tokens, ")
        desk.ask(f"/model {tmp_path / 'none.gguf'}", until="none.gguf")
        desk.ask("/model", until="smol")
        desk.ask(f"/model {short_path}", until="it will read the conversation with your next question")
        desk.ask("And a tree?", until=" tokens, ")
        desk.ask(f"/export {tmp_path / 'talk.md'}", until="Wrote the conversation to")
        assert desk.leave_by("/bye\r") == 0
    text = (tmp_path / "talk.md").read_text()
    assert text.startswith(f"# Conversation with {short_path.stem}\n\n## Question\n\nName a fruit.\n")
    assert SKY not in text
    with edgespec.load(short_path, draft="none", context=512, threads=1) as engine:
        resumed = Session(engine).resume(SessionFile(str(session)))
    assert resumed is not None
    assert resumed.turns == 2
