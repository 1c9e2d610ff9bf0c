"""Saved conversations with a real model: restored ones go on as uninterrupted ones do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import edgespec
from edgespec import Engine, GenerationConfig, Session
from edgespec.cli.main import main
from edgespec.drafters.draft_sequence import DraftSequence
from edgespec.drafters.model import ModelDrafter
from edgespec.engine.sessions.file import SessionFile, saved_sessions
from edgespec.errors import SessionError
from edgespec.files.checked import CheckedFiles
from edgespec.llama.cache.states import BLOCK, StateStore

QUESTIONS = ["Hi", "Why is the sky blue?", "And at night?"]
SHORT = GenerationConfig(max_tokens=16)


@pytest.fixture(scope="module")
def engine(short_path: Path) -> Iterator[Engine]:
    with edgespec.load(
        short_path, draft=short_path, exact=True, tree_budget=12, context=512, threads=1
    ) as engine:
        yield engine


def ask(session: Session, text: str) -> str:
    list(session.ask(text, SHORT))
    return session.messages[-1]["content"]


def forget(engine: Engine) -> None:
    """As after a new start."""
    engine.target.rewind(0)
    engine.target.cache.clear()


def test_a_restored_session_continues_as_an_uninterrupted_one(engine: Engine, tmp_path: Path) -> None:
    whole = Session(engine, "Be brief.")
    expected = [ask(whole, question) for question in QUESTIONS]
    forget(engine)

    answers: list[str] = []
    for question in QUESTIONS:
        session = Session(engine, None if answers else "Be brief.")
        resumed = session.resume(SessionFile(str(tmp_path / "talk.json")))
        if answers:
            assert resumed is not None
            # The drafter too need not read the conversation again.
            assert list((tmp_path / "talk.json.kv" / "drafter").glob("*.kv"))
            assert resumed.turns == len(answers)
            assert engine.last_generation is not None
            # The last token of an answer was read only if the end token came after it.
            cut = engine.last_generation.finish_reason == "length"
            assert resumed.tokens - resumed.restored == cut
            assert resumed.reason == ""
        answers.append(ask(session, question))
        assert engine.last_generation is not None
        session.close()
        forget(engine)
    assert answers == expected
    # Without its states the conversation is read again, and continues unchanged.
    shutil.rmtree(tmp_path / "talk.json.kv")
    session = Session(engine)
    resumed = session.resume(SessionFile(str(tmp_path / "talk.json")))
    assert resumed is not None
    assert (resumed.restored, resumed.reason) == (0, "The saved state is missing or damaged")
    assert ask(session, "Why?") == ask(whole, "Why?")
    session.close()


def test_what_is_undone_is_undone_on_disk(engine: Engine, tmp_path: Path) -> None:
    session = Session(engine)
    session.resume(SessionFile(str(tmp_path / "talk.json")))
    first = ask(session, QUESTIONS[0])
    ask(session, QUESTIONS[1])
    session.undo()
    session.close()
    again = Session(engine)
    again.resume(SessionFile(str(tmp_path / "talk.json")))
    assert [m["content"] for m in again.messages] == [QUESTIONS[0], first]
    again.clear()
    assert again.messages == []
    again.close()
    kept = Session(engine)
    kept.resume(SessionFile(str(tmp_path / "talk.json")))
    assert [m["content"] for m in kept.messages] == [QUESTIONS[0], first], "nothing saved is erased"
    kept.close()


def test_a_conversation_that_has_begun_is_saved_with_its_state(engine: Engine, tmp_path: Path) -> None:
    session = Session(engine)
    ask(session, QUESTIONS[0])
    session.save_to(tmp_path / "later.json")
    session.close()
    forget(engine)
    again = Session(engine)
    resumed = again.resume(tmp_path / "later.json")
    again.close()
    assert resumed is not None
    assert resumed.restored == resumed.tokens - 1


@pytest.mark.parametrize("kind", [str, Path, SessionFile])
def test_a_session_is_saved_to_a_path_or_an_open_file(kind: type, quick: Engine, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    session = Session(quick)
    session.save_to(kind(path))
    assert path.is_file()
    session.close()
    resumed = session.resume(kind(path))
    assert resumed is not None
    session.close()


@pytest.fixture(scope="module")
def quick(short_path: Path) -> Iterator[Engine]:
    with edgespec.load(
        short_path, draft=short_path, exact=True, tree_budget=8, context=512, threads=1
    ) as engine:
        yield engine


SYSTEMS = {"birds": "You know all birds. " * 30, "fish": "You like every fish. " * 30}


def restorable(store: StateStore, session: Session) -> int:
    """Tokens of a conversation that a store could restore."""
    assert session._known is not None
    chain = store._longest_chain(session._known.tokens, parts=True)
    return chain[-1].end if chain else 0


def check_folders(engine: Engine, sessions: Sequence[Session]) -> None:
    """Each session's folder has its own conversation, and nothing of the other one."""
    assert isinstance(engine.drafter, ModelDrafter)
    for session, other in (sessions, sessions[::-1]):
        assert session.file is not None
        folder = session.file.states
        drafter = engine.drafter._store_in(CheckedFiles(folder / "drafter"))
        for store in (engine.target.store_in(CheckedFiles(folder)), drafter):
            assert restorable(store, session) >= BLOCK
            assert restorable(store, other) == 0


