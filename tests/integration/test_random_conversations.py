"""Conversations that branch at random: whatever was asked before, answers are those of an empty cache."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.engine.engine import Engine
from edgespec.generation.result import Generation
from edgespec.llama.projector import NoImageLibrary, load_library
from tests.least_memory import load_in_least_memory
from tests.tiers import examples, slow_except
from tests.tiny_images import png, write_seeing

Messages = list[dict[str, Any]]
Reference = Callable[[Messages, int], list[int]]

pytestmark = pytest.mark.usefixtures("images_read_once")

FAMILIES = {  # the projector's family, and the architecture where it is another one
    "llama": ("idefics3", ""),
    "gemma3": ("gemma3", ""),
    "qwen2vl": ("qwen2vl", ""),
    "lfm2": ("idefics3", "lfm2"),
    "qwen3vl": ("qwen3vl", ""),
    "qwen35": ("qwen3vl", "qwen35"),
}
WAYS = ("none", "lookup", "itself", "shared", "reopened", "streamed")
CONTEXT, LONGEST = 640, 520  # tokens: what is kept is soon moved, set aside and forgotten
# Each way and each family, and models with a running state or sliding windows where much is taken back.
QUICK = [
    ("llama", "streamed", 0),
    *(("gemma3", way, 0) for way in ("lookup", "shared")),
    ("qwen2vl", "none", 0),
    ("lfm2", "reopened", 0),
    ("qwen3vl", "itself", 0),
    ("qwen35", "shared", 0),
]
STEPS = examples(10)
PICTURES = [png(seed=seed) for seed in range(3)]
WORDS = ["one", "two", "three", "a", "b", "x", "y", "z", "and", "of", "the", "word"]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, smol_path: Path, family: str) -> Path:
    try:
        load_library()
    except NoImageLibrary as missing:
        pytest.skip(f"llama.cpp was compiled without images: {missing}")
    projector, hybrid = FAMILIES[family]
    folder = tmp_path_factory.mktemp("conversations")
    return write_seeing(folder, projector, smol_path, damped=0.3, hybrid=hybrid)


@pytest.fixture(scope="module")
def reference(target: Path) -> Iterator[Reference]:
    """Answers from an empty cache, without drafts."""
    known: dict[tuple[str, int], list[int]] = {}
    with edgespec.load(target, draft="none", context=CONTEXT, threads=1, exact=True) as engine:

        def answer(messages: Messages, tokens: int) -> list[int]:
            key = (repr(messages), tokens)
            if key not in known:
                engine.target.cache.clear()
                engine.target.rewind(0)
                known[key] = list(asked(engine, messages, tokens).tokens)
            return known[key]

        yield answer


def asked(engine: Engine, messages: Messages, tokens: int) -> Generation:
    return engine.generate(messages, edgespec.GenerationConfig(max_tokens=tokens))


class Wanderer:
    """Asks new questions at random places of earlier conversations."""

    def __init__(self, engine: Engine, reference: Reference, seed: int) -> None:
        self.engine = engine
        self.reference = reference
        self.random = random.Random(seed)
        self.conversations: list[Messages] = [[]]

    def question(self) -> Messages:
        """A conversation that ends with a question, and fits into the context."""
        earlier = self.random.choice(self.conversations)
        kept = 2 * self.random.randint(0, len(earlier) // 2)
        text = " ".join(self.random.choices(WORDS, k=self.random.choice([2, 9, 40, 120])))
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if self.random.random() < 0.3:
            parts.insert(0, {"type": "image", "data": self.random.choice(PICTURES)})
        messages: Messages = [*earlier[:kept], {"role": "user", "content": parts}]
        length = len(self.engine.encoder.encode(messages))
        return messages if length < LONGEST else messages[-1:]

    def check(self, messages: Messages, answer: Generation, limit: int) -> None:
        assert list(answer.tokens) == self.reference(messages, limit), messages
        self.conversations.append([*messages, {"role": "assistant", "content": answer.text}])

    def ask(self) -> None:
        limit = self.random.choice([1, 8, 40])
        messages = self.question()
        if self.random.random() < 0.2:  # someone stops reading
            stream = self.engine.stream(messages, edgespec.GenerationConfig(max_tokens=limit))
            next(iter(stream))
            stream.close()
        self.check(messages, asked(self.engine, messages, limit), limit)

    def ask_several(self) -> None:
        limit = self.random.choice([1, 8, 40])
        several = [self.question() for _ in range(self.random.randint(2, 4))]
        config = edgespec.GenerationConfig(max_tokens=limit)
        answers = self.engine.generate_many(several, config)
        for messages, answer in zip(several, answers, strict=True):
            self.check(messages, answer, limit)


@pytest.mark.parametrize(
    ("family", "way", "seed"),
    slow_except(QUICK, itertools.product(FAMILIES, WAYS, range(6))),
    indirect=["family"],
    scope="module",
)
def test_answers_are_those_of_an_empty_cache(target: Path, reference: Reference, way: str, seed: int) -> None:
    draft = {"none": "none", "itself": str(target)}.get(way, "lookup")
    options: dict[str, Any] = {"shared": {"parallel": 4}, "reopened": {"prompt_cache": True}}.get(way, {})
    options |= {"draft": draft, "context": CONTEXT, "threads": 1, "exact": True}
    open_engine = partial(load_in_least_memory if way == "streamed" else edgespec.load, target, **options)
    wanderer = Wanderer(open_engine(), reference, seed)
    try:
        for _ in range(STEPS):
            wanderer.engine.set_tree_budget(wanderer.random.choice([None, 1, 1, 8]))
            if way == "shared":
                wanderer.ask_several()
            else:
                wanderer.ask()
            if way == "reopened" and wanderer.random.random() < 0.5:  # what it has read is on disk
                wanderer.engine.close()
                wanderer.engine = open_engine()
    finally:
        wanderer.engine.close()
