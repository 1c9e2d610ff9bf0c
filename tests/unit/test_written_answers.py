"""Answers that clients send back: which changes they may make, and what is not taken for an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.files.checked import CheckedFiles
from edgespec.serving.written_answers import WrittenAnswers
from edgespec.text.replay import Replay, WrittenAnswer
from edgespec.text.template import PromptSegment

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
ANSWER = WrittenAnswer((3, 1, 4), "I look.", "Hm.", (("look", '{"city": "Oslo", "days": 2.0}'),), thought=1)


def sent(**changes: Any) -> list[dict[str, Any]]:
    """The conversation as a client sends it back."""
    arguments = {"days": 2, "city": "Oslo"}
    calls = [{"id": "x", "type": "function", "function": {"name": "look", "arguments": arguments}}]
    message = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    return [*ASKED, message | changes, {"role": "tool", "content": "Snow"}]


def answers(folder: Path | None = None, model: str = "m", n_tokens: int = 10) -> WrittenAnswers:
    return WrittenAnswers(model, n_tokens, None if folder is None else CheckedFiles(folder))


@pytest.mark.parametrize(
    "changes",
    [{}, {"content": " I look.\r\n"}, {"reasoning_content": "Hm."}, {"reasoning_content": " Hm.\n"}],
)
def test_an_answer_is_found_in_the_forms_that_clients_give_it(changes: dict[str, Any]) -> None:
    known = answers()
    known.add(ASKED, ANSWER)
    assert known.find(sent(**changes)) == {1: ANSWER}


@pytest.mark.parametrize(
    "changes",
    [{"content": "I looked."}, {"content": "I  look."}, {"reasoning_content": "Oh."}, {"tool_calls": []}],
)
def test_an_answer_that_says_something_else_is_not_found(changes: dict[str, Any]) -> None:
    known = answers()
    known.add(ASKED, ANSWER)
    assert known.find(sent(**changes)) == {}
    assert known.find([{"role": "user", "content": "Whether?"}, *sent()[1:]]) == {}


def test_answers_are_found_by_a_later_run_of_the_same_model(tmp_path: Path) -> None:
    answers(tmp_path).add(ASKED, ANSWER)
    assert answers(tmp_path).find(sent()) == {1: ANSWER}
    assert answers(tmp_path, model="another").find(sent()) == {}
    assert answers(tmp_path, n_tokens=4).find(sent()) == {}, "it has a token that the model does not have"
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert answers(tmp_path).find(sent()) == {}


def test_tokens_take_the_place_of_marks_only_where_all_are_shown() -> None:
    replay = Replay({1: WrittenAnswer((7, 8))}, None)
    told = replay.marked([*ASKED, {"role": "assistant", "content": "x"}])
    mark = told[1]["content"]
    shown = replay.replayed([PromptSegment(f"user: Weather? it: {mark} end", literal=False)])
    assert shown is not None
    assert [(part.text, part.tokens) for part in shown] == [
        ("user: Weather? it: ", None),
        ("", (7, 8)),
        (" end", None),
    ]
    assert replay.replayed([PromptSegment("user: Weather? it: end", literal=False)]) is None
    assert replay.replayed([PromptSegment(f"{mark} {mark}", literal=False)]) is None


def test_answers_are_restored_with_what_a_client_has_dropped() -> None:
    (_, message, _) = sent(content=" I look. ")
    whole = ANSWER.restored(message)
    assert (whole["content"], whole["reasoning_content"]) == ("I look.", "Hm.")
    ((call),) = whole["tool_calls"]
    assert call["id"] == "x"
    assert list(call["function"]["arguments"]) == ["city", "days"]