@pytest.mark.slow
def test_sessions_of_one_engine_keep_to_their_own_folders(quick: Engine, tmp_path: Path) -> None:
    expected = []
    for system in SYSTEMS.values():
        alone = Session(quick, system)
        expected.append([ask(alone, question) for question in QUESTIONS])
    sessions = birds, fish = [Session(quick, system) for system in SYSTEMS.values()]
    files = [str(tmp_path / f"{name}.json") for name in SYSTEMS]
    for session, file in zip(sessions, files, strict=True):
        session.save_to(SessionFile(file))
    for turn, question in enumerate(QUESTIONS[:2]):
        for session, answers in zip(sessions, expected, strict=True):
            assert ask(session, question) == answers[turn]
    check_folders(quick, sessions)
    birds.close()
    ask(fish, QUESTIONS[2])
    fish.close()
    quick.target.rewind(0)
    for file, answers, turns in zip(files, expected, (2, 3), strict=True):
        again = Session(quick)
        resumed = again.resume(SessionFile(file))
        assert resumed is not None
        assert (resumed.turns, resumed.reason) == (turns, "")
        assert resumed.restored >= resumed.tokens - 1
        assert [message["content"] for message in again.messages[1::2]] == answers[:turns]
        again.close()

    # Two threads at once: each session takes its own answers.
    sessions = [Session(quick, system) for system in SYSTEMS.values()]
    for session, name in zip(sessions, SYSTEMS, strict=True):
        session.save_to(SessionFile(str(tmp_path / f"{name} in a thread.json")))
    with ThreadPoolExecutor(2) as threads:
        answered = threads.map(lambda session: [ask(session, text) for text in QUESTIONS], sessions)
        assert list(answered) == expected
    check_folders(quick, sessions)
    for session in sessions:
        session.close()


