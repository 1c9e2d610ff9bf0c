"""Measure the limit that sampling sets to a drafter, the overlap of two distributions, and what is reached.

    python -m benchmarks.overlap --target big.gguf --drafter small.gguf [--temperatures 0 0.7 1] [--tokens 64]

The target answers questions at each temperature, and both models then read the answers. For every token,
the overlap is the sum over the vocabulary of the smaller of the two probabilities: no rule accepts a single
drafted token more often than that (Leviathan et al. 2023). At a temperature of 0 it is the share of tokens
that both models put first. "Reached" is the share of tokens that the drafter ranks first by its own logits
and the target's noise, as trees are grown, and "among four" the share that it ranks among its first four.
Nothing that is learned of the pair takes part.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import edgespec
from benchmarks.pairs import CODE, questions_of
from benchmarks.workload import q4_0, smollm2
from edgespec.drafting.agreement import Reader, Text
from edgespec.generation.config import GenerationConfig
from edgespec.models.llama.runtime.batch import Batch
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.tree import FloatArray

_SEED = 7
_ROWS = 32


def main() -> None:
    options = _parse()
    print("| temperature | text | tokens | overlap | reached | among four | against a temperature of 0 |")
    print("|---|---|---|---|---|---|---|")
    greedy: dict[str, float] = {}
    for temperature in options.temperatures:
        texts = _written(options, temperature)
        everything = [text for kind in texts.values() for text in kind]
        with (
            Reader(options.target, everything, repack=True) as target,
            Reader(options.drafter, everything, repack=True) as drafter,
        ):
            for kind, of_kind in texts.items():
                found = np.concatenate([_compared(target, drafter, text, temperature) for text in of_kind])
                overlap, reached, among = found.mean(axis=0)
                greedy.setdefault(kind, overlap)
                print(
                    f"| {temperature} | {kind} | {len(found)} | {overlap:.3f} | {reached:.3f} | {among:.3f} "
                    f"| {overlap / greedy[kind]:.2f} |",
                    flush=True,
                )


def _written(options: argparse.Namespace, temperature: float) -> dict[str, list[Text]]:
    """The target's answers, by kind of text."""
    texts: dict[str, list[Text]] = {"code": [], "prose": []}
    config = GenerationConfig(max_tokens=options.tokens, temperature=temperature, seed=_SEED)
    with edgespec.load(options.target, draft=str(options.drafter), context=1024, learn=False) as engine:
        for question in questions_of([], options.count):
            prompt = engine.encoder.encode(question.text)
            answer = engine.generate(prompt, config)
            kind = "code" if question.category in CODE else "prose"
            texts[kind].append(Text(tuple(prompt), tuple(answer.tokens)))
    return texts


def _compared(target: Reader, drafter: Reader, text: Text, temperature: float) -> FloatArray:
    """(tokens, 3) the overlap at each token of the answer, and whether it ranks first, and among four."""
    found = []
    position = len(text.prompt)
    noise = GumbelNoise(_SEED, target.model.vocabulary.n_tokens)
    for ours, theirs in zip(_logits(target, text), _logits(drafter, text), strict=True):
        token = text.answer[position - len(text.prompt)]
        known = min(len(ours), len(theirs))
        if temperature > 0:
            overlap = np.minimum(_law(ours[:known], temperature), _law(theirs[:known], temperature)).sum()
            ranked: NDArray[np.floating] = theirs[:known] / temperature + noise.at(position)[:known]
        else:
            overlap, ranked = float(ours.argmax() == theirs[:known].argmax()), theirs[:known]
        rank = np.count_nonzero(ranked > ranked[token])
        found.append((overlap, rank < 1, rank < 4))
        position += 1
    return np.array(found, dtype=np.float32)


def _law(logits: FloatArray, temperature: float) -> FloatArray:
    weights: FloatArray = np.exp((logits - logits.max()) / temperature)
    law: FloatArray = weights / weights.sum()
    return law


def _logits(reader: Reader, text: Text) -> Iterator[FloatArray]:
    """The logits that decide each token of the answer."""
    tokens: Sequence[int] = [*text.prompt, *text.answer][:-1]
    first = len(text.prompt) - 1
    reader.context.clear()
    bounds = [*range(0, first, _ROWS), *range(first, len(tokens), _ROWS), len(tokens)]
    for start, end in itertools.pairwise(bounds):
        asked = start >= first
        reader.context.decode(
            Batch.run(tokens[start:end], start, n_sequences=1, logits="all" if asked else "none")
        )
        if asked:
            yield from reader.context.logits().copy()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, default=smollm2())
    parser.add_argument("--drafter", type=Path, default=q4_0())
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--count", type=int, default=6, help="questions about code, and as many others")
    return parser.parse_args()


if __name__ == "__main__":
    main()
