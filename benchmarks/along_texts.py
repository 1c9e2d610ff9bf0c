"""Tokens a pass of a drafter along its target's own answers to questions of many categories.

A target that is greedy, or samples with shared noise, writes the same text whatever drafts for it. So its
answers are written once, and every drafter grows its trees along them (benchmarks.replay). These are counts:
what else the machine does changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import edgespec
from benchmarks.replay import Contexts, Walk, replay
from benchmarks.trees import Question, limits_of, questions_of
from edgespec.engine.requests import Request
from edgespec.generation.config import GenerationConfig
from edgespec.llama.runtime.model import Model
from edgespec.machine.probe import usable_cores
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.policies import tree_policy

_LONGEST_PROMPT = 700  # tokens
_CELLS = 2048


@dataclass(frozen=True)
class Written:
    """A target's answer to a question."""

    question: Question
    temperature: float
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Count:
    """Tokens that a text has, and the passes that they took."""

    tokens: int = 0
    passes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.tokens + other.tokens, self.passes + other.passes)

    @property
    def tokens_a_pass(self) -> float:
        """The tokens that a pass yields."""
        return self.tokens / self.passes


@dataclass(frozen=True)
class Yield:
    """A drafter's results with trees of one size at one temperature, over all questions and by category."""

    temperature: float
    nodes: int
    categories: dict[str, Count]

    @property
    def overall(self) -> Count:
        """Over all questions."""
        return sum(self.categories.values(), Count())


def write_answers(
    target: Path, workload: Path, count: int, temperatures: Sequence[float], tokens: int
) -> list[Written]:
    """The target's answers to the first questions of a workload, in turn over their categories.

    Questions that are too long are passed over, and so are answers of nothing but an end.
    """
    asked: list[Written] = []
    with edgespec.load(target, draft="none", context=4 * _CELLS, exact=False) as engine:
        for question in questions_of(workload):
            prompt = engine.encoder.encode(question.prompt)
            if len(prompt) <= _LONGEST_PROMPT and len(asked) < count * len(temperatures):
                asked += [Written(question, temperature, prompt, []) for temperature in temperatures]
        requests = [
            Request(
                one.prompt,
                GenerationConfig(temperature=one.temperature, seed=one.question.number, max_tokens=tokens),
                key=one,
            )
            for one in asked
        ]
        with closing(engine.stream_many(requests)) as events:
            for event in events:
                if event.chunk is not None and event.chunk.generation is not None:
                    event.request.key.answer.extend(event.chunk.generation.tokens)
    return [one for one in asked if one.answer]


def yields_along(
    drafter: Path,
    texts: Sequence[Written],
    budgets: Sequence[int],
    on_text: Callable[[int], None] = lambda number: None,
) -> list[Yield]:
    """Lead a drafter's trees along texts. What it learns of its target is kept from text to text."""
    found: dict[tuple[float, int], dict[str, Count]] = defaultdict(lambda: defaultdict(Count))
    policies = {(text.temperature, budget): tree_policy() for text in texts for budget in budgets}
    with Model(drafter) as model:
        contexts = Contexts(model, n_cells=2 * _CELLS, n_threads=usable_cores())
        for number, text in enumerate(texts):
            on_text(number)
            config = GenerationConfig(temperature=text.temperature)
            seed = text.question.number
            contexts.start(text.prompt, text.answer, config, seed)
            walks = {}
            for budget in budgets:
                policy = policies[text.temperature, budget]
                noise = GumbelNoise(seed, contexts.n_vocab)
                walks[budget] = Walk(
                    contexts,
                    len(text.prompt),
                    limits_of(policy, budget, config),
                    ranking=policy.ranking(config, noise),
                )
            replay(contexts, list(walks.values()))
            for budget, walk in walks.items():
                counts = found[text.temperature, budget]
                counts[text.question.category] += Count(walk.run.tokens, walk.run.passes)
        contexts.close()
    return [Yield(*key, dict(counts)) for key, counts in found.items()]


def tables(yields: dict[str, list[Yield]], nodes: int) -> list[str]:
    """Tables in Markdown: by temperature and size of trees, and by category with trees of one size."""
    first = next(iter(yields.values()))
    columns = [(one.temperature, one.nodes) for one in first]
    lines = [_row("drafter", *(f"{nodes} nodes at {t:g}" for t, nodes in columns)), _rule(len(columns))]
    for name, found in yields.items():
        lines.append(_row(name, *(f"{one.overall.tokens_a_pass:.2f}" for one in found)))
    for temperature in dict.fromkeys(one.temperature for one in first):
        of = {
            name: next(one for one in found if (one.temperature, one.nodes) == (temperature, nodes))
            for name, found in yields.items()
        }
        categories = sorted(Counter(category for one in of.values() for category in one.categories))
        lines += ["", f"By category, {nodes} nodes at temperature {temperature:g}:", ""]
        lines += [_row("category", *of), _rule(len(of))]
        for category in categories:
            lines.append(
                _row(category, *(f"{one.categories[category].tokens_a_pass:.2f}" for one in of.values()))
            )
    return lines


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|---" * (columns + 1) + "|"
