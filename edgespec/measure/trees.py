"""The yield of trees and the cost of drafts, measured along answers that the target writes first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.base.progress import Progress
from edgespec.costs.yields import TreeYields
from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import PassRecord
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import method_for
from edgespec.speculation.policies import tree_policy
from edgespec.speculation.sizing.yield_meter import YieldMeter

PROMPTS = (
    "Write a Python function that counts the words in a text, and explain it briefly.",
    "What should somebody know who visits the mountains for the first time?",
    "Summarise in two sentences: Rivers carve valleys over thousands of years. Where the rock is soft the "
    "valley grows wide, and where it is hard the river falls over steps. At its end it leaves sand and mud.",
    "Anna has 12 apples, gives a third of them to Ben and eats two. How many are left? Think step by step.",
    "Translate into German: The library is closed on Monday, but the garden behind it is open all week.",
)

_DEEPEST = 16  # depth of the trees that are measured
_TEXT_TOKENS, _LEAST_TOKENS = 64, 32  # most and least tokens of an answer that trees are measured along


@dataclass(frozen=True)
class TargetAnswer:
    """The tokens of a prompt and of the target's answer."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class TargetAnswers:
    """Answers that the target wrote, and the passes that it took."""

    samples: list[TargetAnswer]
    accept_s: float  # seconds of a round outside draft and pass, the median
    # the passes of all answers, except the first of each, whose draft also reads the prompt
    passes: list[PassRecord]
    yields: TreeYields | None = None  # what their trees yielded; None if there were none


def write_answers(
    engine: Engine, config: GenerationConfig, seconds: float, on_progress: Progress
) -> TargetAnswers:
    """Begin the target's answers to the built-in prompts in turn, until the time is up."""
    begun = time.perf_counter()
    config = config.with_(max_tokens=_TEXT_TOKENS)
    samples: list[TargetAnswer] = []
    passes: list[PassRecord] = []
    meter = YieldMeter()
    for prompt in PROMPTS:
        tokens: list[int] = []
        records: list[PassRecord] = []
        chunks = engine.stream(prompt, config)
        try:
            for chunk in chunks:
                tokens += chunk.tokens
                if chunk.record is not None:
                    records.append(chunk.record)
                    _count(engine, chunk.record, meter)
                now = time.perf_counter()
                on_progress("Letting the target write texts", min((now - begun) / seconds, 1.0))
                if now > begun + seconds and len(tokens) >= _LEAST_TOKENS:
                    break
        finally:
            chunks.close()
        samples.append(TargetAnswer(engine.encoder.encode(prompt), tokens))
        passes += records[1:]
        if time.perf_counter() > begun + seconds:
            break
    accept_s = statistics.median([r.accept_s for r in passes] or [0.0])
    return TargetAnswers(samples, accept_s, passes, meter.yields())


def _count(engine: Engine, record: PassRecord, meter: YieldMeter) -> None:
    """Count what became of the tree of a pass, if it had one."""
    if record.nodes > 1 and engine.speculator.last_round is not None:
        tree, accepted = engine.speculator.last_round
        meter.add(tree, accepted.path, accepted.bonus, record.draft_steps, record.draft_rows)


@dataclass
class TreeStatistics:
    """Statistics of trees that were grown along known answers."""

    yields: TreeYields | None = None  # what they yield; None if every answer was too short
    # totals over all drafts: seconds, decodes, and rows decoded
    draft_s: float = 0.0
    steps: int = 0
    rows: int = 0


def measure_trees(
    engine: Engine,
    config: GenerationConfig,
    samples: Sequence[TargetAnswer],
    budget: int,
    seconds: float,
    on_progress: Progress,
) -> TreeStatistics:
    """Grow trees of a size along answers that the target wrote, as its passes would have done.

    The target writes the same text whatever drafts it, so its choices are known and only the drafter runs.
    Every answer is walked through from its first token, then from its second, and so on, until the time is
    up. Walks through one answer are alike, so their passes together have the weight of one walk.
    """
    meter, found = YieldMeter(), TreeStatistics()
    begun = time.perf_counter()
    limits = engine.speculator.limits
    limits = replace(limits, budget=min(budget, limits.budget), depth=min(limits.depth, _DEEPEST))
    longest = max((len(sample.answer) for sample in samples), default=0)
    for start in range(longest):
        for sample in samples:
            if time.perf_counter() > begun + seconds and meter.passes:
                break
            _walk(engine, config, sample, start, limits, meter, found)
            done = (time.perf_counter() - begun) / seconds
            on_progress(f"Measuring trees of {limits.budget} nodes", min(done, 1.0))
    if (yields := meter.yields()) is not None:
        once = sum(len(sample.answer) for sample in samples) / yields.at(limits.budget)
        found.yields = replace(yields, passes=min(yields.passes, max(round(once), 1)))
    return found


def _walk(
    engine: Engine,
    config: GenerationConfig,
    sample: TargetAnswer,
    start: int,
    limits: TreeLimits,
    meter: YieldMeter,
    found: TreeStatistics,
) -> None:
    """Walk through an answer, and discard what is learned on the way, since it will come again."""
    n_vocab = engine.target.model.vocabulary.n_tokens
    policy = tree_policy(engine.speculator.policy.name)
    method = method_for(config, n_vocab, config.seed or 0, engine.drafter, policy=policy)
    tokens = sample.prompt + sample.answer
    place = len(sample.prompt) + start
    first = True
    # If the text ended before a path could, the length of that path would not be known.
    while place + limits.depth + 1 < len(tokens):
        begun = time.perf_counter()
        tree = method.drafting.draft(engine.drafter, tokens[: place + 1], limits).tree
        taken = time.perf_counter() - begun
        path = [0]
        while (child := tree.child(path[-1], tokens[place + len(path)])) is not None:
            path.append(child)
        meter.add(tree, path, tokens[place + len(path)], engine.drafter.steps, engine.drafter.rows)
        if not first:  # the first draft also reads the text up to here
            found.draft_s += taken
            found.steps += engine.drafter.steps
            found.rows += engine.drafter.rows
        first = False
        place += len(path)
