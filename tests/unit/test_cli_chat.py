"""`edgespec chat`, with an engine that only talks and a friend who types."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from edgespec.cli.conversation.changeable_model import ChangeableModel
from edgespec.cli.conversation.chat import Chat, _window
from edgespec.cli.conversation.interactive import InteractiveChat
from edgespec.cli.conversation.keyboard import TypedKeyboard, join_lines
from edgespec.cli.main import main
from edgespec.cli.options.sampling import ChosenSampling
from edgespec.cli.screen.results import ResultStream
from edgespec.cli.screen.terminal import Terminal
from edgespec.cli.utf8 import _conversion
from edgespec.config import Config
from edgespec.engine.sessions.file import saved_sessions
from edgespec.engine.sessions.session import ResumedSession
from edgespec.errors import DeviceLostError, EdgeSpecError, MemoryLimitError
from edgespec.files.user_folders import data_folder
from edgespec.generation.config import GenerationConfig
from edgespec.generation.rules import KINDS
from tests.unit.talking import ANSWER, TalkingEngine, TalkingSession

CTRL_D = "\x04"
CONVERT = _conversion("WINDOWS-1252")


class TypingFriend:
    """A keyboard with everything already typed."""

    def __init__(self, messages: Sequence[str], says_yes: bool) -> None:
        self._messages = messages
        self._says_yes = says_yes

    def messages(self) -> Iterator[str]:
        yield from self._messages

    def confirm(self, question: str) -> bool:
        print(question, file=sys.stderr)
        return self._says_yes

    def prefill(self, text: str) -> bool:
        return False


@pytest.fixture
def typed(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[list[str], list[str], TalkingSession]]:
    """Runs a chat in which these messages are typed; gives the lines of stdout and stderr."""

    def run(*messages: str) -> tuple[list[str], list[str], TalkingSession]:
        session: Any = TalkingSession(engine)
        results = ResultStream(sys.stdout, "Standard output")
        chat = Chat(session, engine, GenerationConfig(), Terminal(), results)  # type: ignore[arg-type]
        InteractiveChat(chat).run(TypingFriend(messages, engine.says_yes))
        out, err = capsys.readouterr()
        return out.splitlines(), err.splitlines(), session

    return run


def test_answers_go_to_stdout_and_commands_to_stderr(typed: Any) -> None:
    out, err, session = typed("Hi", "/undo", "/undo", "/nothing here", "/bye", "never read")
    assert out == [ANSWER]
    assert err[:2] == ["Removed the last turn.", "Nothing to undo."]
    assert session.messages == []


@pytest.mark.parametrize(
    ("command", "reply"),
    [
        ("/clera", "There is no command /clera. Did you mean /clear?"),
        ("/xyzzy", "There is no command /xyzzy. /help lists the commands."),
        ("/retry", "Nothing to retry."),
        ("/stats", "No answer yet."),
        ("/tree", "No answer yet."),
        ("/system", "No system prompt."),
        ("/clear", "Started a new conversation."),
        ("/file", "/file needs the path of a text file. For example: /file notes.md"),
        ('/file ""', "/file needs the path of a text file. For example: /file notes.md"),
        ("/set verify blah", "There is no verification rule 'blah'. Rules: " + ", ".join(KINDS) + "."),
        (
            "/set verify blok",
            "There is no verification rule 'blok'. Did you mean block? Rules: " + ", ".join(KINDS) + ".",
        ),
        ("what \udcff?", "The message is not valid UTF-8: byte 0xff at offset 5. " + CONVERT),
    ],
)
def test_replies_of_commands(command: str, reply: str, typed: Any) -> None:
    assert typed(command)[:2] == ([], [reply])


def test_a_removed_turn_is_not_saved(typed: Any, engine: TalkingEngine) -> None:
    out, err, _ = typed("Hi", "/undo", "/save trip", "/stats")
    assert out == [ANSWER]
    assert err == [
        "Removed the last turn.",
        "Nothing to save yet. Ask something first.",
        "No answer yet.",
    ]
    assert [*saved_sessions()] == []
    engine.words = ["First"]
    engine.on_word = lambda _: setattr(engine, "words", ["Second"])
    out, err, _ = typed("Hi", "And?", "/undo", "/stats")
    assert err[1] == "No statistics: that answer was removed."


def test_figures_name_the_settings_that_the_answer_was_made_with(typed: Any) -> None:
    _, err, _ = typed("/set temperature 0.5", "Hi", "/set temperature 0.9", "/stats", "Again", "/stats")
    sampled = [line for line in err if line.startswith("sampling")]
    assert [line.split(maxsplit=1)[1] for line in sampled] == [
        "temperature 0.5 (/set)",
        "temperature 0.9 (/set)",
    ]


def test_a_path_is_no_command(typed: Any, engine: TalkingEngine) -> None:
    typed("/etc/passwd holds what?")
    assert engine.asked[0][0] == "/etc/passwd holds what?"


@pytest.mark.parametrize(
    "message",
    [
        "what is @" + 300 * "a",
        "@file://[x",
        "@a\0b",
        "/export " + 300 * "a",
        "/load " + 300 * "a" + ".json",
        "/export /",
        "@~a\0b",
        "/file ~a\0b",
        "/export a\0b",
        "/save a/\0b",
        "/load ~a\0b/c",
    ],
)
def test_a_name_that_no_file_can_have_ends_no_chat(message: str, typed: Any) -> None:
    out, _, session = typed("Hi", message, "Again")
    assert out[0] == out[-1] == ANSWER
    assert session.messages[0]["content"] == "Hi"
    assert session.messages[-2]["content"] == "Again"


def test_an_error_of_the_system_ends_no_chat(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_name: str) -> None:
        raise OSError(5, "Input/output error", "notes.md")

    monkeypatch.setattr("edgespec.cli.conversation.slash.read_attachment", unreadable)
    out, err, _ = typed("Hi", "/file notes.md", "Again")
    assert out == [ANSWER, ANSWER]
    assert err == ["[Errno 5] Input/output error: 'notes.md'"]


def test_retry_replaces_the_answer(typed: Any, engine: TalkingEngine) -> None:
    out, err, session = typed("Hi", "/retry")
    assert out == [ANSWER, ANSWER]
    assert err == ["The same answer again; /set temperature 0.7 varies it."]
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    assert typed("/set temperature 1", "/set seed 5", "Hi", "/retry")[1][2:] == [
        "The same answer again; /set seed random varies it."
    ]


def test_retry_does_not_claim_that_another_answer_is_the_same(typed: Any, engine: TalkingEngine) -> None:
    """As in inexact decoding, after a change of the settings, and where the first answer was stopped."""
    engine.on_word = lambda word: setattr(engine, "words", ["Grey.", "Red."]) if word == 2 else None
    out, err, _ = typed("Hi", "/retry")
    assert (out, err) == ([ANSWER, "Grey.Red."], [])
    engine.on_word = lambda word: (
        signal.raise_signal(signal.SIGINT) if word == 1 and len(engine.asked) == 3 else None
    )
    _, err, _ = typed("Hi", "/retry")
    assert err == ["Stopped; the partial answer is kept. /continue resumes it."]


def test_editing_replaces_the_question(typed: Any) -> None:
    assert typed("/edit")[1] == ["No question to edit."]
    assert typed("Hi", "/edit")[1] == [
        "/edit needs the new question. For example: /edit Why is the sea blue?"
    ]
    *_, session = typed("Hi", "/edit Ahoy")
    assert [message["content"] for message in session.messages] == ["Ahoy", ANSWER]


def test_what_an_edited_question_mentions_is_attached_once(typed: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("Buy milk.")
    attached = f"notes.md:\n```\nBuy milk.\n```\n\nWhat about @{notes}?"
    _, err, session = typed("Hi", f"/edit What about @{notes}?")
    assert err == [f"Attached: {notes}"]
    assert session.messages[0]["content"] == attached
    *_, session = typed("Hi", f"/edit {attached}")  # as the prompt offers it for editing
    assert session.messages[0]["content"] == attached


def test_an_attached_file_does_not_choose_what_an_edited_question_attaches(
    typed: Any, tmp_path: Path
) -> None:
    other, notes = tmp_path / "other.txt", tmp_path / "notes.md"
    other.write_text("Secret.")
    notes.write_text(f"See @{other} and\n```\n@{other}\n```\n")
    *_, session = typed(f"What about @{notes}?")
    attached = session.messages[0]["content"]
    _, err, session = typed("Hi", f"/edit Look:\n{attached}")
    assert err == []
    assert "Secret" not in session.messages[0]["content"]


@pytest.mark.parametrize("error", [DeviceLostError, MemoryLimitError])  # while it answers, by /model
def test_a_model_that_cannot_be_loaded_again_is_loaded_with_the_next_question(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str], smol_path: Path, error: type[EdgeSpecError]
) -> None:
    def fail(*_: object) -> None:
        raise error("CUDA0 failed.", "Update its driver.")

    def on_load(_: object) -> None:
        if len(loads) in (1, 2):
            loads.append("failed")
            fail()
        loads.append("loaded")

    lost, loads = error is DeviceLostError, list[str]()
    engine.on_load, engine.on_word = on_load, lambda _: fail() if lost and len(engine.asked) == 2 else None
    terminal = Terminal()
    with ChangeableModel(Config(), terminal, lambda *_: ChosenSampling(GenerationConfig())) as models:  # type: ignore[arg-type]
        session: Any = TalkingSession(engine)
        chat = Chat(session, models.engine, GenerationConfig(), terminal, ResultStream(sys.stdout, "Output"))
        said = ["Hi", "And now?" if lost else f"/model {smol_path}", "And now?", "/retry", "/retry"]
        InteractiveChat(chat, models=models).run(TypingFriend(said, False))
    assert loads[:4] == ["loaded", "failed", "failed", "loaded"]
    assert [message["content"] for message in session.messages] == ["Hi", ANSWER, "And now?", ANSWER]
    assert "Reloaded the model." in capsys.readouterr().err


def test_going_on_extends_the_answer(typed: Any, engine: TalkingEngine) -> None:
    engine.on_word = lambda word: (
        signal.raise_signal(signal.SIGINT) if word == 1 and len(engine.asked) == 1 else None
    )
    out, err, session = typed("Hi", "/continue", "/regenerate")
    assert out == ["Blue", ANSWER, ANSWER]
    assert err[0] == "Stopped; the partial answer is kept. /continue resumes it."
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    assert typed("/continue")[1] == ["No answer to continue. Ask something first."]


def test_exporting_asks_before_it_writes_over_a_file(
    typed: Any, engine: TalkingEngine, tmp_path: Path
) -> None:
    path = tmp_path / "talk.md"
    _, err, _ = typed("Hi", f"/export {path}", f"/export {path}", "/export")
    assert err == [
        f"Wrote the conversation to {path}.",
        f"{path} exists. Overwrite it?",
        "/export needs the name of a file. For example: /export trip.md",
    ]
    assert path.read_text() == f"# Conversation with talker\n\n## Question\n\nHi\n\n## Answer\n\n{ANSWER}\n"


def test_the_model_of_a_chat_that_has_none_to_change(typed: Any) -> None:
    assert typed("/model smollm2-135m")[1] == ["This chat cannot switch models. Start another chat."]


def test_a_thought_without_an_answer_is_told(
    typed: Any,
    engine: TalkingEngine,
    talking_session: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine.thought, engine.words = ["Hm,", " sky."], []
    _, err, _ = typed("Hi")
    assert any("The model thought for 2 tokens and gave no answer." in line for line in err)
    assert main(["chat", "-p", "Hi"]) == 1
    assert "gave no answer" in capsys.readouterr().err


def test_a_quiet_chat_answers_commands(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    session: Any = TalkingSession(engine)
    results = ResultStream(sys.stdout, "Standard output")
    chat = Chat(session, engine, GenerationConfig(), Terminal(quiet=True), results)  # type: ignore[arg-type]
    for command, reply in (
        ("/help", "this list"),
        ("/show", "talker"),
        ("/stats", "No answer yet."),
        ("/sessions", "No saved conversations"),
        ("/set top_k 3", "top_k set to 3"),
    ):
        InteractiveChat(chat).run(TypingFriend([command], says_yes=False))
        assert reply in capsys.readouterr().err


def test_thoughts_are_folded_and_unfolded(typed: Any, engine: TalkingEngine) -> None:
    engine.thought = ["Hm,", " \x1b[2Jsky."]
    out, err, session = typed("Hi", "/think", "/think show", "Hi", "/think hide", "Hi")
    assert out == [ANSWER] * 3
    assert err == [
        "Hm, \ufffd[2Jsky.",
        "Thoughts will be shown.",
        "Hm, \ufffd[2Jsky.",
        "",
        "Thoughts will be folded.",
    ]
    assert all(message["content"] in ("Hi", ANSWER) for message in session.messages)


def test_think_says_how_much(typed: Any, engine: TalkingEngine) -> None:
    _, err, _ = typed(
        "/think", "/think off", "Hi", "/think 200", "Hi", "/set think high", "Hi", "/think deeply"
    )
    assert [config.think for _, config, _ in engine.asked] == ["off", "200", "high"]
    assert err == [
        "The last answer has no thought.",
        "think set to off.",
        "think set to 200.",
        "think set to high.",
        "think must be auto, on, off, low, medium, high or a maximum number of tokens, not 'deeply'.",
    ]


def test_a_tree_budget_is_refused_by_the_name_that_was_typed(typed: Any) -> None:
    _, err, _ = typed("/set tree_budget 0")
    assert err == ["tree_budget must be from 1 to 4096 or auto, not '0'."]


def test_think_says_that_the_model_cannot(typed: Any, engine: TalkingEngine) -> None:
    engine.can_think = False
    _, err, _ = typed("/think off", "/set temperature 1", "/think auto")
    assert err == [
        "think set to off, which has no effect: the model's chat template has no thinking mode.",
        "temperature set to 1.",
        "think set to auto.",
    ]


def test_system_sets_the_prompt(typed: Any) -> None:
    _, err, session = typed("/system Be  brief.", "/system")
    assert err == ["System prompt set.", "Be  brief."]
    assert session.system == "Be  brief."


@pytest.mark.parametrize(
    ("value", "prompt"),
    [('"Be brief."', "Be brief."), ('Always say "yes"', 'Always say "yes"'), ('"a" or "b"', '"a" or "b"')],
)
def test_quotes_around_a_value_are_no_part_of_it(typed: Any, value: str, prompt: str) -> None:
    assert typed(f"/system {value}")[2].system == prompt


def test_ctrl_c_in_an_answer_keeps_the_conversation(typed: Any, engine: TalkingEngine) -> None:
    engine.on_word = lambda word: (
        signal.raise_signal(signal.SIGINT) if word == 1 and len(engine.asked) == 1 else None
    )
    out, err, session = typed("Hi", "Go on")
    assert out == ["Blue", ANSWER]
    assert err == ["Stopped; the partial answer is kept. /continue resumes it."]
    assert len(session.messages) == 4


def test_ctrl_c_before_the_answer_claims_none(typed: Any, engine: TalkingEngine) -> None:
    """As while a long prompt is read."""
    engine.on_word = lambda word: (
        signal.raise_signal(signal.SIGINT) if word == 0 and len(engine.asked) == 2 else None
    )
    out, err, session = typed("Hi", "Go on", "/stats", "/retry")
    assert out == [ANSWER, ANSWER]
    assert err == [
        "Stopped before the first token. /retry asks again.",
        "prompt    3 tokens, processed for 0.00 s",
        "answer    none (stopped)",
        "mode      not bit-exact: near-ties may differ from the text without drafts",
        "sampling  greedy: always the likeliest token",
    ]
    assert [message["content"] for message in session.messages] == ["Hi", ANSWER, "Go on", ANSWER]


def test_a_full_context_says_how_to_continue(typed: Any, engine: TalkingEngine) -> None:
    engine.full = True
    hint = "/undo removes the last turn, /clear starts over, and --context sets a larger context."
    full = "The answer ends early: the context of 4096 tokens is full."
    assert typed("Hi")[1] == [full, hint]
    assert typed("too long")[1] == ["The prompt has 9 tokens. Shorten it."]
    offer = "Drop the oldest turns to make room?"
    assert typed("Hi", "Hi")[1] == [full, hint, full, offer, hint]
    engine.says_yes = True
    _, err, session = typed("Hi", "Hi", "Hi")
    assert err == [full, hint, full, offer, "Dropped 1 turn, kept 1."]
    assert session.turns == 2


def test_settings_can_be_changed_and_shown(typed: Any, engine: TalkingEngine) -> None:
    _, err, _ = typed(
        "/set temperature 0.5", "/set stop X", "/set top_k few", "/set temprature 1", "/show", "Hi"
    )
    assert err[:4] == [
        "temperature set to 0.5.",
        "stop set to 'X'.",
        "top_k must be an integer, not 'few'.",
        "There is no setting 'temprature'. Did you mean temperature?",
    ]
    shown = [line.split() for line in err]
    assert ["temperature", "0.5", "(/set)"] in shown
    assert ["session", "not", "saved"] in shown
    assert engine.asked[0][1] == GenerationConfig(temperature=0.5, stop=("X",))


def test_a_setting_says_where_it_comes_from(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    session: Any = TalkingSession(engine)
    sources = {"temperature": "recommended for Qwen 3", "top_k": "recommended for Qwen 3", "seed": "given"}
    config = GenerationConfig(temperature=0.6, top_k=20, seed=7)
    results = ResultStream(sys.stdout, "Standard output")
    chat = Chat(session, engine, config, Terminal(), results, sources=sources)  # type: ignore[arg-type]
    messages = [
        "/set temperature",
        "/set --top-k 5",
        "/set n 9",
        "/set",
        "/set temp 0",
        "/set temp default",
        "/set nonsense",
        "Hi",
        "/stats",
    ]
    InteractiveChat(chat).run(TypingFriend(messages, False))
    err = capsys.readouterr().err.splitlines()
    assert err[0] == ("temperature is 0.6 (recommended for Qwen 3). To change it: /set temperature VALUE")
    assert err[1:3] == ["top_k set to 5.", "max_tokens set to 9."]
    shown = dict(line.split(maxsplit=1) for line in err[3:] if len(line.split()) > 1)
    assert shown["top_k"] == "5 (/set)"
    assert shown["seed"] == "7 (given)"
    assert shown["min_p"] == "0"
    assert "There is no setting 'nonsense'." in " ".join(err)
    assert err[-1] == "sampling    temperature 0.6 (recommended for Qwen 3); top_k 5 (/set)"
    assert engine.asked[0][1] == GenerationConfig(temperature=0.6, top_k=5, seed=7, max_tokens=9)


def test_files_go_with_the_next_question(typed: Any, engine: TalkingEngine, tmp_path: Path) -> None:
    notes, code = tmp_path / "notes.md", tmp_path / "a.py"
    notes.write_text("Buy ```milk```.\n")
    code.write_text("print()\n")
    _, err, _ = typed(f"/file {notes}", f"What about @{code}? And @nobody?", "Hi", "/file none.txt")
    asked = "notes.md:\n````\nBuy ```milk```.\n````\n\na.py:\n```\nprint()\n```\n\n"
    asked += f"What about @{code}? And @nobody?"
    assert [prompt for prompt, _, _ in engine.asked] == [asked, "Hi"]
    assert err[:2] == [
        f"Attached {notes} (16 characters) to the next question.",
        f"Attached: {notes}, {code}",
    ]
    assert [line.partition(":")[0] for line in err[2:]] == ["none.txt cannot be read"]


def test_a_file_named_twice_is_attached_once(typed: Any, engine: TalkingEngine, tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("Buy milk.")
    _, err, _ = typed(f"/file {notes}", f"What do @{notes} and @{tmp_path}/./notes.md say?")
    assert err[-1] == f"Attached: {notes}"
    assert engine.asked[0][0].count("Buy milk.") == 1


def test_a_binary_file_is_not_attached(typed: Any, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "latin").write_bytes(b"a\ncaf\xe9")
    _, err, _ = typed(f"/file {tmp_path / 'x.png'}", f"/file {tmp_path / 'latin'}")
    assert err == [
        f"{tmp_path / 'x.png'} is not a text file. Name a UTF-8 text file.",
        f"{tmp_path / 'latin'} is not valid UTF-8: byte 0xe9 at offset 5, on line 2. {CONVERT}",
    ]


@pytest.mark.parametrize(
    ("before", "offers"),
    [
        ("/st", ["/stats "]),
        ("/se", ["/set", "/sessions"]),
        ("/set tem", ["temperature "]),
        ("/set verify bl", ["verify block"]),
        ("/set temp d", ["temp default"]),
        ("/set budget ", ["budget auto"]),
        ("/clear ", []),
        ("Hello /st", []),
        ("see @no", ["notes.md"]),
        ("/file no", ["notes.md"]),
        ("see @sub", ["sub/"]),
    ],
)
def test_what_tab_offers(
    before: str, offers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.md").touch()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    chat = InteractiveChat(Chat(None, None, GenerationConfig(), Terminal(), ResultStream(sys.stdout, "")))  # type: ignore[arg-type]
    found = [offer.text for offer in chat.completer(before)]
    assert found == (["/stats"] if before == "/st" else offers)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["Hi"], "Hi"),
        (["one \\", "two\\", "three"], "one \ntwo\nthree"),
        (['"""', "one", "", 'two"""'], "one\n\ntwo"),
        (['"""one line"""'], "one line"),
        (['"""', "one", "two", CTRL_D], "one\ntwo"),
        (['"""', CTRL_D], ""),
        (["one\\", CTRL_D], "one"),
    ],
)
def test_lines_of_one_message(lines: list[str], message: str) -> None:
    prompts: list[str] = []
    typed = iter(lines)

    def read_line(prompt: str) -> str:
        prompts.append(prompt)
        line = next(typed)
        if line == CTRL_D:
            raise EOFError
        return line

    assert join_lines(read_line) == message
    assert prompts == [">>> "] + ["... "] * (len(lines) - 1)


