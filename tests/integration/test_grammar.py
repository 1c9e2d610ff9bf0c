"""Answers of a given form, from a model that talks nonsense: they have it, whatever drafts them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec
from edgespec import GenerationConfig
from edgespec.cli.main import main
from edgespec.errors import UsageError
from edgespec.generation.config import Grammar
from edgespec.generation.result import Generation
from edgespec.speculation.drafters.proposing import lookup_drafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import ProbabilityRanking
from edgespec.speculation.tree import Acceptance, TokenTree

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
PERSON = Grammar("json_schema", json.dumps(SCHEMA))
GBNF = Grammar("grammar", 'root ::= "The answer is " [0-9] [0-9]? "."\n')


@pytest.fixture(scope="module")
def plain(short_path: Path) -> Iterator[edgespec.Engine]:
    with edgespec.load(short_path, draft="none", exact=True, context=512, threads=1) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_answers_have_the_form_whatever_drafts_them(
    short_path: Path, short_q4_path: Path, plain: edgespec.Engine, temperature: float
) -> None:
    def asked(engine: edgespec.Engine) -> list[Generation]:
        config = GenerationConfig(max_tokens=80, temperature=temperature)
        return [
            engine.generate("Describe a person.", config.with_(seed=seed, grammar=form))
            for form, seed in ((PERSON, 1), (GBNF, 3))
        ]

    expected = asked(plain)
    answers: dict[str, list[Generation]] = {}
    for draft in ("lookup", short_q4_path):
        with edgespec.load(
            short_path, draft=draft, exact=True, tree_budget=16, context=512, threads=1
        ) as engine:
            answers[str(draft)] = asked(engine)
            assert engine.speculator.last_round is not None
    for others in answers.values():
        assert [a.tokens for a in others] == [a.tokens for a in expected]
    for answer in expected[:1]:
        person = json.loads(answer.text)
        assert set(person) == {"name", "age", "colours"}
        assert 0 <= person["age"] <= 120
        assert set(person["colours"]) <= {"red", "green"}
        assert answer.finish_reason == "stop"
    assert expected[1].text.startswith("The answer is ")
    assert answers[str(short_q4_path)][0].tokens_per_pass > 1.5


def test_fixed_text_takes_hardly_any_passes(short_path: Path, plain: edgespec.Engine) -> None:
    fixed = r"The quick brown fox jumps over the lazy dog, and then it sleeps until (noon|midnight)\."
    config = GenerationConfig(max_tokens=60, grammar=Grammar("regex", fixed))
    expected = plain.generate("What happens?", config)
    with edgespec.load(
        short_path, draft="lookup", exact=True, tree_budget=16, context=512, threads=1
    ) as engine:
        answer = engine.generate("What happens?", config)
    assert answer.tokens == expected.tokens
    assert 2 * len(answer.passes) < len(answer.tokens)


def test_what_the_text_proposes_is_held_to_the_form(
    short_path: Path, short_q4_path: Path, plain: edgespec.Engine
) -> None:
    """The prompt holds answers of another form, which a merged drafter would quote."""
    prompt = 'Colours: {"name": "Blue", "age": "old"} {"name": "Blue", "age": "old"}. Describe a person.'
    config = GenerationConfig(max_tokens=60, grammar=PERSON)
    expected = plain.generate(prompt, config).tokens
    with edgespec.load(
        short_path, draft=short_q4_path, drafter="merged", tree_budget=24, context=512, threads=1, exact=True
    ) as engine:
        trees = _trees_of(engine, prompt, config)
        text = engine.encoder.encode(prompt)
        constraint = engine.maker.planner.plan(engine.encoder, text, config, raw=False).constraint
        assert constraint is not None
        for tree, accepted in trees:
            assert constraint.pruned(tree, text) is tree, "it holds permitted tokens only"
            text += [int(token) for token in tree.tokens[list(accepted.path[1:])]]
            text.append(accepted.bonus)
        start = len(engine.encoder.encode(prompt))
        assert text[start : start + len(expected)] == expected
        trees_of_text = (
            lookup_drafter().draft(text[:end], TreeLimits(8), ProbabilityRanking())
            for end in range(start, len(text))
        )
        assert max(map(len, trees_of_text)) > 1, "it had proposals"


def _trees_of(
    engine: edgespec.Engine, prompt: str, config: GenerationConfig
) -> list[tuple[TokenTree, Acceptance]]:
    """The tree of every pass, and what became of it."""
    trees = []
    for chunk in engine.stream(prompt, config):
        if chunk.record is not None:
            tree, accepted = engine.speculator.last_round or (None, None)
            if chunk.record.nodes == 1:
                tree, accepted = TokenTree.root_only(0), Acceptance((0,), chunk.tokens[-1])
            assert tree is not None
            assert accepted is not None
            trees.append((tree, accepted))
    return trees


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (Grammar("json_schema", "{"), "The JSON schema is invalid: "),
        (
            Grammar("json_schema", '{"type": "foo"}'),
            'The JSON schema is invalid: Invalid type: foo. Replace "type": "foo" by one of string,',
        ),
        (Grammar("json_schema", "3"), "The JSON schema is invalid: a schema is an object. Correct it."),
        (Grammar("json_schema", '{"type": "number", "minimum": "x"}'), "The JSON schema is invalid: "),
        (Grammar("grammar", "root ::= missing"), "The grammar is invalid: "),
        (Grammar("regex", "("), "The regular expression is invalid: "),
    ],
)
def test_wrong_forms(plain: edgespec.Engine, form: Grammar, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plain.generate("Hi", GenerationConfig(grammar=form))
    assert str(caught.value).startswith(message)
    assert plain.generate("Hi", GenerationConfig(max_tokens=1)).tokens


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, prompts = tmp_path / "schema.json", tmp_path / "in.jsonl"
    schema.write_text('{"enum": ["yes", "no"]}')
    assert main(["generate", "-p", "Is water wet?", "--json-schema", str(schema), "--context", "128"]) == 0
    assert json.loads(capsys.readouterr().out) in ("yes", "no")
    lines = [
        {"prompt": "Is water wet?", "json_schema": {"const": 1}},
        {"prompt": "Is water wet?", "grammar": 'root ::= "no"'},
        {"prompt": "Is water wet?", "grammar": "root ::= missing"},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["generate", "--input", str(prompts), "--context", "128"]) == 1
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert texts == ["1", "no", ""]
    assert main(["generate", "-p", "Hi", "--grammar", "none.gbnf"]) == 2
    expected = r"Error: none\.gbnf cannot be read: .+\.\nCheck the path\.\n"  # by the system's words
    assert re.fullmatch(expected, capsys.readouterr().err)
