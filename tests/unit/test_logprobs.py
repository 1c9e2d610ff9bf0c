"""Log-probabilities of accepted tokens: a log-softmax, at every accepted row of a tree."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.logprobs import Logprobs, token_logprob
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.tree import Acceptance, TokenTree
from tests.unit.fakes import FakeDrafter, fake_engine


@given(st.integers(0, 1 << 16), st.integers(0, 9))
def test_it_is_a_log_softmax_at_the_accepted_nodes(seed: int, top: int) -> None:
    logits = (40 * np.random.default_rng(seed).standard_normal((3, 8))).astype(np.float32)
    logits[1, 2] = -np.inf  # masked
    tree = TokenTree.from_paths(1, [([4], [-1.0]), ([5], [-2.0])])
    node = tree.child(0, 5)
    assert node is not None
    record = Logprobs(top, lambda token: b"%d" % token)
    record(logits, tree, Acceptance((0, node), 6))
    found = record.taken()
    assert record.taken() == []
    assert [item.token for item in found] == [5, 6]
    for item, row in zip(found, (logits[0], logits[node]), strict=True):
        exact = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
        assert np.isclose(item.logprob, exact[item.token])
        assert item.spelling == b"%d" % item.token
        best = np.argsort(-exact, kind="stable")[: min(top, 8)]
        assert [other.token for other in item.top] == best.tolist()
        assert np.allclose([other.logprob for other in item.top], exact[best])


def test_of_equally_likely_tokens_the_first_are_named() -> None:
    found = token_logprob(np.zeros(5000, dtype=np.float32), 9, 3, lambda token: b"%d" % token)
    assert [other.token for other in found.top] == [0, 1, 2]
    assert np.isclose(found.logprob, -np.log(5000))


def test_each_token_of_an_answer_has_one_and_drafts_change_none() -> None:
    def answered(accuracy: float, config: GenerationConfig) -> list[object]:
        engine, _ = fake_engine(FakeDrafter(3, accuracy), 3, tree_budget=8)
        chunks = list(engine.stream([1, 2, 3], config))
        answer = chunks[-1].generation
        assert answer is not None
        assert [item.token for item in answer.logprobs] == answer.tokens
        assert [item for chunk in chunks for item in chunk.logprobs] == answer.logprobs
        assert all(len(chunk.logprobs) == len(chunk.tokens) for chunk in chunks)
        return [answer.logprobs, answer.text]

    for stop in ((), ("e",)):
        config = GenerationConfig(max_tokens=30, logprobs=2, temperature=0.9, seed=1, stop=stop)
        assert answered(0.9, config) == answered(0.0, config)
