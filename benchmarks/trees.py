"""Tokens a pass and draft time of every way to grow trees, at equal budgets.

    python -m benchmarks.trees run --workload spec_bench.jsonl --results trees.jsonl
    python -m benchmarks.trees report --results trees.jsonl --output docs
    python -m benchmarks.trees check --workload spec_bench.jsonl --prompts 3

`run` writes the target's texts once and leads every policy along them (see benchmarks.replay); a line is
written for each pair, temperature and prompt, prompts in turn over their categories. A run that was stopped
resumes, and one with further methods or budgets adds them. `--minutes` stops it by itself. The
whole grid is

    run --prompts 40 --budgets 8 16 32 60 128 --temperatures 0 0.6 1.0

The drafter's time is counted in steps, and priced by what a decode of so many rows costs: `run` measures that
once, and `curves` again, for when the machine had other work then.

`check` runs the engine itself, and leads the same policy along what it wrote.

The workload has Spec-Bench's format: JSON lines with question_id, category and turns, of which the first is
asked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import edgespec
from benchmarks.harness import parser_of, print_head
from benchmarks.replay import Contexts, Run, Walk, replay
from benchmarks.report_trees import report
from benchmarks.workload import dropped, dropped_four, q4_0, read_lines, smollm2
from edgespec.generation.config import GenerationConfig
from edgespec.llama.quantize import make_drafter
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.machine.probe import usable_cores
from edgespec.profiles.table_file import TableFile
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.learning.tables import TableStore
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.policies import DEFAULT, NAMES, TreePolicy, tree_policy
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.sources.recycling import RecycledSource
from edgespec.speculation.sources.text import TextSource

PAIRS = {"q4_0": q4_0, "drop-18-21": dropped, "drop-14-17-20-23": dropped_four}
# Calibrated trees with further sources, and those that sources grow alone: which sources, and whether the
# drafter is asked as well.
SOURCES: dict[str, tuple[bool, tuple[Callable[[], Proposer], ...]]] = {
    "calibrated+text": (True, (TextSource,)),
    "calibrated+recycled": (True, (RecycledSource,)),
    "calibrated+all": (True, (TextSource, RecycledSource)),
    "text": (False, (TextSource,)),
    "recycled": (False, (RecycledSource,)),
    "all": (False, (TextSource, RecycledSource)),
}
METHODS = (*NAMES, *SOURCES)
_CONTEXT = 2048
_LONGEST_PROMPT = 1024


@dataclass(frozen=True)
class Question:
    """One prompt of the workload."""

    number: int
    category: str
    prompt: str


def main() -> None:
    options = _parse()
    if options.action == "report":
        report(options.results, options.output)
    elif options.action == "check":
        check(options)
    elif options.action == "curves":
        with options.results.open("a") as results:
            for pair in options.pairs:
                _write(results, {"pair": pair, "curve": draft_curve(pair, options.threads)})
    else:
        run(options)


def run(options: argparse.Namespace) -> None:
    """Lead every policy along every text; lines that are there already are kept."""
    end = time.monotonic() + 60 * options.minutes
    texts = Texts(options.results.with_suffix(".texts.jsonl"))
    questions = questions_of(options.workload)[: options.prompts]
    done: dict[tuple[str, float, int], set[str]] = defaultdict(set)
    for line in read_lines(options.results):
        if "runs" in line:
            done[line["pair"], line["temperature"], line["question"]] |= set(line["runs"])
    drafters = {
        pair: Model(in_bf16(PAIRS[pair]()) if options.bf16 else PAIRS[pair]()) for pair in options.pairs
    }
    contexts = {
        pair: Contexts(model, n_cells=2 * _CONTEXT, n_threads=options.threads)
        for pair, model in drafters.items()
    }
    # Its texts are those of its most likely tokens, or of the noise; what it says is read as it would be.
    target = Contexts(Model(smollm2()), n_cells=2 * _CONTEXT, n_threads=options.threads)
    with options.results.open("a") as results:
        for pair in options.pairs:
            if not any("curve" in r and r["pair"] == pair for r in read_lines(options.results)):
                _write(results, {"pair": pair, "curve": draft_curve(pair, options.threads)})
        for question in questions:
            for temperature in options.temperatures:
                prompt, answer = texts.get(question, temperature, options.tokens)
                if not answer or len(prompt) > _LONGEST_PROMPT:
                    continue
                for pair in options.pairs:
                    wanted = [
                        (method, budget)
                        for budget in sorted(options.budgets, reverse=True)
                        for method in options.methods
                        if f"{method} {budget}" not in done[pair, temperature, question.number]
                    ]
                    if not wanted:
                        continue
                    if time.monotonic() > end:
                        texts.close()
                        return
                    begun = time.monotonic()
                    runs = replay_all(
                        options.results.with_suffix(".learned") / pair,
                        wanted,
                        contexts[pair],
                        target,
                        Text(question, temperature, prompt, answer),
                        whole=options.whole,
                        forget=options.forget,
                    )
                    line = {"pair": pair, "temperature": temperature, "question": question.number}
                    line |= {"category": question.category, "prompt_tokens": len(prompt)}
                    _write(results, line | {"runs": runs})
                    print(
                        f"{question.category} {question.number}, temperature {temperature}, {pair}: "
                        f"{time.monotonic() - begun:.0f} s",
                        file=sys.stderr,
                    )
    texts.close()


@dataclass(frozen=True)
class Text:
    """The target's text."""

    question: Question
    temperature: float
    prompt: list[int]
    answer: list[int]


