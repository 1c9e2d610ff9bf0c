"""Conversations about images: later turns, saved sessions, and a chat at a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.cli.conversation.attach import with_attachments, without_images
from edgespec.drafters.model import ModelDrafter
from edgespec.engine.engine import Engine
from edgespec.engine.sessions.file import SessionFile, remove_session, saved_sessions, sessions_folder
from edgespec.engine.sessions.session import Session
from edgespec.errors import EdgeSpecError, SessionError
from edgespec.generation.config import Grammar
from edgespec.images import reader
from edgespec.images.parts import Image, image_of
from edgespec.llama.projector import NoImageLibrary, load_library
from edgespec.processes import trial
from tests.desk import Desk
from tests.program import run_here
from tests.tiers import slow_except
from tests.tiny import write_tiny
from tests.tiny_images import png, write_projector, write_seeing

pytestmark = pytest.mark.usefixtures("images_read_once")

CONFIG = edgespec.GenerationConfig(max_tokens=24)
PICTURE, ANOTHER = png(), png(seed=2)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, smol_path: Path) -> Path:
    try:
        load_library()
    except NoImageLibrary as missing:
        pytest.skip(f"llama.cpp was compiled without images: {missing}")
    return write_seeing(tmp_path_factory.mktemp("seeing"), "gemma3", smol_path, damped=0.3)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "my cat.png"
    path.write_bytes(PICTURE)
    return path


def opened(path: Path, draft: str = "none", **options: Any) -> Engine:
    return edgespec.load(path, draft=draft, context=512, threads=1, exact=True, **options)


def said(session: Session, text: str, *images: object, config: edgespec.GenerationConfig = CONFIG) -> str:
    (*_, last) = session.ask(text, config, images=images)  # type: ignore[arg-type]
    assert last.generation is not None
    return last.generation.text


def test_later_turns_see_the_images_of_earlier_ones(seeing: Path, picture: Path) -> None:
    answers = []
    for data, draft in ((PICTURE, "none"), (PICTURE, str(seeing)), (ANOTHER, "none")):
        with opened(seeing, draft) as engine:
            session = Session(engine)
            first = said(session, "x y z", data if data is ANOTHER else picture)
            assert session.has_images
            recalled = said(session, "one two one two")
            assert engine.target.recalled > 30
            answers.append([first, recalled, said(session, "and this?", ANOTHER)])
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_a_saved_session_keeps_its_images(seeing: Path, picture: Path, tmp_path: Path) -> None:
    with opened(seeing) as engine:
        session = Session(engine)
        session.save_to("trip")
        first = said(session, "x y z", picture)
        session.close()
        expected = said(session, "one two one two")
    picture.unlink()
    images = sessions_folder() / "trip.json.images"
    assert [path.suffix for path in images.iterdir()] == [".png"]
    assert next(saved_sessions()).bytes > len(PICTURE)
    with opened(seeing) as engine:
        resumed = Session(engine)
        found = resumed.resume("trip")
        assert found is not None
        assert (found.turns, found.pending) == (1, None)
        assert found.restored == found.tokens - 1 > 30
        assert said(resumed, "one two one two") == expected
        assert resumed.messages[0]["images"] == [Image(PICTURE, str(picture))]
        assert resumed.messages[1]["content"] == first
        resumed.undo()
        resumed.undo()
        resumed.close()
    assert not images.exists()


@pytest.mark.parametrize("same", slow_except([False], [True, False]))
def test_a_session_keeps_the_text_that_its_drafter_read(
    same: bool, seeing: Path, smol_path: Path, tmp_path: Path
) -> None:
    drafter = seeing if same else write_tiny(tmp_path / "other.gguf", "llama", smol_path, damped=0.3)
    text = "one two " * 60
    config = CONFIG.with_(grammar=Grammar("regex", "[a-z ]{30}"), max_tokens=8)
    with opened(seeing, str(drafter), tree_budget=8) as engine:
        assert isinstance(engine.drafter, ModelDrafter)
        assert (engine.drafter._translation is None) == same
        session = Session(engine)
        session.save_to("trip")
        said(session, text, PICTURE, config=config)
        said(session, "x y z", ANOTHER, config=config)
        session.close()
        assert session._known is not None
        read = sum(token >= 0 for token in session._known.tokens)
    states = sessions_folder() / "trip.json.kv" / "drafter"
    kept = sum(int(file.stem.partition("-")[2]) for file in states.glob("*.kv"))
    assert kept >= read - 8 > 128, "all but the last trees, whatever stands between"


@pytest.mark.parametrize("continued", slow_except([True], [False, True]))
def test_another_projector_reads_the_images_of_a_session_again(
    continued: bool, seeing: Path, tmp_path: Path
) -> None:
    other = write_projector(tmp_path / "other.gguf", "gemma3", seed=9)
    config = CONFIG.with_(grammar=Grammar("regex", "[a-z ]{30}"), max_tokens=8)  # bytes that are a text
    with opened(seeing) as engine:
        session = Session(engine)
        session.save_to("trip")
        said(session, "x y z", PICTURE, config=config)
        session.close()
        known = len(engine.target.tokens)
    for projector, restored in ((None, known), (other, 0)):
        with opened(seeing, mmproj=projector) as engine:
            resumed = Session(engine)
            found = resumed.resume("trip")
            assert found is not None
            assert (found.restored, "another projector" in found.reason) == (restored, not restored)
            told = [*resumed.messages]
            # Without saving, so that both begin with the same file.
            resumed.close()
            answer = resumed.continue_answer(config) if continued else resumed.ask("and now", config)
            expected = Session(engine)
            expected.messages += told
            again = expected.continue_answer(config) if continued else expected.ask("and now", config)
            text, fresh = ("".join(chunk.text for chunk in chunks) for chunks in (answer, again))
            assert text
            assert text == fresh or projector is None, "the images were read with the other projector"


@pytest.mark.parametrize(
    "family", slow_except(["qwen3vl"], ["qwen2vl", "qwen3vl"])
)  # whose positions have two kinds of sections
def test_states_whose_positions_depend_on_images_wait_for_them(
    family: str, smol_path: Path, tmp_path: Path
) -> None:
    path = write_seeing(tmp_path, family, smol_path, damped=0.3)
    with opened(path) as engine:
        session = Session(engine)
        session.save_to("trip")
        # Random models write bytes that are no text, after which nothing is known of the tokens.
        said(session, "x y z", PICTURE, config=CONFIG.with_(grammar=Grammar("grammar", 'root ::= "one two"')))
        session.close()
        tokens = engine.target.tokens
        expected = said(session, "one two one two")
    with opened(path) as engine:
        resumed = Session(engine)
        found = resumed.resume("trip")
        assert found is not None
        assert (found.restored, found.reason) == (0, "Images are read again first")
        assert said(resumed, "one two one two") == expected
        assert engine.target.recalled == len(tokens)


def test_a_session_without_its_images_is_refused(seeing: Path, picture: Path) -> None:
    with opened(seeing) as engine:
        session = Session(engine)
        session.save_to("trip")
        said(session, "x y z", picture)
        session.close()
        (image,) = (sessions_folder() / "trip.json.images").iterdir()
        image.write_bytes(ANOTHER)
        with pytest.raises(SessionError, match=r"missing in .*, or damaged"):
            Session(engine).resume("trip")
    assert [session.name for session in saved_sessions()] == ["trip"]
    file = SessionFile("trip")
    assert remove_session(file) > len(ANOTHER)
    file.close()
    assert not image.parent.exists()


def test_a_question_without_an_answer_keeps_its_images(seeing: Path, picture: Path) -> None:
    with opened(seeing) as engine:
        session = Session(engine)
        session.save_to("trip")
        answer = session.ask("x y z", CONFIG, images=[picture])
        next(answer)
        copied = sessions_folder() / "copied.json"
        for name in ("", ".images"):
            source = sessions_folder() / f"trip.json{name}"
            source.rename(copied.with_name(copied.name + name))
        resumed = Session(engine)
        assert (found := SessionFile("copied").read()) is not None
        assert found.pending == {"role": "user", "content": "x y z", "images": [Image(PICTURE, str(picture))]}
        del resumed
        answer.close()  # type: ignore[attr-defined]


def test_another_model_reads_a_note(seeing: Path, smol_path: Path, picture: Path) -> None:
    with opened(seeing) as engine, opened(smol_path) as blind:
        session = Session(engine)
        said(session, "x y z", picture)
        session.detach()
        session.attach(blind)
        assert said(session, "What was there?")
        with pytest.raises(EdgeSpecError, match="has no projector beside it"):
            said(session, "And this?", picture)
        assert session.turns == 2


def test_paths_that_a_terminal_pastes(tmp_path: Path, picture: Path) -> None:
    plain = tmp_path / "dog.PNG"
    plain.write_bytes(ANOTHER)
    url = picture.as_uri()
    assert "%20" in url
    escaped = str(picture).replace(" ", "\\ ") if os.sep == "/" else f'"{picture}"'
    for text, rest, count in (
        (escaped, "", 1),
        (f"'{picture}' what is this?", "what is this?", 1),
        (f'what is "{picture}" about?', "what is about?", 1),
        (f"{url} {plain}", "", 2),
        (f"compare {plain} and {plain}", "compare and", 2),
        ("what is my cat.png?", "what is my cat.png?", 0),
        ("/nowhere/cat.png", "/nowhere/cat.png", 0),
        (f"x{plain}", f"x{plain}", 0),
        ("def f():\n    return '/a'\n", "def f():\n    return '/a'\n", 0),
    ):
        found = without_images(text)
        assert (found[0], len(found[1])) == (rest, count), text
    bitmap = tmp_path / "cat.bmp"
    bitmap.write_bytes(b"BM" + bytes(12) + b"\x28\0\0\0" + b"\x08\0\0\0" * 2 + bytes(100))
    (tmp_path / "BM.txt").write_text("BM is how this text begins, and it is no image.")
    attached = with_attachments(f"@{bitmap} and @{tmp_path}/BM.txt", [])
    assert [image.name for image in attached.images] == [str(bitmap)]
    assert [path.name for path in attached.files] == ["BM.txt"]
    (tmp_path / "new.avif").write_bytes(b"....ftypavif")
    with pytest.raises(EdgeSpecError, match="is not an image that can be read"):
        without_images(f"{tmp_path}/new.avif ?")
    with pytest.raises(EdgeSpecError, match="is not an image that can be read"):
        with_attachments(f"@{tmp_path}/new.avif", [])
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(EdgeSpecError, match="is not a file"):
        image_of(tmp_path / "folder.png")


@pytest.mark.usefixtures("at_a_desk")
def test_a_chat_about_images(seeing: Path, picture: Path, tmp_path: Path) -> None:
    escaped = str(picture).replace(" ", "\\ ")
    arguments = ["chat", str(seeing), "--draft", "none", "--context", "512", "--max-tokens", "8", "--exact"]
    with contextlib.closing(Desk(*arguments, "--image", str(picture), columns=100)) as desk:
        desk.ask("x y z", until="tokens, ")
        desk.ask(f"/image {picture}", until="to the next question.")
        desk.ask("one two", until="tokens, ")
        desk.ask(escaped, until="to the next question.")
        desk.ask("x x x", until="tokens, ")
        desk.ask(f'@"{picture}" what?', until="tokens, ")
        desk.ask("/retry", until="tokens, ")
        desk.ask("/image nowhere.png", until="There is no image file nowhere.png")
        desk.ask(f"/export {tmp_path}/talk.json", until="Wrote the conversation")
        desk.ask(f"/export {tmp_path}/talk.md", until="Wrote the conversation")
        desk.type("/bye\r")
        assert desk.leave() == 0
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    assert [[part["type"] for part in parts] for parts in asked] == [["image_url", "text"]] * 4
    assert all(parts[0]["image_url"]["url"].startswith("data:image/png;base64,") for parts in asked)
    assert (tmp_path / "talk.md").read_text().count(f"![my cat.png](<{picture}>)") == 4


@pytest.mark.usefixtures("at_a_desk")
def test_another_model_of_a_chat_does_not_take_the_projector_that_was_named(
    seeing: Path, short_path: Path
) -> None:
    projector = seeing.with_name("mmproj-gemma3.gguf")
    options = ["--draft", "none", "--context", "512", "--max-tokens", "6", "--mmproj", str(projector)]
    with contextlib.closing(Desk("chat", str(seeing), *options)) as desk:
        desk.ask("x y z", until="tokens, ")
        desk.ask(f"/model {short_path}", until="it will read the conversation with your next question")
        desk.ask("one two", until="tokens, ")
        assert desk.leave_by("/bye\r") == 0


def test_a_piped_question_about_an_image(seeing: Path, picture: Path) -> None:
    options = [
        "--draft",
        "none",
        "--context",
        "512",
        "--threads",
        "1",
        "--exact",
        "--max-tokens",
        "24",
        "--json",
    ]
    command = ["chat", str(seeing), "--image", str(picture), *options, "--sampling", "greedy"]
    done = run_here(*command, text="x y z")
    assert done.returncode == 0, done.stderr
    with opened(seeing) as engine:
        assert json.loads(done.stdout)["text"] == said(Session(engine), "x y z", picture)


@contextlib.contextmanager
def reading_never_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Have the child process that reads an image hang; yields what is set once it is waited for."""
    waited = threading.Event()
    told = trial.report_waiting

    def note(what: str, seconds: float) -> None:
        waited.set()
        told(what, seconds)

    monkeypatch.setattr(reader, "_ENCODER", "tests.hanging_reads_of_images")
    monkeypatch.setattr(trial, "report_waiting", note)
    yield waited


def test_cancelling_ends_the_reading_of_an_image(seeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [{"role": "user", "content": [{"type": "image", "data": PICTURE}]}]
    with opened(seeing) as engine, reading_never_ends(monkeypatch) as waited:

        def cancel() -> None:
            waited.wait()
            engine.cancel()

        for ask in (
            lambda: engine.generate(asked, CONFIG),
            lambda: engine.generate_many([asked, "one"], CONFIG)[0],
        ):
            waited.clear()
            thread = threading.Thread(target=cancel)
            thread.start()
            answer = ask()
            thread.join()
            assert answer.finish_reason == "cancelled"
            assert not answer.tokens
        monkeypatch.undo()
        assert engine.generate(asked, CONFIG).tokens


def test_closing_ends_the_reading_of_an_image(seeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [{"role": "user", "content": [{"type": "image", "data": PICTURE}]}]
    with opened(seeing) as engine, reading_never_ends(monkeypatch) as waited:

        def close() -> None:
            waited.wait()
            engine.close()

        thread = threading.Thread(target=close)
        thread.start()
        with pytest.raises(EdgeSpecError, match="The engine is closed"):
            engine.generate(asked, CONFIG)
        thread.join()
