"""Chat on a real pseudo-terminal: what the screen shows, and what is left after Ctrl-C and kill -9."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.desk import STORY, Desk, session_messages
from tests.gate import DRAFT, PROMPT, Gate
from tests.least_memory import least_memory
from tests.templated import with_template
from tests.tiers import slow_except
from tests.unit import templates

pytestmark = pytest.mark.usefixtures("at_a_desk", "fixed_trees")

SKY = "Why is the sky blue?"
Reply = Callable[..., str]


@pytest.fixture
def long_question(tmp_path: Path) -> str:
    """A question with a file in it that takes a while to read."""
    path = tmp_path / "words.txt"
    path.write_text(" ".join(f"word{i}" for i in range(160)))
    return f"What is in @{path}?"


def test_the_screen_shows_an_answer_and_the_last_tree(q4_drafter_path: Path, reply: Reply) -> None:
    arguments = ["--draft", str(q4_drafter_path), "--tree-budget", "8", "--max-tokens", "24"]
    with contextlib.closing(Desk("chat", *arguments, columns=60)) as desk:
        desk.ask(SKY, until=" tokens, ")
        desk.ask("/tree", until="the target's own choice")
        screen = "\n".join(desk.screen)
        assert reply(SKY, 8) in screen
        assert re.search(r"^[1-7] drafted tokens?, [0-7] accepted, and the next one:$", screen, re.MULTILINE)
        assert re.search(r"^● \S+( \d+%|  the text so far)", screen, re.MULTILINE)
        desk.ask("/set budget 1", until="tree_budget set to 1.")
        desk.ask("/st\t", until=" accepted")
        assert desk.leave_by("/bye\r") == 0


@pytest.mark.slow
def test_a_thought_is_folded_until_it_is_asked_for(smol_path: Path, tmp_path: Path) -> None:
    model = with_template(smol_path, templates.OPENED, tmp_path / "thinker.gguf")
    arguments = ["--draft", "none", "--think", "6", "--max-tokens", "20"]
    with contextlib.closing(Desk("chat", str(model), *arguments)) as desk:
        desk.ask(SKY, until="/think shows it.")
        desk.wait_for("of thought)")
        folded = r"^Thought for \d+\.\d s, \d+ tokens\. /think shows it\.$"
        assert re.search(folded, "\n".join(desk.screen), re.MULTILINE)
        desk.ask("/think", until="\x1b[2m")
        desk.wait_for("\x1b[0m")
        words = desk.shown.split()
        assert words
        desk.ask("/think show", until="Thoughts will be shown.")
        desk.ask("/retry", until="of thought)")
        assert " ".join(words) in " ".join(" ".join(desk.screen).split())
        assert "<think>" not in desk.shown
        assert desk.leave_by("/bye\r") == 0


@pytest.mark.slow
def test_without_colour_nothing_is_drawn_twice(monkeypatch: pytest.MonkeyPatch, reply: Reply) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with contextlib.closing(Desk("chat", "--max-tokens", "24", columns=40)) as desk:
        desk.ask(SKY, until=" tokens, ")
        begun = desk.shown.index(reply(SKY, 4))
        assert "\x1b" not in desk.shown[begun:].partition("\n")[0]
        # The terminal folds lines wherever they end.
        assert "".join(reply(SKY, 24).split()) in "".join("".join(desk.screen).split())


@pytest.mark.slow
def test_a_window_that_changes_its_size_in_an_answer(reply: Reply, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    arguments = ["chat", "--draft", "none", "--max-tokens", "120"]
    with contextlib.closing(Desk(*arguments, columns=44, program=gate.program)) as desk:
        desk.wait_for(">>>")
        gate.close()
        desk.type(SKY + "\r")
        gate.wait()
        desk.resize(90, 30)
        gate.open()
        desk.wait_for(" tokens, ")
        desk.wait_for(">>>")
        screen = desk.screen
        assert 44 < max(map(len, screen)) <= 90
        # Each line once: what was drawn at the old width was drawn over.
        text = " ".join(" ".join(screen).split())
        assert text.count(reply(SKY, 5)) == 1


@pytest.mark.slow
def test_ctrl_c_while_the_prompt_is_read(long_question: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", PROMPT)
    with contextlib.closing(Desk("chat", "--max-tokens", "8", program=gate.program)) as desk:
        desk.wait_for(">>>")
        gate.close()
        desk.type(long_question + "\r")
        gate.wait()
        desk.wait_for("Reading the prompt")
        desk.type("\x03")
        desk.wait_for("Stopped before the first token.")
        desk.ask("/retry", until=" tokens, ")


@pytest.fixture(params=slow_except(["in memory"], ["in memory", "streaming"]))
def held(request: pytest.FixtureRequest, smol_path: Path) -> list[str]:
    """Options for a model in memory, and for one in so little of it that layers are streamed."""
    if request.param == "in memory":
        return []
    budget = least_memory(smol_path, draft="lookup", context=1024, threads=1) + (16 << 20)
    return ["--offload", "stream", "--memory", str(budget), "--context", "1024", "--verbose"]


STREAMS = "layers are streamed from disk"


@pytest.mark.slow
def test_a_killed_chat_loses_only_the_answer_it_was_writing(held: list[str], tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    first = ["chat", "--session", "trip", "--max-tokens", "12", "--exact", "--tree-budget", "1", *held]
    with contextlib.closing(Desk(*first, program=gate.program)) as desk:
        if held:
            desk.wait_for(STREAMS)
        desk.ask("Hi", until=" tokens, ")
        desk.wait_for(">>>")
        gate.close()
        desk.type(STORY + "\r")
        gate.wait()
        desk.kill()
    kept = session_messages("trip")
    assert kept[0] == "Hi"
    assert len(kept) == 2
    with contextlib.closing(Desk(*first)) as desk:
        desk.wait_for("Resumed 1 turn")
        desk.wait_for("tokens restored.")
        desk.wait_for(f"The last question was not answered: {STORY} /retry asks it again.")
        desk.ask("/retry", until=" tokens, ")
        desk.wait_for(">>>")
        desk.kill()  # while nothing is written
    killed = session_messages("trip")
    whole = ["chat", "--session", "whole", "--max-tokens", "12", "--exact", *held]
    with contextlib.closing(Desk(*whole)) as desk:
        desk.ask("Hi", until=" tokens, ")
        desk.ask(STORY, until=" tokens, ")
        assert desk.leave_by("/bye\r") == 0
    assert session_messages("whole") == killed
    assert len(killed) == 4


@pytest.mark.slow
def test_a_chat_killed_while_it_drafts_keeps_all_but_that_answer(
    q4_drafter_path: Path, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate", DRAFT)
    drafting = ["--draft", str(q4_drafter_path), "--tree-budget", "8", "--max-tokens", "200"]
    with contextlib.closing(Desk("chat", "--session", "trip", *drafting, program=gate.program)) as desk:
        desk.ask("Hi", until=" tokens, ")
        desk.wait_for(">>>")
        kept = session_messages("trip")
        assert len(kept) == 2
        gate.close()
        desk.type(STORY + "\r")
        gate.wait()
        desk.kill()
    assert session_messages("trip") == kept
    with contextlib.closing(Desk("chat", "--session", "trip", *drafting[:-1], "4")) as desk:
        desk.wait_for(f"The last question was not answered: {STORY}")
        desk.ask("/retry", until=" tokens, ")
        desk.wait_for(">>>")
    assert session_messages("trip")[:3] == [*kept, STORY]


@pytest.mark.slow
def test_a_chat_killed_while_it_reads_keeps_the_question(long_question: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", PROMPT)
    arguments = ["chat", "--session", "long", "--max-tokens", "4"]
    with contextlib.closing(Desk(*arguments, program=gate.program)) as desk:
        desk.wait_for(">>>")
        gate.close()
        desk.type(long_question + "\r")
        gate.wait()
        desk.wait_for("Reading the prompt")
        desk.kill()
    assert session_messages("long") == []
    with contextlib.closing(Desk(*arguments)) as desk:
        desk.wait_for("The last question was not answered: words.txt: ``` word0")
        desk.ask("/retry", until=" tokens, ")
        desk.wait_for(">>>")
    assert session_messages("long")[0].endswith(f"word159\n```\n\n{long_question}")


def test_ctrl_c_while_drafting_or_streaming(held: list[str], tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    drafting = ["--draft", "lookup", "--tree-budget", "8", "--max-tokens", "400"]
    with contextlib.closing(Desk("chat", *drafting, *held, program=gate.program)) as desk:
        if held:
            desk.wait_for(STREAMS)
        desk.wait_for(">>>")
        gate.close()
        desk.type(STORY + "\r")
        gate.wait()
        desk.type("\x03")
        desk.wait_for("Stopped; the partial answer is kept.")
        desk.ask("/set max_tokens 8", until="max_tokens set to")
        desk.ask("Hi", until=" tokens, ")
        assert desk.leave_by("\x04") == 0


@pytest.mark.slow
def test_a_session_is_held_by_one_program_and_one_model(gemma_path: Path) -> None:
    with contextlib.closing(Desk("chat", "--session", "mine", "--max-tokens", "4")) as desk:
        desk.ask("Hi", until=" tokens, ")
        with contextlib.closing(Desk("chat", "--session", "mine")) as other:
            other.wait_for("another program.")
            assert other.leave() == 1
        assert desk.leave_by("/bye\r") == 0
    with contextlib.closing(Desk("chat", "--session", "mine", "--context", "2048")) as desk:
        desk.wait_for("Saved with another context size")


def test_an_answer_that_is_cut_off_says_how_to_continue() -> None:
    with contextlib.closing(Desk("chat", "--draft", "none", "--max-tokens", "4")) as desk:
        desk.ask(SKY, until="The answer was cut off by --max-tokens. /continue resumes")
        assert re.search(r"^4 tokens, \d+(\.\d+)?/s$", "\n".join(desk.screen), re.MULTILINE)
        desk.ask("/set max_tokens none", until="max_tokens set to")


def test_run_with_a_prompt_answers_it_and_ends(reply: Reply) -> None:
    arguments = ["run", "smollm2-135m", SKY, "--draft", "none", "--max-tokens", "4", "--temp", "0"]
    with contextlib.closing(Desk(*arguments)) as desk:
        desk.wait_for(reply(SKY, 4))
        assert desk.leave() == 0
        assert ">>>" not in "\n".join(desk.screen)


@pytest.mark.slow
def test_a_chat_without_a_model_says_which_it_is_and_which_would_be_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EDGESPEC_SAMPLING")
    quick = ["chat", "--draft", "none"]
    with contextlib.closing(Desk(*quick)) as desk:
        desk.ask("/set temperature", until="temperature is 0.2 (recommended for SmolLM2).")
        desk.ask("/set top_p", until="top_p is 0.9 (recommended for SmolLM2).")
        told = [line for line in desk.screen if line][
            : [line[:3] for line in desk.screen if line].index(">>>")
        ]
        assert told[0].startswith("This is SmolLM2 135M, the bundled demo model.")
        assert len(told) <= 6
    for arguments in (["-m", "smollm2-135m"], ["--quiet"]):
        with contextlib.closing(Desk(*quick, *arguments)) as desk:
            desk.wait_for(">>>")
            screen = "\n".join(desk.screen)
            assert "demo model" not in screen
            assert ("without a drafter" in screen) == ("-m" in arguments)
