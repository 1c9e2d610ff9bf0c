"""Grammars and schemas of any size: compiled, or refused in words, and never the end of the process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.batch.input_file import read_jobs
from edgespec.errors import GrammarError
from edgespec.generation.config import Grammar
from edgespec.llama.runtime.model import Model
from edgespec.text.grammar.limits import check, is_plain
from edgespec.text.grammar.matchers import _KEPT, _KEPT_BYTES, Grammars, _Compiled
from tests.wine import needs_limits

# Run in a process of its own: where a form is not bounded, compiling it ends that process.
HOSTILE = """
import json, sys
from pathlib import Path
from edgespec.errors import EdgeSpecError
from edgespec.generation.config import Grammar
from edgespec.text.grammar.matchers import Grammars
from edgespec.llama.runtime.model import Model
for form in json.load(sys.stdin):
    with Model(Path(sys.argv[1]), vocabulary_only=True) as model:
        try:
            Grammars(model.vocabulary).matcher(Grammar(*form)).compute_logit_bias()
            print("compiled", flush=True)
        except EdgeSpecError as error:
            print(type(error).__name__, error.what, flush=True)
"""


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def chained_rules(count: int) -> Grammar:
    rules = "".join(f"r{i} ::= r{i + 1}\n" for i in range(count))
    return Grammar("grammar", f'root ::= r0\n{rules}r{count} ::= "a"\n')


def chained_references(count: int) -> Grammar:
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return schema({"$ref": "#/$defs/d0", "$defs": links | {f"d{count}": {"type": "integer"}}})


def chained_terminals(count: int) -> Grammar:
    links = "".join(f"T{i}: T{i + 1}\n" for i in range(count))
    return Grammar("grammar", f'start: T0\n{links}T{count}: "a"\n')


@pytest.fixture(scope="module")
def grammars(smol_path: Path) -> Iterator[Grammars]:
    with Model(smol_path, vocabulary_only=True) as model:
        yield Grammars(model.vocabulary)


@needs_limits
def test_hostile_forms_are_refused_and_the_process_lives(smol_path: Path) -> None:
    deep = "The {} is too deep to be compiled."
    nested = "The JSON schema is nested {} levels deep; the limit is 100."
    forms = {
        chained_rules(20_000): "The grammar has",
        chained_references(3_000): deep.format("JSON schema"),
        chained_references(9_000): "The JSON schema has",
        chained_terminals(10_000): deep.format("grammar"),
        Grammar("json_schema", '{"items":' * 974 + "{}" + "}" * 974): nested.format(975),
        Grammar("json_schema", '{"items":' * 9_000 + "{}" + "}" * 9_000): nested.format(9_001),
        Grammar("grammar", "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000): "The grammar is invalid: ",
        Grammar("regex", "(" * 3_000 + "a" + ")*" * 3_000): "The regular expression is invalid: ",
        schema({"type": "integer", "multipleOf": 999_983}): "The JSON schema takes more than ",
        schema({"allOf": [{"multipleOf": 9_973}, {"multipleOf": 9_967}]}): "The JSON schema takes more than ",
        schema({"enum": ["word" * 10 + str(i) for i in range(20_000)]}): "The JSON schema has ",
    }
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, str(smol_path)],
        input=json.dumps([(form.kind, form.text) for form in forms]),
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, lines
    for line, expected in zip(lines, forms.values(), strict=True):
        assert line.startswith(f"GrammarError {expected}"), line


def test_large_forms_that_can_be_compiled_are(grammars: Grammars) -> None:
    forms = [
        schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}),
        chained_rules(150),
        chained_references(150),
        schema({"type": "integer", "multipleOf": 2000}),
    ]
    for form in forms:
        assert not is_plain(form)
        assert not grammars.matcher(form).get_error()


def test_ordinary_forms_are_compiled_without_a_trial(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_child(*_args: object, **_options: object) -> None:
        pytest.fail("a child process was started")

    monkeypatch.setattr("edgespec.text.grammar.matchers.attempt_in_child", no_child)
    forms = [
        schema(
            {"type": "object", "properties": {"age": {"type": "integer", "multipleOf": 5, "maximum": 150}}}
        ),
        schema({"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}),
        schema({"type": "array", "items": {"type": "string", "maxLength": 100_000}, "maxItems": 10_000}),
        Grammar("grammar", 'root ::= item{1,20}\nitem ::= "- " [a-z]+ "\\n"\n'),
        Grammar("regex", r"\d{3}-\d{4}"),
    ]
    for form in forms:
        assert not grammars.matcher(form).get_error()


# The largest of their kind that are taken for plain. They are compiled on a stack of a quarter of a thread's.
PLAIN = {
    "alternatives": Grammar("regex", "|".join("abcdefgh" for _ in range(110))),
    "sequence": Grammar("regex", "a?" * 500),
    "nested": Grammar("regex", "(" * 90 + "a" + ")?" * 90),
    "rules": chained_rules(98),
    "terminals": chained_terminals(98),
    "references": chained_references(98),
    "terms": Grammar("grammar", "root ::= " + '"a"? ' * 800),
    "choices": Grammar("grammar", "root ::= " + " | ".join('"a" "b"' for _ in range(400))),
    "terminal": Grammar("grammar", "start: A\nA: " + '"a"? ' * 800),
    "expression": Grammar("grammar", "start: A\nA: /" + "a?" * 2000 + "/"),
    "depth": Grammar("json_schema", '{"type":"array","items":' * 99 + "{}" + "}" * 99),
    "all": schema({"allOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(250)]}),
    "any": schema({"anyOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(250)]}),
    "patterns": schema({"type": "string", "pattern": "(a|b)*a" + "(a|b)" * 150}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_taken_for_plain_is_far_from_the_limits(name: str) -> None:
    from edgespec.processes.trial import attempt_in_child
    from edgespec.text.grammar.matchers import _LIMITS, MAX_COMPILED_BYTES

    form = PLAIN[name]
    check(form)
    assert is_plain(form)
    request = {"kind": form.kind, "text": form.text, "limits": _LIMITS}
    verdict = attempt_in_child(
        "edgespec.text.grammar.trial",
        request,
        subject="The grammar",
        cpu_s=20,
        memory_bytes=MAX_COMPILED_BYTES,
        stack_bytes=2 << 20,
    )
    assert verdict.why is None, verdict


@needs_limits
def test_a_child_that_dies_is_a_verdict() -> None:
    from edgespec.processes.trial import attempt_in_child

    for form, why in ((chained_terminals(10_000), "crash"), (schema({"multipleOf": 99_999_989}), "time")):
        request = {"kind": form.kind, "text": form.text, "limits": {}}
        verdict = attempt_in_child("edgespec.text.grammar.trial", request, subject="It", cpu_s=2)
        assert (verdict.answer, verdict.why) == (None, why)


def test_compiled_forms_are_kept_by_their_bytes(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [schema({"const": number}) for number in range(_KEPT + 2)]
    for form in forms:
        grammars.matcher(form)
    assert list(grammars._compiled) == forms[2:]
    heavy = schema({"const": "heavy"})
    compiled = grammars._compile(heavy)
    monkeypatch.setattr(grammars, "_compile", lambda form: _Compiled(compiled.matcher, _KEPT_BYTES))
    grammars.matcher(heavy)
    assert list(grammars._compiled) == [heavy]
    grammars.forget(heavy)
    assert not grammars._compiled


def test_a_line_of_a_batch_with_a_deep_schema_is_that_lines_error() -> None:
    deep = '{"prompt": "Hi", "json_schema": ' + '{"items":' * 974 + "{}" + "}" * 974 + "}"
    jobs = list(read_jobs([deep.encode(), b'{"prompt": "Hi"}']))
    assert not jobs[1].error
    if not jobs[0].error:  # how deep Python writes JSON depends on the stack that is left
        with pytest.raises(GrammarError, match="nested 975 levels deep"):
            check(jobs[0].config.grammar)


def test_a_schema_within_a_grammar_is_not_taken_to_be_plain() -> None:
    assert is_plain(Grammar("grammar", 'start: "a" /[0-9]/'))
    assert not is_plain(Grammar("grammar", 'start: %json {"multipleOf": 1000003}'))
    assert is_plain(Grammar("grammar", 'start: "a" %json {"properties": {"a{9999999}": {}}} "b"'))
    assert not is_plain(
        Grammar("grammar", 'start: %json {"pattern": "a{9999}"} %json {"x-guidance": {"lazy": 1}}')
    )
    assert not is_plain(Grammar("grammar", 'start: %json {"type": '))