def test_ctrl_d_sends_an_open_text_and_then_leaves() -> None:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        messages = TypedKeyboard(lambda _text: []).messages()
        keys.send_text(f'"""one\rtwo{CTRL_D}')
        assert next(messages) == "one\ntwo"
        keys.send_text(CTRL_D)
        assert next(messages, None) is None


def test_a_history_that_cannot_be_kept_ends_no_chat() -> None:
    (data_folder() / "chat_history").mkdir(parents=True)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        history = TypedKeyboard(lambda _text: [])._session.history
    history.append_string("Hi")
    assert [*history.get_strings()] == ["Hi"]
    assert [*history.load_history_strings()] == []


def test_ctrl_c_in_an_open_text_says_that_it_is_discarded(capsys: pytest.CaptureFixture[str]) -> None:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        messages = TypedKeyboard(lambda _text: []).messages()
        keys.send_text('"""one\rtwo\x03')
        keys.send_text(f"one line\x03{CTRL_D}")
        assert next(messages, None) is None
    leave = "Ctrl-D or /bye leaves."
    discarded = f"The unfinished message was discarded. {leave}"
    assert capsys.readouterr().err.splitlines() == [discarded, leave]

    lines = iter(['"""one'])

    def read_line(_prompt: str) -> str:
        if line := next(lines, ""):
            return line
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="The unfinished message was discarded"):
        join_lines(read_line)


def test_a_model_without_a_template_cannot_chat(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.has_chat_template = False
    assert main(["chat", "-p", "Hi"]) == 1
    what = "The model has no chat template, so it cannot chat."
    assert capsys.readouterr().err.startswith(f"Error: {what}\n")


def test_a_terminal_that_does_not_know_its_size_has_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    assert _window() == (80, 24)


def test_a_question_of_a_conversation_without_answers_is_all_that_is_told(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    session: Any = TalkingSession(engine)
    results = ResultStream(sys.stdout, "Standard output")
    chat = Chat(session, engine, GenerationConfig(), Terminal(), results)  # type: ignore[arg-type]
    resumed = ResumedSession(turns=0, tokens=0, restored=0, reason="", pending="Why?", pending_images=())
    chat.report_resumed(resumed)
    chat.report_resumed(resumed, hint="Send it again.")
    assert capsys.readouterr().err.splitlines() == [
        "The last question was not answered: Why? /retry asks it again.",
        "The last question was not answered: Why? Send it again.",
    ]
