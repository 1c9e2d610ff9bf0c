"""Decisions by measured costs are forced both ways, and change no text.

One matrix: each kind of answer, on each side. Both sides are real only with real passes: here of a pair of
small models, whose target is streamed, so that its passes wait for the disk.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import Engine, GenerationConfig, Session
from edgespec.drafters.model import ModelDrafter
from edgespec.engine.requests import Request
from edgespec.engine.sessions.file import SessionFile
from edgespec.generation.config import Grammar
from edgespec.generation.decisions import Decisions
from edgespec.speculation.policies import tree_policy
from tests.interrupting import Intruder
from tests.least_memory import load_in_least_memory
from tests.slow_disk import slow_down
from tests.templated import speaking
from tests.tiers import slow_except
from tests.unit import templates

ALL = Decisions(drafting=True, observing=True)
NONE = Decisions(drafting=False, observing=False)
SIDES = {
    "all": ALL,
    "trees": Decisions(True, observing=False),
    "none": NONE,
}

# A model with few layers talks nonsense; what it has read again and again is what sources are sure of.
ITEM = '{"name": "Ann", "colours": ["red", "green"]}'
QUOTED = f"Say it again: {' '.join([ITEM] * 4)}"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "colours"],
    "additionalProperties": False,
}
FORM = GenerationConfig(max_tokens=40, grammar=Grammar("json_schema", json.dumps(SCHEMA)))
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}}
    for name in ("paint", "draw")
)
# Only one text fits, which has been read before.
QUOTING = FORM.with_(grammar=Grammar("regex", "(" + re.sub(r"([][{}])", r"\\\1", ITEM) + r" ){3}"))
PLAIN = GenerationConfig(max_tokens=24)


@pytest.fixture(scope="module")
def engine(short_path: Path) -> Iterator[Engine]:
    """Streamed from a disk that is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        slow_down(patch)
        with load_in_least_memory(
            short_path, draft=short_path, exact=True, context=1024, threads=1, learn=False
        ) as engine:
            engine.speculator.limits = replace(
                engine.speculator.limits, budget=12, depth=5, width=3, branching=3
            )
            engine.set_tree_budget(None)
            yield engine


@pytest.fixture(scope="module")
def plain(short_path: Path) -> Iterator[Engine]:
    with edgespec.load(short_path, draft="none", exact=True, context=1024, threads=1) as engine:
        yield engine


def forms(engine: Engine, _folder: Path) -> Any:
    configs = [FORM, FORM.with_(temperature=0.9, seed=4), QUOTING]
    return [engine.generate(QUOTED, config, raw=True).tokens for config in configs]


def tools(engine: Engine, _folder: Path) -> Any:
    asked: Any = [{"role": "user", "content": QUOTED}]
    found = []
    with speaking(engine, templates.QWEN):
        for choice, seed in (("required", 1), ("draw", 2), ("auto", 3)):
            config = FORM.with_(grammar=None, tools=TOOLS, tool_choice=choice, temperature=0.7, seed=seed)
            answer = engine.generate(asked, config)
            found.append((answer.tokens, answer.tool_calls, answer.finish_reason))
    return found


def thinking(engine: Engine, _folder: Path) -> Any:
    with speaking(engine, templates.OPENED):
        answers = [
            engine.generate(QUOTED, config.with_(think="8"))
            for config in (PLAIN, FORM, PLAIN.with_(tools=TOOLS, tool_choice="required"))
        ]
    return [(answer.tokens, answer.reasoning, answer.text, answer.tool_calls) for answer in answers]


def sampling(engine: Engine, _folder: Path) -> Any:
    configs = [
        PLAIN.with_(temperature=0.8, seed=1),
        PLAIN.with_(temperature=1.2, seed=2, top_k=20, top_p=0.9, min_p=0.02),
        PLAIN.with_(logprobs=3, stop=("zzz",)),
    ]
    answers = [engine.generate(QUOTED, config, raw=True) for config in configs]
    return [(answer.tokens, answer.logprobs) for answer in answers]


def sessions(engine: Engine, folder: Path) -> Any:
    said = []
    for question in (QUOTED, "And again?", "Once more."):
        session = Session(engine)
        session.resume(SessionFile(str(folder / "talk.json")))
        list(session.ask(question, PLAIN))
        said.append(session.messages[-1]["content"])
        session.close()
        engine.target.rewind(0)
    return said


def many_texts(engine: Engine, _folder: Path) -> Any:
    configs = [FORM, PLAIN, PLAIN.with_(temperature=0.8, seed=5), FORM.with_(temperature=0.9, seed=6)]
    requests = [Request(QUOTED, config, raw=True, key=n) for n, config in enumerate(configs)]
    found = {
        event.request.key: event.chunk.generation.tokens
        for event in engine.stream_many(iter(requests))
        if event.chunk is not None and event.chunk.generation is not None
    }
    return [found[n] for n in range(len(configs))]


def interruptions(engine: Engine, _folder: Path) -> Any:
    """An answer that was cancelled, or interrupted at some line, leaves no trace in later ones."""
    found = []
    for at in (400, 4000, 12_000):
        Intruder(at).run(lambda: engine.generate(QUOTED, FORM, raw=True))
        found.append(engine.generate(QUOTED, FORM, raw=True).tokens)
    for count, _ in enumerate(engine.stream(QUOTED, FORM, raw=True)):
        if count == 2:
            engine.cancel()
    return [*found, engine.generate(QUOTED, FORM, raw=True).tokens]


KINDS = (forms, tools, thinking, sampling, sessions, many_texts, interruptions)
_expected: dict[str, Any] = {}


# Each side, and each kind of answer once.
QUICK = [(forms, "trees"), (tools, "all"), (many_texts, "all"), (sessions, "none")]


@pytest.mark.parametrize(
    ("kind", "side"),
    slow_except(QUICK, itertools.product(KINDS, SIDES)),
    ids=lambda part: getattr(part, "__name__", part),
)
def test_no_decision_changes_a_text(
    kind: Callable[[Engine, Path], Any], side: str, engine: Engine, plain: Engine, tmp_path: Path
) -> None:
    name = kind.__name__
    if name not in _expected:
        _expected[name] = kind(plain, tmp_path / "plain")
    engine.speculator.decisions = SIDES[side]
    engine.forget_texts()
    engine.speculator.policy = tree_policy()
    engine.target.rewind(0)
    assert kind(engine, tmp_path / "forced") == _expected[name]


@pytest.mark.parametrize("side", ["all", "trees", "none"])
def test_what_is_forced_is_done(side: str, engine: Engine) -> None:
    engine.speculator.decisions = forced = SIDES[side]
    engine.forget_texts()
    assert isinstance(engine.drafter, ModelDrafter)
    engine.target.rewind(0)
    passes = engine.generate(QUOTED, QUOTING, raw=True).passes
    assert (max(record.nodes for record in passes) > 1) is forced.drafting
    looks = sum(record.observe_s > 0 for record in passes)
    assert (looks > 0) is (forced.observing or forced.drafting)