def replay_all(
    learned: Path,
    wanted: list[tuple[str, int]],
    contexts: Contexts,
    target: Contexts,
    text: Text,
    *,
    whole: bool,
    forget: bool,
) -> dict[str, dict[str, Any]]:
    """Methods and budgets along one text. What each learned before is read, and kept afterwards."""
    config = GenerationConfig(temperature=text.temperature)
    contexts.start(text.prompt, text.answer, config, text.question.number)
    if any(method in SOURCES for method, _ in wanted):
        target.start(text.prompt, text.answer, config, text.question.number)
    walks = {}
    for method, budget in wanted:
        policy = policy_of(method, learned / f"{method} {budget}.npz")
        model, proposers = sources_of(method, budget)
        for proposer in proposers if forget else ():
            proposer.forget()
        limits = limits_of(policy, budget, config)
        walks[f"{method} {budget}"] = Walk(
            contexts,
            len(text.prompt),
            limits,
            proposers,
            target=target,
            model=model,
            whole=whole,
            ranking=policy.ranking(config, GumbelNoise(text.question.number, contexts.n_vocab)),
        )
    replay(contexts, list(walks.values()))
    for method, budget in wanted:
        policy_of(method, learned / f"{method} {budget}.npz").save()
    return {name: figures(walk.run) for name, walk in walks.items()}


def in_bf16(path: Path) -> Path:
    """A copy of a drafter with the same weights as BF16, whose products are quicker on some CPUs."""
    copy = path.with_name(f"{path.stem}-bf16.gguf")
    if not copy.exists():
        make_drafter(path, copy, quantization="bf16")
    return copy


@cache
def sources_of(method: str, budget: int) -> tuple[bool, list[Proposer]]:
    """True if a method asks the drafter; and its sources, which are kept from text to text."""
    del budget  # each has sources of its own
    model, kinds = SOURCES.get(method, (True, ()))
    return model, [kind() for kind in kinds]


@cache
def policy_of(method: str, path: Path) -> TreePolicy:
    """The policy of a method, with what is known at that path; the same one whenever it is asked for."""
    return new_policy(method, path)


def new_policy(method: str, path: Path | None = None) -> TreePolicy:
    """The policy of a method; without a path it knows nothing."""
    name = method.partition("+")[0]
    return tree_policy(name if name in NAMES else DEFAULT, TableFile(path) if path else TableStore())


