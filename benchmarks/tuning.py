"""Compare ways of tuning a drafter in equal time; every row trains the same start anew.

    python -m benchmarks.tuning START.gguf [--target MODEL.gguf] [--answers 200] [--seconds 60 | --steps 24]
    python -m benchmarks.tuning START.gguf --rate 3e-4 6e-4 --first 0 13 --rounded no yes

The target answers the built-in prompts (once: its answers are kept), and the drafter is trained on
them. Measured on answers about other subjects, in torch: the divergence, and how often the drafter's first
choice, or one of its first four, is the target's. With the weights as they were trained, as Q8_0, and in the
types that the start had, which shows what writing them costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

import edgespec
from benchmarks.workload import FOLDER, smollm2
from edgespec.drafting.tuning.answers import Answer, AnswerFile, harvest
from edgespec.drafting.tuning.batches import batch_of
from edgespec.drafting.tuning.extent import Extent
from edgespec.drafting.tuning.network import Network
from edgespec.drafting.tuning.prompts import prompts_that_come_along
from edgespec.drafting.tuning.rounding import rounded
from edgespec.drafting.tuning.training import USUAL, Method, StepBudget, TimeBudget, Trainer, divergence
from edgespec.drafting.tuning.weights import load_weights, matrix_kinds
from edgespec.models.gguf.header import read_header

_TOKENS = 128  # of an answer
_AS_TRAINED, _AS_BEFORE = "as trained", "as before"


def main() -> None:
    options = _parse()
    learned, held_out = answers_of(options.target or smollm2(), options.answers)
    kinds = matrix_kinds(read_header(options.start))
    print(json.dumps(_measured(options.start, held_out, {}) | {"row": "before"}))
    for first, is_rounded, rate in itertools.product(options.first, options.rounded, options.rate):
        loaded = load_weights(options.start)
        first = loaded.shape.layers // 2 if first is None else first
        network = Network(loaded.shape, loaded.weights, Extent(first), kinds if is_rounded == "yes" else {})
        method = Method(rate, rate, options.far, texts=options.texts)
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(network, learned, Path(folder) / "checkpoint", "row", method=method)
            budget = StepBudget(options.steps) if options.steps else TimeBudget(options.seconds)
            trainer.train(budget, lambda what, part: print(f"{part:.0%} {what}", file=sys.stderr))
        row = {"first": first, "rounded": is_rounded, "rate": rate}
        row |= {"steps": trainer.steps, "seconds": round(trainer.seconds, 1)}
        for written in (_AS_TRAINED, "Q8_0", _AS_BEFORE):
            changed = {}
            for name, values in network.changed().items():
                kind = kinds.get(name, "") if written == _AS_BEFORE else written
                changed[name] = rounded(torch.from_numpy(values), kind)
            print(json.dumps(row | {"written": written} | _measured(options.start, held_out, changed)))


def answers_of(target: Path, count: int) -> tuple[list[Answer], list[Answer]]:
    """Answers to learn from, and held-out ones."""
    prompts = prompts_that_come_along()
    training = prompts.training[:count]
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = AnswerFile(FOLDER / f"{target.stem}.answers", read_header(target).fingerprint, _TOKENS)
    if missing := file.unanswered([*prompts.held_out, *training]):
        with (
            edgespec.load(target, draft="none", context=4096) as engine,
            closing(harvest(engine, missing, _TOKENS)) as found,
        ):
            for answer in found:
                file.add(answer)
    return file.of(training), [answer for answer in file.of(prompts.held_out) if answer.text.answer]


def _measured(
    start: Path, answers: list[Answer], changed: Mapping[str, torch.Tensor]
) -> dict[str, float | int | str]:
    loaded = load_weights(start)
    network = Network(loaded.shape, loaded.weights)
    network.weights.update(changed)
    sums = torch.zeros(3)
    count = 0
    with torch.no_grad():
        for logits, top, logprobs in _rows(network, answers):
            rank = (logits > logits.gather(1, top[:, :1])).sum(1)
            parts = [
                divergence(logits, top, logprobs),
                (rank == 0).float().mean(),
                (rank < 4).float().mean(),
            ]
            sums += len(top) * torch.stack(parts)
            count += len(top)
    names = ("divergence", "first choice", "among four")
    found: dict[str, float | int | str] = {
        name: round(value, 4) for name, value in zip(names, (sums / count).tolist(), strict=True)
    }
    return found | {"tokens": count}


def _rows(
    network: Network, answers: list[Answer]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    for answer in answers:
        batch = batch_of([answer])
        hidden = network.hidden(batch.tokens, batch.lengths)[batch.rows]
        yield F.linear(hidden, network.output), batch.top, batch.logprobs


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("start", type=Path)
    parser.add_argument("--target", type=Path, help="default: the bundled demo model")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, for each row")
    parser.add_argument("--steps", type=int, help="in place of seconds")
    parser.add_argument("--far", type=float, default=USUAL.far, help="first loss of the full rate")
    parser.add_argument("--texts", type=int, default=USUAL.texts, help="of a step")
    parser.add_argument("--first", type=int, nargs="*", default=[None], help="trained layer; default: half")
    parser.add_argument("--rounded", nargs="*", default=["no"], choices=["no", "yes"])
    parser.add_argument("--rate", type=float, nargs="*", default=[USUAL.rate])
    return parser.parse_args()


if __name__ == "__main__":
    main()
