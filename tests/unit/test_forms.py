"""Schemas and grammars of the command line are compiled before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.cli.main import main
from tests.unit.talking import TalkingEngine

DEEP = '{"a":' * 200 + "1" + "}" * 200
WRONG_SCHEMAS = {
    "{bad": "The JSON schema is invalid: ",
    '{"type": "nonsense"}': "The JSON schema is invalid: ",
    '{"type": "string", "pattern": "("}': "The JSON schema is invalid: ",
    DEEP: "The JSON schema is nested 200 levels deep",
}
COMMANDS = (["generate", "-p", "Hi"], ["generate", "-i", "in.jsonl"], ["chat", "-p", "Hi"], ["serve"])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("schema", WRONG_SCHEMAS)
def test_a_wrong_schema_is_refused_before_loading(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str], command: list[str], schema: str
) -> None:
    assert main([*command, "--json-schema", schema]) == 2
    assert capsys.readouterr().err.startswith(f"Error: {WRONG_SCHEMAS[schema]}")
    assert engine.loaded_with == {}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("grammar", ['root ::= "a', "start: other"])
def test_a_wrong_grammar_is_refused_before_loading(
    engine: TalkingEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    grammar: str,
) -> None:
    file = tmp_path / "wrong.gbnf"
    file.write_text(grammar)
    assert main([*command, "--grammar", str(file)]) == 2
    assert capsys.readouterr().err.startswith("Error: The grammar is invalid: ")
    assert engine.loaded_with == {}


def test_a_form_that_is_not_plain_is_compiled_in_a_child(engine: TalkingEngine) -> None:
    assert main(["generate", "-p", "Hi", "--json-schema", '{"type": "number", "multipleOf": 0.01}']) == 0
    assert engine.loaded_with
