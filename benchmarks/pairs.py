"""Any pair: plain decoding, trees of fixed sizes and trees sized while running, question by question.

    python -m benchmarks.pairs --target big.gguf --drafter small.gguf [--memory 4GB] [--ways plain 8 16 auto]
        [--sampling 0 0.7 recommended] [--tokens 128] [--results FILE]

One process loads the pair once. Every question is answered in each of the ways one after another, in an
order that rotates, and what was learned is forgotten before each answer (unless `--keep`), so that a ratio
compares answers to one question made within a minute. The questions are those of `bench` and of
benchmarks/coding.jsonl: as many about code as about anything else. `plain` drafts nothing, in the same
engine, which leaves the drafter's memory to the drafter; with `--drafter lookup`, trees grow from what needs
no model.

With `--results`, rows are added to a file of JSON lines, and answers that it has already are not made again;
`--seconds` ends a run early, to be continued by another. `--show` makes the tables of such a file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgespec
from benchmarks.harness import parser_of, print_head
from benchmarks.workload import read_lines, smollm2
from edgespec.bench.rows.preparation import Question, balanced, own_questions, read_questions
from edgespec.engine.engine import Engine
from edgespec.engine.sequence import Sizer
from edgespec.generation.config import GenerationConfig, Grammar
from edgespec.generation.result import Generation
from edgespec.models.gguf.header import read_header
from edgespec.models.hub.recommended import recommended_sampling
from edgespec.speculation.drafters.base import Drafter, NoDrafter
from edgespec.speculation.policies import TreePolicy, tree_policy

CODE = ("code", "coding")
_SUMMED = ("nodes", "draft_s", "draft_steps", "draft_rows", "wait_s", "verify_s", "accept_s", "observe_s")
Row = dict[str, Any]


def main() -> None:
    options = _parse()
    rows = list(read_lines(options.results)) if options.results else []
    if not options.show:
        for group in _measured(options, rows):
            rows += group
            if options.results:
                with options.results.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in group)
    show([row for row in rows if row["way"] in options.ways], options.by)


def show(rows: Sequence[Row], by: str = "kind") -> None:
    """A table for each way to sample and length, with rows for each kind of text or each category."""
    for sampling, tokens in sorted({(row["sampling"], row["limit"]) for row in rows}):
        print(f"\n{sampling}, up to {tokens} tokens:\n")
        print_head(
            *("text", "way", "answers", "tokens/s", "against plain, median", "from", "to", "tokens a pass"),
            *("nodes", "drafting, share", "pass, s", "observing, share"),
        )
        of_these = [row for row in rows if (row["sampling"], row["limit"]) == (sampling, tokens)]
        for kind in dict.fromkeys(row[by] for row in of_these):
            _show_kind(kind, [row for row in of_these if row[by] == kind])


def _show_kind(kind: str, rows: Sequence[Row]) -> None:
    """A line for each way, and how close trees sized while running come to the best fixed size."""
    by_way: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_way.setdefault(row["way"], {})[row["question"]] = row
    gains = {way: _ratios(by_way["plain"], of) for way, of in by_way.items()} if "plain" in by_way else {}
    for way, of in by_way.items():
        total = {
            name: sum(row[name] for row in of.values()) for name in (*_SUMMED, "passes", "decode_s", "made")
        }
        ratios = gains.get(way) or [float("nan")]
        print(
            f"| {kind} | {way} | {len(of)} | {total['made'] / total['decode_s']:.2f} "
            f"| {statistics.median(ratios):.3f} | {min(ratios):.2f} | {max(ratios):.2f} "
            f"| {total['made'] / total['passes']:.2f} | {total['nodes'] / total['passes']:.1f} "
            f"| {total['draft_s'] / total['decode_s']:.2f} | {total['verify_s'] / total['passes']:.3f} "
            f"| {total['observe_s'] / total['decode_s']:.3f} |"
        )
    fixed = {way: statistics.median(ratios) for way, ratios in gains.items() if way.isdigit()}
    if fixed and "auto" in gains:
        best = max(fixed, key=lambda way: fixed[way])
        against = statistics.median(_ratios(by_way[best], by_way["auto"]))
        print(f"\n{kind}: auto is {against:.3f} of the best fixed size, {best} (median of paired ratios).\n")


def _ratios(base: dict[str, Row], other: dict[str, Row]) -> list[float]:
    """Speeds relative to those of another way, for the questions that both answered."""
    both = [(base[question], row) for question, row in other.items() if question in base]
    return [row["made"] / row["decode_s"] * of["decode_s"] / of["made"] for of, row in both]


@dataclass
class _Way:
    """A way to answer, with what it has learned."""

    sizer: Sizer
    policy: TreePolicy
    drafter: Drafter


def _measured(options: argparse.Namespace, known: Iterable[Row]) -> Iterator[list[Row]]:
    """Answers to one question after another, each in all ways."""
    samplings = _samplings(options)
    grammar = Grammar.of_schema(json.loads(options.schema.read_text("utf-8"))) if options.schema else None
    done = {(row["question"], row["sampling"], row["limit"], row["way"]) for row in known}
    ends = time.monotonic() + options.seconds
    with edgespec.load(
        options.target,
        draft=options.drafter,
        drafter=options.kind,
        memory=options.memory,
        offload=options.offload,
        context=options.context,
        tree=options.tree,
        learn=False,
        reuse_answers=options.keep,
    ) as engine:
        ways = {way: _way(engine, way, engine.drafter) for way in options.ways}
        _answer(engine, ways[options.ways[-1]], "Why is the sky blue?", GenerationConfig(max_tokens=16))
        number = 0
        for tokens in options.tokens:
            for question in _questions(options):
                for sampling, settings in samplings:
                    number += 1
                    key = question.identifier, sampling, tokens
                    if all((*key, way) in done for way in options.ways):
                        continue
                    if time.monotonic() > ends:
                        return
                    config = GenerationConfig(max_tokens=tokens, seed=7, grammar=grammar).with_(**settings)
                    group = []
                    for way in _rotated(options.ways, number):
                        if not options.keep:
                            ways[way] = _way(engine, way, ways[way].drafter)
                        made = _answer(engine, ways[way], question.text, config, keep=options.keep)
                        group.append(_row(question, way, sampling, tokens, made))
                    yield group


def _samplings(options: argparse.Namespace) -> list[tuple[str, dict[str, float]]]:
    """The settings of each way to sample, with its name."""
    found: list[tuple[str, dict[str, float]]] = []
    for text in options.sampling:
        if text == "recommended":
            settings = recommended_sampling(read_header(options.target)).values
            name = ", ".join(f"{key} {value}" for key, value in settings.items())
            found.append((f"{text} ({name})", dict(settings)))
            continue
        temperature, *further = text.split(",")
        pairs = (setting.split("=") for setting in further)
        found.append(
            (text, {"temperature": float(temperature)} | {name: float(value) for name, value in pairs})
        )
    return found


def _way(engine: Engine, way: str, drafter: Drafter) -> _Way:
    """A way that has learned nothing yet."""
    engine.set_tree_budget(1 if way == "plain" else None if way == "auto" else int(way))
    return _Way(
        engine.speculator.sizer,
        tree_policy(engine.speculator.policy.name),
        NoDrafter() if way == "plain" else drafter,
    )


def _answer(
    engine: Engine, way: _Way, prompt: str, config: GenerationConfig, *, keep: bool = False
) -> Generation:
    if not keep:
        way.drafter.forget_sequences()
    engine.target.rewind(0)
    engine.speculator.sizer, engine.speculator.policy, engine.drafter = way.sizer, way.policy, way.drafter
    return engine.generate(prompt, config)


def _row(question: Question, way: str, sampling: str, tokens: int, made: Generation) -> Row:
    return {
        "question": question.identifier,
        "category": question.category,
        "kind": "code" if question.category in CODE else "prose",
        "way": way,
        "sampling": sampling,
        "limit": tokens,
        "made": sum(one.accepted + 1 for one in made.passes),
        "passes": len(made.passes),
        "decode_s": made.timings.decode_s,
        **{name: sum(getattr(one, name) for one in made.passes) for name in _SUMMED},
        "exact": made.exact,
        "text": made.text[-40:],
    }


def _questions(options: argparse.Namespace) -> Sequence[Question]:
    if options.only:
        return balanced(
            [question for path in options.only for question in read_questions(path)], options.count
        )
    return questions_of(options.questions, options.count)


def questions_of(paths: Sequence[Path] | None, count: int) -> list[Question]:
    """As many about code as about anything else, in turn: those of `bench`, and of files.

    Args:
        paths: of files; none are benchmarks/coding.jsonl.
    """
    asked = [
        Question(f"{path.stem} {question.identifier}", question.category, question.text)
        for path in paths or [Path(__file__).with_name("coding.jsonl")]
        for question in read_questions(path)
    ]
    asked += [Question(f"own {q.identifier}", q.category, q.text) for q in own_questions()]
    kinds = [[q for q in asked if (q.category in CODE) == is_code] for is_code in (True, False)]
    code, prose = (balanced(kind, count) for kind in kinds)
    return [question for pair in zip(code, prose, strict=False) for question in pair]


def _rotated(ways: Sequence[str], number: int) -> list[str]:
    start = number % len(ways)
    return [*ways[start:], *ways[:start]]


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--target", type=Path, default=smollm2())
    parser.add_argument("--drafter", default="lookup", help="a file, or lookup")
    parser.add_argument("--kind", help="of drafter: model, lookup or merged")
    parser.add_argument("--memory", help="such as 4GB; all that there is without it")
    parser.add_argument("--offload", default="auto")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tree", default="calibrated", help="the tree policy")
    parser.add_argument("--ways", nargs="+", default=["plain", "4", "8", "16", "32", "60", "auto"])
    parser.add_argument(
        "--sampling",
        nargs="+",
        default=["0", "0.7"],
        help="a temperature, further settings behind it (0,repeat_penalty=1.1), or recommended: the makers'",
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[128], help="of each answer, at most")
    parser.add_argument("--questions", type=Path, nargs="*", help="files of questions beside those of bench")
    parser.add_argument("--count", type=int, default=12, help="questions of each kind, or with --only in all")
    parser.add_argument("--only", type=Path, nargs="*", help="files of questions instead of those of bench")
    parser.add_argument(
        "--by", choices=("kind", "category"), default="kind", help="what a row of a table is of"
    )
    parser.add_argument("--schema", type=Path, help="a JSON schema that all answers follow")
    parser.add_argument("--keep", action="store_true", help="forget nothing from question to question")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no question after these")
    parser.add_argument("--results", type=Path, help="file of JSON lines to add to")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
