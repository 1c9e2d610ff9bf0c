"""Compare ways of tuning a drafter in equal time; every row trains the same start anew.

    python -m benchmarks.tuning START.gguf [--target MODEL.gguf] [--answers 200] [--seconds 60 | --steps 24]
    python -m benchmarks.tuning START.gguf --loss "divergence" "total variation" --rate 3e-4 6e-4 --first 0 13
    python -m benchmarks.tuning START.gguf --rounded no yes --rank 0 16
    python -m benchmarks.tuning START.gguf --drafted 0 0.5

The target answers the built-in prompts (once: its answers are kept), and the drafter is trained on
them. Measured on answers about other subjects, in torch: the divergence, the total variation, and how often
the drafter's first choice, or one of its first four, is the target's. With the weights as they were trained,
as Q8_0, and in the types that the start had, which shows what writing them costs.

With --drafted, a share of the answers is the start's own, sampled at temperature 1, and what the target says
along them is learned (on-policy distillation: DistillSpec, Zhou et al. 2024). The seconds then include what
it took to write and to read them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray

import edgespec
from benchmarks.workload import FOLDER, smollm2
from edgespec.drafting.agreement import Text
from edgespec.drafting.tuning.answers import Answer, AnswerFile, Rows, harvest
from edgespec.drafting.tuning.batches import batch_of
from edgespec.drafting.tuning.extent import Extent
from edgespec.drafting.tuning.losses import LOSSES, divergence, total_variation
from edgespec.drafting.tuning.network import Network
from edgespec.drafting.tuning.prompts import prompts_that_come_along
from edgespec.drafting.tuning.rounding import rounded
from edgespec.drafting.tuning.scales import block_sizes
from edgespec.drafting.tuning.training import USUAL, Method, StepBudget, TimeBudget, Trainer
from edgespec.drafting.tuning.weights import load_weights, matrix_kinds
from edgespec.engine.requests import Request
from edgespec.generation.config import GenerationConfig
from edgespec.machine.probe import usable_cores
from edgespec.models.gguf.header import read_header
from edgespec.models.llama.runtime.batch import Batch
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model
from edgespec.speculation.tree import Acceptance, IntArray, TokenTree

_TOKENS = 128  # of an answer
_AS_TRAINED, _AS_BEFORE = "as trained", "as before"


def main() -> None:
    options = _parse()
    learned, held_out = answers_of(options.target or smollm2(), options.answers)
    kinds = matrix_kinds(read_header(options.start))
    print(json.dumps(_measured(options.start, held_out, {}) | {"row": "before"}))
    shares = {share: _with_drafted(options, learned, share) for share in options.drafted}
    rows = itertools.product(
        options.first, options.rank, options.rounded, options.loss, options.rate, options.drafted
    )
    for first, rank, is_rounded, loss, rate, drafted in rows:
        texts, writing_s = shares[drafted]
        loaded = load_weights(options.start)
        first = loaded.shape.layers // 2 if first is None else first
        reckons = kinds if is_rounded == "yes" else {}
        extent = Extent(first, rank, options.scales)
        network = Network(loaded.shape, loaded.weights, extent, reckons, block_sizes(kinds))
        method = Method(rate, rate, rate, rate, options.far, texts=options.texts, loss=loss)
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(network, texts, Path(folder) / "checkpoint", "row", method=method)
            budget = StepBudget(options.steps) if options.steps else TimeBudget(options.seconds)
            trainer.train(budget, lambda what, part: print(f"{part:.0%} {what}", file=sys.stderr))
        row = {"first": first, "rank": rank, "rounded": is_rounded, "loss": loss, "rate": rate}
        row |= {"steps": trainer.steps, "seconds": round(writing_s + trainer.seconds, 1), "drafted": drafted}
        for written in (_AS_TRAINED,) if options.scales else (_AS_TRAINED, "Q8_0", _AS_BEFORE):
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


def _with_drafted(
    options: argparse.Namespace, learned: list[Answer], share: float
) -> tuple[list[Answer], float]:
    """Answers of which a share is replaced by the start's own; and the seconds that those took."""
    replaced = learned[: round(share * len(learned))]
    begun = time.monotonic()
    drafted = _drafted(options.start, options.target or smollm2(), replaced) if replaced else []
    return [*drafted, *learned[len(replaced) :]], time.monotonic() - begun


def _drafted(start: Path, target: Path, answers: list[Answer]) -> list[Answer]:
    """A drafter's own answers to the same prompts, with the target's distributions along them."""
    said: dict[int, tuple[int, ...]] = {}
    requests = [
        Request(answer.text.prompt, GenerationConfig(temperature=1.0, seed=i, max_tokens=_TOKENS), key=i)
        for i, answer in enumerate(answers)
    ]
    with (
        edgespec.load(start, draft="none", context=4096) as engine,
        closing(engine.stream_many(requests)) as events,
    ):
        for event in events:
            if event.chunk is not None and event.chunk.generation is not None:
                said[event.request.key] = tuple(event.chunk.generation.tokens)
    found = []
    with Model(target) as model:
        context = Context(
            model, n_cells=4096, n_rows=64, n_outputs=64, n_sequences=1, n_threads=usable_cores()
        )
        for i, tokens in said.items():
            prompt = answers[i].text.prompt
            if tokens:
                rows = _rows_of(context, [*prompt, *tokens], len(prompt) - 1)
                found.append(Answer(answers[i].prompt, Text(prompt, tokens), *rows))
        context.close()
    return found


def _rows_of(context: Context, text: list[int], first: int) -> tuple[IntArray, NDArray[np.float16]]:
    """The distributions after every token of a text from `first` on."""
    found = Rows()
    context.clear()
    for start in range(0, len(text), 64):
        piece = text[start : start + 64]
        context.decode(Batch.run(piece, start, 1, "all"))
        nodes = tuple(range(max(first - start, 0), len(piece)))
        if nodes:
            found.add(context.logits(), TokenTree.root_only(piece[-1]), Acceptance(nodes, piece[-1]))
    return found.first(len(text) - first)


def _measured(
    start: Path, answers: list[Answer], changed: Mapping[str, torch.Tensor]
) -> dict[str, float | int | str]:
    loaded = load_weights(start)
    network = Network(loaded.shape, loaded.weights)
    network.weights.update(changed)
    sums = torch.zeros(4)
    count = 0
    with torch.no_grad():
        for logits, top, logprobs in _rows(network, answers):
            rank = (logits > logits.gather(1, top[:, :1])).sum(1)
            parts = [divergence(logits, top, logprobs), total_variation(logits, top, logprobs)]
            parts += [(rank == 0).float().mean(), (rank < 4).float().mean()]
            sums += len(top) * torch.stack(parts)
            count += len(top)
    names = ("divergence", "total variation", "first choice", "among four")
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
    parser.add_argument("--rank", type=int, nargs="*", default=[0], help="of adapters; 0: whole matrices")
    parser.add_argument("--scales", action="store_true", help="train the scales of blocks alone")
    parser.add_argument("--rounded", nargs="*", default=["no"], choices=["no", "yes"])
    parser.add_argument("--loss", nargs="*", default=[USUAL.loss], choices=[*LOSSES])
    parser.add_argument("--drafted", type=float, nargs="*", default=[0.0], help="share that the start wrote")
    parser.add_argument("--rate", type=float, nargs="*", default=[USUAL.rate])
    return parser.parse_args()


if __name__ == "__main__":
    main()
