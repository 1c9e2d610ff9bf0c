"""What sampling costs besides the models: a choice from the target's logits, and ranking a draft step.

    python -m benchmarks.choosing [--vocabulary 151936]

Logits are random, with a few that stand out. Medians over many choices, each at a new
position, as in an answer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import parser_of, print_head
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.growth import Frontier
from edgespec.speculation.learning.drafter_calibration import DrafterCalibration
from edgespec.speculation.ranking import AdjustedRanking, CalibratedRanking, Ranking
from edgespec.speculation.sampling import Sampler

_ROWS = 8  # of a draft step
_TIMES = 60
_FILTERS = {"top_p": 0.8, "top_k": 20}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top_k 20, top_p 0.8": {"temperature": 0.7, **_FILTERS},
    "the same, repeat_penalty 1.1": {"temperature": 0.7, "repeat_penalty": 1.1, **_FILTERS},
    "top_k 400": {"temperature": 0.7, "top_k": 400},
    "top_p 0.8": {"temperature": 0.7, "top_p": 0.8},
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    n_vocab = parser.parse_args().vocabulary
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (_ROWS, n_vocab)).astype(np.float32)
    logits[:, rng.integers(0, n_vocab, 30)] += 12
    text = rng.integers(0, n_vocab, 600).tolist()
    print_head("settings", "choice, ms", "draft step of 8 rows, ms", "the same at known positions, ms")
    for name, settings in SETTINGS.items():
        sampler = Sampler(GenerationConfig(**settings), n_vocab, 1)
        ranking: Ranking = CalibratedRanking(sampler.config, sampler.noise, DrafterCalibration())
        if sampler.adjustments.exist:
            ranking = AdjustedRanking(ranking, sampler.adjustments)
        ranking.begin(text)

        def choose(number: int, sampler: Sampler = sampler) -> None:
            sampler.choose(logits[number % _ROWS], [*text, *range(number)])

        def rank_new(number: int, ranking: Ranking = ranking) -> None:
            _rank(ranking, logits, 1000 + number, 1 + number * _ROWS)

        def rank_known(number: int, ranking: Ranking = ranking) -> None:
            _rank(ranking, logits, 1000 + _TIMES, 1 + number * _ROWS)

        choice, new, known = (_median_ms(work) for work in (choose, rank_new, rank_known))
        print(f"| {name} | {choice:.2f} | {new:.1f} | {known:.1f} |")


def _rank(ranking: Ranking, logits: np.ndarray, position: int, first_node: int) -> None:
    """Rank the children of the root's children, which all have the same position."""
    nodes = np.arange(first_node, first_node + _ROWS, dtype=np.int32)
    parents, depths = np.zeros(_ROWS, dtype=np.int32), np.ones(_ROWS, dtype=np.int32)
    ranking.before_ranking(Frontier(nodes, nodes, parents, depths), range(_ROWS))
    ranking.best(logits, [position] * _ROWS, 8)


def _median_ms(work: Callable[[int], object]) -> float:
    seconds = []
    for number in range(_TIMES):
        begun = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - begun)
    return 1000 * statistics.median(seconds)


if __name__ == "__main__":
    main()