def test_a_drafter_takes_up_a_long_text_from_its_saved_state(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    session = Session(engine)
    session.resume(SessionFile(str(tmp_path / "talk.json")))
    first = ask(session, "word " * 300)
    session.close()
    forget(engine)
    drafter.forget()
    pending: list[int] = []
    read = DraftSequence.read_pending

    def read_and_tell(text: DraftSequence, most: int) -> None:
        pending.append(len(text.pending))
        read(text, most)

    monkeypatch.setattr(DraftSequence, "read_pending", read_and_tell)
    session = Session(engine)
    session.resume(SessionFile(str(tmp_path / "talk.json")))
    ask(session, "Go on.")
    assert 0 < pending[0] < 200
    assert first == session.messages[1]["content"]
    session.close()


def test_others_sessions_are_refused(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    session = Session(engine)
    session.resume(SessionFile(str(path)))
    ask(session, "Hi")
    with pytest.raises(SessionError, match=r"is open in another program\."):
        SessionFile(str(path))
    session.close()
    record = json.loads(path.read_text())
    record["identity"]["model"] = "other.gguf 1 2"
    path.write_text(json.dumps(record))
    file = SessionFile(str(path))
    with pytest.raises(
        SessionError,
        match=r'Session "talk" uses other\.gguf, but smol-short.*\.gguf is loaded\. Load other\.gguf to',
    ):
        session.resume(file)
    record["identity"] = engine.target.identity | {"build": "other"}
    record["pending"] = "Well?"
    path.write_text(json.dumps(record))
    resumed = session.resume(file)
    assert resumed is not None
    reason = "Saved by another build of llama.cpp, or on another processor"
    assert (resumed.reason, resumed.pending) == (reason, "Well?")
    session.close()
    for damage in ("", "{}", '{"edgespec_session": 1, "messages": 3}', "[" * 10_000):
        path.write_text(damage)
        with SessionFileOpen(path) as file, pytest.raises(SessionError, match=r"is not a saved session\."):
            file.read()


class SessionFileOpen:
    """Closes the file afterwards."""

    def __init__(self, path: Path) -> None:
        self._file = SessionFile(str(path))

    def __enter__(self) -> SessionFile:
        return self._file

    def __exit__(self, *_: object) -> None:
        self._file.close()


@pytest.mark.parametrize("name", ["", "../x y?", ".hidden", "a\nb"])
def test_names_that_are_none(name: str) -> None:
    if "/" in name:
        return
    with pytest.raises(SessionError, match="is not a valid session name"):
        SessionFile(name)


def test_a_path_is_a_file_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text without a folder would be the name of a session instead."""
    monkeypatch.chdir(tmp_path)
    for given, path in ((tmp_path / "talk.json", "talk.json"), (Path("trip"), "trip.json")):
        file = SessionFile(given)
        file.close()
        assert file.path.absolute() == tmp_path / path


def test_sessions_are_listed(engine: Engine) -> None:
    session = Session(engine)
    session.resume(SessionFile("first trip"))
    ask(session, "Hi")
    session.close()
    (listed,) = saved_sessions()
    assert (listed.name, listed.turns, listed.first) == ("first trip", 1, "Hi")
    assert listed.model.startswith("smol-short")
    assert listed.bytes > 100_000


def test_oldest_turns_are_dropped_to_make_room(engine: Engine) -> None:
    session = Session(engine, "Be brief.")
    for i in range(3):
        ask(session, f"word{i} " * 45)
    assert session.drop_oldest("x " * 200, room=24) == 1
    assert session.messages[0]["content"].startswith("word1")
    ask(session, "x " * 200)
    assert session.drop_oldest("x " * 1000) == 0
    assert session.turns == 3


def test_a_prompt_is_read_once(smol_path: Path) -> None:
    def load() -> Engine:
        return edgespec.load(smol_path, draft="none", exact=True, context=1024, threads=1, prompt_cache=True)

    prompt = " ".join(f"word{i}" for i in range(70))
    with load() as engine:
        assert engine.encoder.encode(prompt)
        first = engine.generate(prompt, SHORT)
    with load() as engine:
        told: list[tuple[int, int]] = []
        second = engine.generate(prompt, SHORT, on_prefill=lambda done, total: told.append((done, total)))
    assert second.tokens == first.tokens
    assert told[-1][1] < 128 < first.prompt_tokens


def test_a_session_brings_its_model(
    short_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where none is named; one that is named must be that of the session."""
    model = tmp_path / "my talker.gguf"
    shutil.copy(short_path, model)
    options = ["--draft", "none", "--max-tokens", "1", "--context", "256", "--verbose"]
    chat = ["chat", *options, "-p", "Hi", "--session", str(tmp_path / "pair.json")]
    assert main([*chat, "-m", str(model)]) == 0
    assert main(chat) == 0
    err = capsys.readouterr().err
    assert err.count("my talker.gguf, drafted by none") == 2
    assert "Resumed 1 turn; " in err
    model.unlink()
    assert main(chat) == 1
    assert capsys.readouterr().err == (
        'Error: Session "pair" uses my talker.gguf, which is no longer on this machine.\n'
        "Restore the file, or choose another session name.\n"
    )
    assert main([*chat, "-m", str(short_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f'Error: Session "pair" uses my talker.gguf, but {short_path.name} is loaded.',
        "Load my talker.gguf to resume it, or choose another session name.",
    ]