def limits_of(policy: TreePolicy, budget: int, config: GenerationConfig) -> TreeLimits:
    """The settings that `edgespec.load` would allow for that budget."""
    nodes = max(budget, 64)
    limits = policy.clamp(TreeLimits(nodes, depth=nodes, width=max(8, budget // 8)))
    return replace(limits, budget=budget, expansion=policy.expansion(config))


def figures(run: Run) -> dict[str, Any]:
    """A run as JSON; rows of draft steps as counts."""
    rows, counts = np.unique(run.step_rows, return_counts=True)
    return {
        "tokens": run.tokens,
        "passes": run.passes,
        "nodes": run.nodes,
        "grow_s": round(run.grow_s, 4),
        "steps": {str(row): count for row, count in zip(rows.tolist(), counts.tolist(), strict=True)},
    }


class Texts:
    """The target's texts by prompt and temperature, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = {(r["question"], r["temperature"], r["most"]): r for r in read_lines(path)}
        self._engine: edgespec.Engine | None = None

    def get(self, question: Question, temperature: float, tokens: int) -> tuple[list[int], list[int]]:
        """Tokens of the prompt and of the answer, which is empty for prompts that are too long."""
        key = (question.number, temperature, tokens)
        if key not in self._known:
            self._engine = self._engine or edgespec.load(
                smollm2(), draft="none", exact=False, context=_CONTEXT, threads=1
            )
            prompt = self._engine.encoder.encode(question.prompt)
            answer: list[int] = []
            if len(prompt) <= _LONGEST_PROMPT:
                config = GenerationConfig(temperature=temperature, seed=question.number, max_tokens=tokens)
                answer = self._engine.generate(prompt, config).tokens
            self._known[key] = {"prompt": prompt, "answer": answer}
            line = {"question": question.number, "temperature": temperature, "most": tokens}
            with self._path.open("a") as file:
                _write(file, line | self._known[key])
        return self._known[key]["prompt"], self._known[key]["answer"]

    def close(self) -> None:
        """Free the target."""
        if self._engine is not None:
            self._engine.close()


def draft_curve(pair: str, threads: int, rounds: int = 5) -> dict[str, float]:
    """Seconds of a decode by rows, each behind 256 tokens of text: medians, row counts alternating."""
    model = Model(PAIRS[pair]())
    context = Context(model, n_cells=1024, n_rows=512, n_outputs=64, n_sequences=2, n_threads=threads)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocabulary.n_tokens, 512).astype(np.int32)
    context.decode(TokenBatch.run(tokens[:256], 0, 1))
    sizes = (1, 2, 4, 8, 16, 32, 64)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            begun = time.perf_counter()
            context.decode(TokenBatch.run(tokens[256 : 256 + size], 256, 1, "all"))
            context.logits()
            seconds[size].append(time.perf_counter() - begun)
            context.remove(0, 256)
    context.close()
    model.close()
    return {str(size): statistics.median(times) for size, times in seconds.items()}


def check(options: argparse.Namespace) -> None:
    """The engine itself against the replay: passes and draft time on a few prompts."""
    questions = questions_of(options.workload)[: options.prompts]
    pair, budget = options.pairs[0], options.budgets[0]
    model = Model(in_bf16(PAIRS[pair]()) if options.bf16 else PAIRS[pair]())
    contexts = Contexts(model, n_cells=2 * _CONTEXT, n_threads=options.threads)
    print_head("method", "temperature", "tokens", "passes, run", "passes, replayed", "draft s a pass")
    for method in options.methods:
        replayed = new_policy(method)
        with edgespec.load(
            smollm2(),
            draft=PAIRS[pair](),
            drafter="model" if SOURCES.get(method, (True, ()))[0] else "lookup",
            tree=method.partition("+")[0] if method in NAMES else DEFAULT,
            tree_budget=budget,
            exact=False,
            context=_CONTEXT,
            threads=options.threads,
        ) as engine:
            engine.speculator.policy = new_policy(method)  # nothing learned before
            for question in questions:
                prompt = engine.encoder.encode(question.prompt)
                for temperature in options.temperatures:
                    config = GenerationConfig(
                        temperature=temperature, seed=question.number, max_tokens=options.tokens
                    )
                    real = engine.generate(prompt, config)
                    # The text that was written in this run: at near-ties it depends on the rows of passes.
                    contexts.start(prompt, real.tokens, config, question.number)
                    known = Walk(contexts, len(prompt), limits_of(replayed, budget, config))
                    replay(contexts, [known])
                    print(
                        f"| {method} | {temperature:g} | {len(real.tokens)} | {len(real.passes)} "
                        f"| {known.run.passes} | {real.timings.draft_s / len(real.passes):.4f} |",
                        flush=True,
                    )


def questions_of(path: Path) -> list[Question]:
    """The workload, its categories taking turns."""
    by_category: dict[str, list[Question]] = {}
    for line in read_lines(path):
        question = Question(int(line["question_id"]), str(line["category"]), str(line["turns"][0]))
        by_category.setdefault(question.category, []).append(question)
    most = max((len(questions) for questions in by_category.values()), default=0)
    return [q[turn] for turn in range(most) for q in by_category.values() if turn < len(q)]


def _write(file: Any, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("action", choices=("run", "curves", "report", "check"))
    parser.add_argument("--workload", type=Path, help="questions, as JSON lines in Spec-Bench's format")
    parser.add_argument("--results", type=Path, default=Path("trees.jsonl"))
    parser.add_argument("--output", type=Path, default=Path("docs"), help="folder of the table and the plot")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32, 60])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument(
        "--accepted-only",
        dest="whole",
        action="store_false",
        help="sources see what the target says after accepted nodes alone",
    )
    parser.add_argument(
        "--forget", action="store_true", help="sources forget each text and its passes before the next"
    )
    parser.add_argument("--bf16", action="store_true", help="replay with copies of the drafters in BF16")
    parser.add_argument("--minutes", type=float, default=1e6, help="start nothing new after so long")
    options = parser.parse_args()
    if options.action in ("run", "check") and options.workload is None:
        parser.error("--workload FILE is needed")
    return options


if __name__ == "__main__":
    main()
