"""Answers of tiny targets that heads draft for: the questions, and what must hold whatever head drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig

PROMPT = [40 + 7 * i % 101 for i in range(70)]
GREEDY = GenerationConfig(max_tokens=32)
SAMPLED = GREEDY.with_(temperature=0.7, seed=5)

UNDRAFTED: dict[str, Any] = {"draft": "none", "drafter": None, "tree_budget": None}
"""Changes the options of a drafting engine to those of the target alone."""

Texts = Mapping[GenerationConfig, list[int]]
"""The text of the target alone for each configuration, longer than an answer."""


def check_own_text(engine: Engine, texts: Texts, config: GenerationConfig) -> None:
    """A question asked twice, another one, and one that continues the first have the target's own answers."""
    for _ in range(2):
        answer = engine.generate(PROMPT, config)
        assert answer.tokens == texts[config][: len(answer.tokens)]
        assert answer.tokens_per_pass > 1.3
    engine.generate([*PROMPT[:40], 5, 6, 7], config)
    longer = engine.generate([*PROMPT, *texts[config][:20]], config)
    assert longer.tokens == texts[config][20 : 20 + len(longer.tokens)]
    assert longer.tokens_per_pass > 1.3


def check_cancelled_answer(engine: Engine, texts: Texts) -> None:
    """An answer that was cancelled is drafted for again from where it ended."""
    engine.target.rewind(0)
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    engine.cancel()
    (*_, last) = stream
    assert last.generation is not None
    said = last.generation.tokens
    rest = engine.generate([*PROMPT, *said], GREEDY)
    assert rest.tokens == texts[GREEDY][len(said) : len(said) + 32]
    assert rest.tokens_per_pass > 1.3
