"""Texts that share passes of a real model: each is, bit for bit, what it is alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import openai
import pytest

import edgespec
from edgespec import GenerationConfig
from edgespec.engine.engine import Engine
from edgespec.engine.requests import Request
from edgespec.generation.config import Grammar
from tests.integration.test_serve import MODEL, server

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SYSTEM = "You are a keeper of lists. Answer in plain words, and never in more than one sentence."


def requests(count: int, seed: int = 0) -> list[Request]:
    """Prompts of many lengths and settings; some begin alike, and one in five is asked twice."""
    chance = random.Random(seed)
    made: list[Request] = []
    for number in range(count):
        if made and chance.random() < 0.2:
            prompt: Any = made[-1].prompt
        else:
            question = "Name a thing. " * chance.choice([1, 2, 9]) + f"It must fit the number {number}."
            prompt = [{"role": "user", "content": question}]
            if chance.random() < 0.5:
                prompt.insert(0, {"role": "system", "content": SYSTEM})
        config = GenerationConfig(
            max_tokens=chance.choice([1, 5, 9, 16]),
            temperature=chance.choice([0.0, 0.8, 1.2]),
            seed=chance.randrange(100),
            repeat_penalty=chance.choice([1.0, 1.2]),
            stop=chance.choice([(), (".",), ("\n\n",)]),
            grammar=Grammar.of_schema(SCHEMA) if chance.random() < 0.15 else None,
        )
        made.append(Request(prompt, config, key=number))
    return made


def alone(engine: Engine, wanted: list[Request]) -> list[tuple[list[int], str]]:
    answers = [engine.generate(request.prompt, request.config) for request in wanted]
    return [(answer.tokens, answer.finish_reason) for answer in answers]


def together(engine: Engine, wanted: list[Request], parallel: int | None) -> list[tuple[list[int], str]]:
    answers: dict[int, tuple[list[int], str]] = {}
    for event in engine.stream_many(wanted, parallel=parallel):
        assert event.error is None
        if event.chunk is not None and event.chunk.generation is not None:
            answer = event.chunk.generation
            answers[event.request.key] = answer.tokens, answer.finish_reason
    return [answers[number] for number in range(len(wanted))]


@pytest.mark.parametrize(
    ("target", "drafter"),
    [("short_path", "short_path"), pytest.param("smol_path", "q4_drafter_path", marks=pytest.mark.slow)],
)
def test_company_changes_no_bit(target: str, drafter: str, request: pytest.FixtureRequest) -> None:
    """With room for all, and with so few cells that texts are moved, set aside and taken up again."""
    model, draft = request.getfixturevalue(target), request.getfixturevalue(drafter)
    wanted = requests(8)
    with edgespec.load(model, draft=str(draft), tree_budget=8, exact=True, context=1024) as engine:
        expected = alone(engine, wanted)
        assert together(engine, wanted, None) == expected
        assert together(engine, wanted, 3) == expected
    with edgespec.load(model, draft="none", exact=True, context=256) as engine:
        long = [
            Request(f"Count: {'one two three ' * 40}{n}", GenerationConfig(max_tokens=24)) for n in range(7)
        ]
        every = [*wanted[:4], *(Request(r.prompt, r.config, key=4 + n) for n, r in enumerate(long))]
        expected = expected[:4] + alone(engine, long)
        before = engine.target.cache.compactions
        assert together(engine, every, None) == expected
        assert engine.target.cache.compactions > before
        assert alone(engine, wanted[:2]) == expected[:2], "the engine answers single requests as before"


@pytest.mark.slow
def test_windows_of_attention_and_long_texts(gemma_path: Path) -> None:
    """Texts longer than the window, in cells that are moved."""
    story = "The keeper climbed the stairs, counted the ships and wrote their names down. " * 40
    config = GenerationConfig(max_tokens=6)
    wanted = [Request(f"{story} Chapter {n}.", config, raw=True, key=n) for n in range(2)]
    with edgespec.load(gemma_path, draft="none", exact=True, context=1024) as engine:
        assert len(engine.encoder.encode(wanted[0].prompt, raw=True)) > 512
        expected = [engine.generate(r.prompt, r.config, raw=True).tokens for r in wanted]
        different = [Request(f"{n}. {r.prompt}", config, raw=True) for n, r in enumerate(wanted[:1])]
        expected += [engine.generate(r.prompt, r.config, raw=True).tokens for r in different]
        every = [Request(r.prompt, config, raw=True, key=n) for n, r in enumerate([*wanted, *different])]
        assert [tokens for tokens, _ in together(engine, every, 4)] == expected


def test_an_interruption_in_the_middle_loses_nothing(short_path: Path) -> None:
    wanted = requests(6, seed=3)
    with edgespec.load(short_path, draft="none", exact=True, context=512) as engine:
        expected = alone(engine, wanted)
        for stop_after in (1, 4, 9):
            answers = engine.stream_many(wanted)
            for _ in range(stop_after):
                next(answers, None)
            answers.close()
            assert together(engine, wanted, None) == expected
        assert alone(engine, wanted) == expected


@pytest.mark.slow
def test_clients_that_leave_do_not_touch_the_others() -> None:
    """Twelve at once, of which three hang up in the middle."""
    leaving = 3

    def question(number: int) -> str:
        return f"Tell me a thing about the number {number}." + " Be brief." * (number % 3)

    async def ask(client: openai.AsyncOpenAI, number: int, *, leave: bool) -> str:
        create: Any = client.chat.completions.create
        stream = await create(
            model=MODEL,
            messages=[{"role": "user", "content": question(number)}],
            max_tokens=16,
            temperature=0.7 if number % 2 else 0.0,
            seed=number,
            stream=True,
        )
        said = ""
        async for piece in stream:
            said += piece.choices[0].delta.content or ""
            if leave and said:
                await stream.close()
                return ""
        return said

    async def talk(url: str) -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            single = [await ask(client, number, leave=False) for number in range(12)]
            at_once = await asyncio.gather(
                *(ask(client, number, leave=number < leaving) for number in range(12))
            )
            return single, list(at_once)

    with server("--exact", "--parallel", "6", "--queue", "16") as url:
        single, at_once = asyncio.run(talk(url))
    assert at_once[leaving:] == single[leaving:]
    assert all(single)
