"""The script of the model that programs are run against, and the table of what came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.generation.tools import Tool
from edgespec.serving.completion_handler import CompletionHandler
from tests.clients.conversation import Conversation, Turn
from tests.clients.installing import used
from tests.clients.report import HEAD, Row, table, turns_table
from tests.clients.running import Failed, last_line, run
from tests.clients.script import NO_WORD, arguments_for, next_answer, question
from tests.clients.server import ScriptedHandler

NOTE = Path("/tmp/work/note-3.txt")
ASKED: dict[str, Any] = {"role": "user", "content": question(NOTE)}
CALLED = {"role": "assistant", "content": ""}
WORD = "heron-0a1b2c3d"


def tool(name: str, **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return Tool(name, "", json.dumps(schema))


READ = tool("Read", file_path={"type": "string"})


def test_the_file_is_read_by_a_tool_that_the_program_offers() -> None:
    answer = next_answer([ASKED], [tool("Write", file_path={"type": "string"}), READ])
    assert (answer.call, answer.arguments) == ("Read", {"file_path": str(NOTE)})
    assert next_answer([ASKED], [tool("Write", file_path={"type": "string"})]).call is None
    assert next_answer([{"role": "user", "content": "Hello"}], [READ]).call is None


def test_the_answer_is_what_the_result_says() -> None:
    result = {"role": "tool", "content": f"1\tThe word is {WORD}."}
    reminder = {"role": "user", "content": "Remember to be brief."}
    assert next_answer([ASKED, CALLED, result, reminder], [READ]).text == f"The word is {WORD}."
    assert next_answer([ASKED, CALLED, {"role": "tool", "content": ""}], [READ]).text == NO_WORD
    again = [ASKED, CALLED, result, {"role": "assistant", "content": WORD}, ASKED]
    assert next_answer(again, [READ]).call == "Read"


def test_a_form_of_json_is_filled_in_as_the_prompt_shows_it() -> None:
    titled = 'Write a title for:\nRead the file /tmp/note-1.txt\nJSON format: { "title": "A title" }\n'
    asked = {"role": "user", "content": titled}
    assert next_answer([asked], []).text == '{ "title": "A title" }'
    assert next_answer([asked], [READ]).call == "Read"


def test_requirements_that_are_not_used_are_left_out() -> None:
    requirements = [
        "torch==2.1",
        "Sentence_Transformers>=5",
        "uvicorn[standard]==1",
        'x; extra == "all"',
        "y",
    ]
    assert used(requirements, ["sentence-transformers", "torch"]) == ["uvicorn[standard]==1", "y"]
    marked = 'async-timeout; python_version < "3.12"'
    assert used([marked], ["async"]) == [marked]


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"command": {"type": "string"}}, {"command": f"cat {NOTE}"}),
        ({"command": {"type": "array"}}, {"command": ["cat", str(NOTE)]}),
        (
            {"cmd": {"type": "string"}, "wait": {"type": "boolean"}, "mode": {"enum": ["a", "b"]}},
            {"cmd": f"cat {NOTE}", "wait": False, "mode": "a"},
        ),
        (
            {"absolute_path": {"type": "string"}, "limit": {"type": "integer"}},
            {"absolute_path": str(NOTE), "limit": 1},
        ),
    ],
)
def test_arguments_follow_the_schema(properties: dict[str, Any], expected: dict[str, Any]) -> None:
    schema = json.loads(tool("t", **properties).parameters)
    assert arguments_for(schema, str(NOTE)) == expected
    schema["required"] = []
    needed = {"wait", "mode", "limit"}
    assert set(arguments_for(schema, str(NOTE))) == set(expected) - needed


def turn(*, told: bool = True, came: bool = True) -> Turn:
    first = {"prompt_tokens": 1000, "read_tokens": 1000, "called": ["Read"], "results": []}
    second = {"prompt_tokens": 1100, "read_tokens": 30, "called": [], "results": [WORD] if came else []}
    return Turn([first, second], WORD, f"The word is {WORD}.\n" if told else "", "")


def test_a_row_passes_if_the_word_came_to_the_model_and_back() -> None:
    row = Row("A", "1.0", Conversation([turn()]))
    assert row.passed
    assert row.cells == ("A", "1.0", "1,000", "30 of 1,100", "Read", "came back", "")
    assert not Row("A", "1.0", Conversation([turn(told=False)])).passed
    assert not Row("A", "1.0", Conversation([turn(came=False)])).passed
    refused = Row("A", "1.0", Conversation([turn()], refused=["POST /v1/x 404: no | such"]))
    assert not refused.passed
    assert "no \\| such |" in table(HEAD, [refused.cells])
    changed = "changed at token 7 of 900: 'Monday' became 'Tuesday'"
    assert Row("A", "1.0", Conversation([turn()], warnings=["Ignored."], changed=[changed])).cells[-1] == (
        f"{changed}; Ignored."
    )
    assert Row("A", "", None, "not installed").cells[-1] == "not installed"
    asides = Turn(
        turn().requests, WORD, f"The word is {WORD}.", "", [{"prompt_tokens": n} for n in (1547, 30)]
    )
    assert Row("A", "1.0", Conversation([asides])).cells[-1] == "requests without tools, tokens: 1,547 + 30"
    silent = Row("A", "1.0", Conversation([Turn([], WORD, "", "no end within 1 s: it wrote nothing")]))
    assert silent.cells[2:] == (
        "",
        "",
        "not called",
        "did not come back",
        silent.conversation.turns[0].failure,
    )  # type: ignore[union-attr]


def test_turns_have_a_table_where_there_are_several() -> None:
    assert turns_table([Row("A", "1.0", Conversation([turn()]))]) == ""
    lines = turns_table([Row("A", "1.0", Conversation([turn(), turn()]))]).splitlines()
    assert lines[0] == "| tokens read in turn | 1 | 2 |"
    assert lines[2] == "| A | 1,000 + 30 | 1,000 + 30 |"


def test_a_program_that_fails_or_does_not_end_is_told_of(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin"}
    assert run(["sh", "-c", "echo yes"], tmp_path, environment, 60).output == "yes\n"
    failed = run(["sh", "-c", "echo 'no  \x1b[31mway\x1b[0m' >&2; exit 3"], tmp_path, environment, 60)
    assert failed.failure == "exit status 3: no way"
    endless = run(["sh", "-c", "echo begun; sleep 600 & wait"], tmp_path, environment, 0.2)
    assert endless.failure.startswith("no end within 0 s: ")
    assert last_line("\n\n") == "it wrote nothing"
    assert str(Failed("not installed")) == "not installed"


def test_the_scripted_handler_replaces_methods_that_handlers_have() -> None:
    """So that a renamed method is noticed here, not only where the programs are installed."""
    own = {name for name, value in vars(ScriptedHandler).items() if callable(value)} - {"_changed"}
    assert own <= set(vars(CompletionHandler))
