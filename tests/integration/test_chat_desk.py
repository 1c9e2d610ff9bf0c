"""Chat at a desk: pipes beside a terminal, editors, job control, history, windows that change their size."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from pathlib import Path

import pytest

from tests.desk import EDGESPEC, STORY, Desk, session_messages
from tests.gate import Gate
from tests.tiers import slow_except

pytestmark = pytest.mark.usefixtures("at_a_desk")

SHELL = ("bash", "--norc", "--noprofile", "-i")
QUICK = ("chat", "--draft", "none")  # nothing is measured before the first question
CHAT = shlex.join([*EDGESPEC, *QUICK, "--max-tokens", "8"])


# Pipes beside the terminal


def test_a_chat_into_a_pipe_has_its_prompt_and_its_answer(tmp_path: Path) -> None:
    log = tmp_path / "answers.txt"
    with contextlib.closing(Desk("-c", f"{CHAT} | tee {log}", program=["bash"])) as desk:
        desk.ask("Hi", until=" tokens, ")
        desk.ask("/stats", until="limited by")
        desk.ask("/nope", until="There is no command /nope")
        desk.ask("one \\", until="... ")
        desk.type("two\r")
        desk.wait_for(" tokens, ")
        assert desk.leave_by("\x04") == 0
    answers = log.read_text().splitlines()
    assert len(answers) >= 2
    assert not any(word in log.read_text() for word in (">>>", "\x1b", " tokens, ", "/nope"))


@pytest.mark.slow
def test_bytes_that_are_no_text_are_refused_and_the_chat_continues(tmp_path: Path) -> None:
    with contextlib.closing(Desk("-c", f"{CHAT} | cat", program=["bash"])) as desk:
        desk.wait_for(">>>")
        desk.press(b"caf\xe9\r")
        desk.wait_for("is not valid UTF-8: byte 0xe9 at offset 3.")
        desk.ask("Hi", until=" tokens, ")
    with contextlib.closing(Desk(*QUICK, "--max-tokens", "4")) as desk:
        desk.wait_for(">>>")
        desk.press(b"caf\xff!\r")
        desk.wait_for("is not valid UTF-8: byte 0xff at offset 3.")
        desk.ask("Hi", until=" tokens, ")


def test_the_first_question_may_stand_on_the_command_line() -> None:
    with contextlib.closing(Desk(*QUICK, "-p", "Hi", "--max-tokens", "8", "--session", "first")) as desk:
        desk.wait_for(">>> Hi")
        desk.wait_for(" tokens, ")
        desk.ask("And you?", until=" tokens, ")
        assert desk.leave_by("/bye\r") == 0
    assert session_messages("first")[::2] == ["Hi", "And you?"]


@pytest.mark.slow
def test_clear_keeps_what_was_saved() -> None:
    with contextlib.closing(Desk(*QUICK, "--max-tokens", "4", "--session", "trip", columns=200)) as desk:
        desk.ask("Hi", until=" tokens, ")
        before = session_messages("trip")
        desk.ask("/clear", until="/save NAME saves it.")
        desk.ask("Another thing", until=" tokens, ")
        desk.ask("/show", until="not saved")
        desk.ask("/load trip", until=">>> Hi")
        desk.wait_for("Resumed 1 turn")
        assert desk.leave_by("/bye\r") == 0
    assert session_messages("trip") == before


# Job control


@pytest.mark.parametrize("moment", slow_except(["answering"], ["typing", "answering"]))
def test_ctrl_z_suspends_and_fg_continues(
    moment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PS1", "ready$ ")
    gate = Gate(tmp_path / "gate")
    chat = shlex.join([*gate.program, *QUICK, "--max-tokens", "16"])
    with contextlib.closing(Desk(program=SHELL)) as desk:
        desk.wait_for("ready$")
        desk.type(f"{chat}\r")
        desk.wait_for(">>>")
        if moment == "answering":
            gate.close()
            desk.type(STORY + "\r")
            gate.wait()
        desk.type("\x1a")
        desk.wait_for("Stopped")
        desk.wait_for("ready$")
        desk.type("echo $((40 + 2))\r")
        desk.wait_for("echo $((40")  # the shell's line is shown as it is typed
        desk.wait_for("42")
        assert not desk.cursor_hidden
        desk.type("fg\r")
        gate.open()
        if moment == "answering":
            desk.wait_for(" tokens, ")
        desk.ask("Hi", until=" tokens, ")
        desk.ask("/bye", until="ready$")
        desk.type("exit\r")
        desk.leave()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dash") is None, reason="there is no dash here")
def test_ctrl_z_hands_over_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every shell sets modes of its own: dash leaves them as the program did."""
    monkeypatch.setenv("PS1", "ready$ ")
    with contextlib.closing(Desk(program=("dash", "-i"))) as desk:
        desk.wait_for("ready$")
        desk.type(f"{CHAT}\r")
        desk.wait_for(">>>")
        assert not desk.echoes
        desk.type("\x1a")
        desk.wait_for("Stopped")
        assert desk.echoes
        desk.wait_for("ready$")
        desk.type("fg\r")
        desk.ask("Hi", until=" tokens, ")
        desk.ask("/bye", until="ready$")
        assert desk.echoes


# History


@pytest.mark.slow
def test_a_message_of_several_lines_is_one_entry_of_the_history() -> None:
    with contextlib.closing(Desk(*QUICK, "--max-tokens", "4", "--session", "lines")) as desk:
        desk.wait_for(">>>")
        desk.type('"""one\r')
        desk.wait_for("...")
        desk.type('two"""\r')
        desk.wait_for(" tokens, ")
        desk.ask("three\\", until="...")
        desk.type("four\r")
        desk.wait_for(" tokens, ")
    with contextlib.closing(Desk(*QUICK, "--max-tokens", "4", "--session", "lines")) as desk:
        desk.wait_for(">>>")
        desk.type("\x10\x10\x10\x10")  # Ctrl-P: through the lines of one entry, and to the one before
        desk.wait_for("one")
        desk.type("\r")
        desk.wait_for(" tokens, ")
        desk.wait_for(">>>")
    assert session_messages("lines")[::2] == ["one\ntwo", "three\nfour", "one\ntwo"]
