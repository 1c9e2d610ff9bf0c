"""Measure what a drafter could learn between answers, from the rows of the target that were verified anyway.

    python -m benchmarks.online DRAFTER.gguf [--target MODEL.gguf] [--answers 160]

The target's answers to the built-in prompts (kept by benchmarks.tuning) are gone through in turn, as a
chat would: first the drafter's candidates after each token are counted, as first choice and among four, and
then everything learns from the answer. Counted are the drafter alone; with the biases that trees learn in any
case (`speculation.learning.pair`); with a low-rank adapter on what its output layer reads (OSD, Liu et al.
2023, as far as it needs no gradients of the layers); with both. In the last two rows, recycled successors of
the last two tokens, or of the last one, take two of the four places.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.tuning import answers_of
from benchmarks.workload import smollm2
from edgespec.drafting.tuning.answers import Answer
from edgespec.drafting.tuning.batches import batch_of, tokens_seen
from edgespec.drafting.tuning.network import Network
from edgespec.drafting.tuning.training import divergence
from edgespec.drafting.tuning.weights import load_weights
from edgespec.speculation.learning.pair import Pair
from edgespec.speculation.tree import IntArray

_CANDIDATES = 16  # of a row that biases choose among
_AMONG = 4
_SPARE = 2  # of these, that recycled tokens may take


@dataclass(frozen=True)
class Rows:
    """The rows of an answer: columns are those tokens that any answer's rows list.

    Attributes:
        hidden: (rows, width) what the drafter's output layer reads.
        after: (rows,) the token before each row's choice.
        said: (rows,) the target's choice.
        top, logprobs: (rows, k) columns of the target's most likely tokens, and their log-probabilities.
    """

    hidden: torch.Tensor
    after: IntArray
    said: IntArray
    top: torch.Tensor
    logprobs: torch.Tensor


class Adapter:
    """A change of low rank to what the output layer reads, trained by Adam on one answer at a time."""

    def __init__(self, width: int, rank: int, rate: float, turns: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._down = (torch.randn(rank, width, generator=generator) / width**0.5).requires_grad_()
        self._up = torch.zeros(width, rank, requires_grad=True)
        self._optimizer = torch.optim.Adam([self._down, self._up], lr=rate)
        self._turns = turns

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, width) the adapted states."""
        return hidden + F.linear(F.linear(hidden, self._down), self._up)

    def learn(self, rows: Rows, output: torch.Tensor) -> None:
        """Take a few steps towards the target's distributions."""
        for _ in range(self._turns):
            self._optimizer.zero_grad()
            divergence(F.linear(self(rows.hidden), output), rows.top, rows.logprobs).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()


class Recycled:
    """The target's latest likely tokens after pairs of tokens, and after tokens."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[int]] = {}

    def after(self, context: tuple[int, int]) -> list[int]:
        """Those after both tokens, and then those after the last one."""
        return [*self._known.get(context, []), *self._known.get(context[1:], [])]

    def put(self, context: tuple[int, int], tokens: list[int]) -> None:
        """Keep what was likely after a context."""
        self._known[context] = self._known[context[1:]] = tokens


def main() -> None:
    options = _parse()
    learned, _ = answers_of(options.target or smollm2(), options.answers)
    columns = tokens_seen(learned)
    loaded = load_weights(options.drafter)
    network = Network(loaded.shape, loaded.weights)
    output = network.output.index_select(0, columns)
    adapter = Adapter(loaded.shape.width, options.rank, options.rate, options.turns)
    pairs = {"biases": Pair(), "adapter and biases": Pair()}
    recycled = Recycled()
    counts: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for rows in _rows(network, learned, columns):
        with torch.no_grad():
            logits = {
                name: F.linear(f(rows.hidden), output) for name, f in (("", _same), ("adapter", adapter))
            }
        found = {
            "drafter": _best(logits[""]),
            "biases": _corrected(logits[""], rows, pairs["biases"]),
            "adapter": _best(logits["adapter"]),
            "adapter and biases": _corrected(logits["adapter"], rows, pairs["adapter and biases"]),
        }
        contexts = list(zip([-1, *rows.after[:-1].tolist()], rows.after.tolist(), strict=True))
        for name in ("biases", "adapter and biases"):
            found[f"{name}, recycling"] = _filled(found[name], contexts, recycled)
        for name, tokens in found.items():
            right = tokens[:, :_AMONG] == rows.said[:, None]
            counts[name].append((len(right), int(right[:, 0].sum()), int(right.any(1).sum())))
        for context, tokens in zip(contexts, rows.top[:, :8].tolist(), strict=True):
            recycled.put(context, tokens)
        adapter.learn(rows, output)
    print("| drafter | first choice, first half | second half | among four, first half | second half |")
    print("|---|---|---|---|---|")
    for name, of in counts.items():
        halves = [np.sum(part, axis=0) for part in (of[: len(of) // 2], of[len(of) // 2 :])]
        shares = [f"{half[kind] / half[0]:.3f}" for kind in (1, 2) for half in halves]
        print(f"| {name} | {' | '.join(shares)} |")


def _rows(network: Network, answers: list[Answer], columns: torch.Tensor) -> Iterator[Rows]:
    for answer in answers:
        batch = batch_of([answer])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            hidden = network.hidden(batch.tokens, batch.lengths)[batch.rows].float()
        top = torch.searchsorted(columns, batch.top)
        after = torch.searchsorted(columns, batch.tokens[batch.rows]).numpy().astype(np.int32)
        yield Rows(hidden, after, top[:, 0].numpy().astype(np.int32), top, batch.logprobs)


def _same(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def _best(logits: torch.Tensor) -> IntArray:
    """(rows, candidates) the most likely columns."""
    found: IntArray = logits.topk(_CANDIDATES).indices.numpy().astype(np.int32)
    return found


def _corrected(logits: torch.Tensor, rows: Rows, pair: Pair) -> IntArray:
    """(rows, candidates) the candidates in the order that biases give them; row after row is learned from."""
    values, tokens = logits.topk(_CANDIDATES)
    found = np.empty(tokens.shape, dtype=np.int32)
    for row, (value, token) in enumerate(zip(values.numpy(), tokens.numpy().astype(np.int32), strict=True)):
        children = pair.children(token[None], value[None], rows.after[row : row + 1], _CANDIDATES)
        found[row] = children.tokens[0]
        pair.learn(children, int(rows.after[row]), int(rows.said[row]))
    return found


def _filled(found: IntArray, contexts: list[tuple[int, int]], recycled: Recycled) -> IntArray:
    """(rows, among) the first candidates, and in the last places recycled ones that are new."""
    filled: IntArray = found[:, :_AMONG].copy()
    for row, context in enumerate(contexts):
        kept = filled[row, : _AMONG - _SPARE].tolist()
        new = [token for token in recycled.after(context) if token not in kept][:_SPARE]
        filled[row] = [*kept, *new, *found[row, _AMONG - _SPARE :].tolist()][:_AMONG]
    return filled


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--target", type=Path, help="default: the bundled demo model")
    parser.add_argument("--answers", type=int, default=160)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--turns", type=int, default=4, help="steps on each answer")
    return parser.parse_args()


if __name__ == "__main__":
    main()
