"""Texts alone and in company: each must be the same, bit for bit, whatever shares its passes.

    python -m tests.company --texts 48 --rounds 2

Every round answers requests of mixed settings alone, and then together: they join while others are under way,
some leave in the middle, and the cells are so few that texts are moved, set aside and taken up again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import edgespec
from edgespec.engine.engine import Engine
from edgespec.engine.requests import Event, Request, RequestSource
from edgespec.engine.sequence import TextSequence
from edgespec.llama.cache.states import StateFile
from tests.integration.test_parallel import alone, requests

Answer = tuple[list[int], str]


@dataclass
class Outcome:
    """The outcome of a round.

    Attributes:
        identical: whole answers that are what they are alone.
        left: answers whose client left.
        compactions: how often the cells were moved.
        set_aside: how often a text waited with its state on disk.
        most: texts in the fullest pass.
    """

    identical: int = 0
    left: int = 0
    compactions: int = 0
    set_aside: int = 0
    most: int = 0


class Arrivals(RequestSource):
    """Requests that come at random moments.

    Args:
        together: how many come at once, on average.
    """

    def __init__(self, wanted: Sequence[Request], chance: random.Random, together: float) -> None:
        self._left = list(wanted)[::-1]
        self._chance = chance
        self._pause = 1 / (1 + together)

    def pop(self) -> Request | None:
        if not self._left or self._chance.random() < self._pause:
            return None
        return self._left.pop()

    def wait(self) -> bool:
        return bool(self._left)


def mixed(count: int, seed: int) -> list[Request]:
    """Requests of many kinds, two of three of which grow beyond the cells that are kept free for them."""
    wanted = requests(count, seed)
    for number, request in enumerate(wanted):
        if number % 3:
            request.config = request.config.with_(max_tokens=140, stop=(), grammar=None)
    return wanted


def together(
    engine: Engine, wanted: Sequence[Request], expected: Sequence[Answer], seed: int, *, leaving: int = 4
) -> Outcome:
    """Answer all requests in company, and compare each with what it is alone.

    Args:
        leaving: how many clients leave, each after a random number of tokens.

    Raises:
        AssertionError: a text differs, or a place is not given back.
    """
    chance = random.Random(seed)
    outcome = Outcome()
    patience = {chance.randrange(len(wanted)): chance.randint(1, 6) for _ in range(leaving)}
    said: dict[int, list[int]] = {}
    set_aside, before = engine.target.set_aside, engine.target.cache.compactions
    states: list[StateFile] = []

    def noted(sequence: TextSequence, folder: Path) -> None:
        set_aside(sequence, folder)
        assert sequence.state is not None
        states.append(sequence.state)

    engine.target.set_aside = noted  # type: ignore[method-assign]
    try:
        events = engine.stream_many(
            Arrivals([replace(request, cancelled=False) for request in wanted], chance, 8.0),
            on_pass=lambda records: setattr(outcome, "most", max(outcome.most, len(records))),
        )
        for event in events:
            number = event.request.key
            tokens = said.setdefault(number, [])
            finished = _taken(event, tokens)
            if finished is None:
                event.request.cancelled |= len(tokens) >= patience.get(number, 1 << 30)
            elif finished[1] == "cancelled":
                outcome.left += 1
                assert finished[0] == expected[number][0][: len(finished[0])], f"request {number}"
            else:
                assert finished == expected[number], f"request {number}"
                outcome.identical += 1
    finally:
        engine.target.set_aside = set_aside  # type: ignore[method-assign]
    outcome.set_aside = len(states)
    assert all(state.closed for state in states), "nothing is left on disk"
    assert list(engine.target.sequences) == [engine.target.own], "all places are given back"
    assert outcome.identical + outcome.left == len(wanted)
    outcome.compactions = engine.target.cache.compactions - before
    return outcome


def _taken(event: Event, tokens: list[int]) -> Answer | None:
    assert event.error is None, event.error
    assert event.chunk is not None
    tokens += event.chunk.tokens
    answer = event.chunk.generation
    return None if answer is None else (answer.tokens, answer.finish_reason)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", type=int, default=256, help="cells are 512 more")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--draft", default="none")
    options = parser.parse_args()
    with edgespec.load(
        options.model, draft=options.draft, tree_budget=8, exact=True, context=options.context
    ) as engine:
        for seed in range(options.seed, options.seed + options.rounds):
            wanted = mixed(options.texts, seed)
            print(f"round {seed}: {together(engine, wanted, alone(engine, wanted), seed)}", flush=True)


if __name__ == "__main__":
    main()
