"""DRY, XTC, top-n-sigma and banned strings, compared with their definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.adjustments import Adjustments
from edgespec.speculation.banned import BannedStrings
from edgespec.speculation.repetition import RepetitionPenalty
from edgespec.speculation.sampling import Sampler, excludes, left_by_xtc
from edgespec.speculation.spelling import Spelling
from tests.letters import Letters

_VOCABULARY = Letters(["a", "b", "ab", "\n", "a:", "B", "<>"])
_TOKENS = st.integers(0, _VOCABULARY.n_tokens - 1)
_TEXTS = st.lists(_TOKENS, min_size=1, max_size=40)


def _dry(text: Sequence[int], config: GenerationConfig) -> dict[int, float]:
    """The penalty of every token, as llama.cpp's four steps have it, by comparing everything."""
    window = len(text) if config.dry_penalty_last_n < 0 else min(config.dry_penalty_last_n, len(text))
    last = list(text[len(text) - window :])
    if window <= config.dry_allowed_length:
        return {}
    breakers = config.dry_sequence_breakers

    def is_broken(end: int) -> bool:
        whole = _VOCABULARY.text(last[:end])
        ends = range(len(_VOCABULARY.text(last[: end - 1])) + 1, len(whole) + 1)
        return any(whole[:at].endswith(mark) for mark in breakers for at in ends)

    limit = next((window - end for end in range(window, 0, -1) if is_broken(end)), window)
    if limit < config.dry_allowed_length:
        return {}
    longest: dict[int, int] = {}
    for back in range(1, window):
        size = 0
        while size + back < window and last[-1 - size] == last[-1 - size - back]:
            size += 1
        size = min(size, limit)
        follows = last[window - back]
        if size >= config.dry_allowed_length and size > longest.get(follows, -1):
            longest[follows] = size
    return {
        token: config.dry_multiplier * config.dry_base ** (size - config.dry_allowed_length)
        for token, size in longest.items()
        if not any(mark in _VOCABULARY.text([token]) for mark in breakers)
    }


@given(
    text=_TEXTS,
    begins=st.integers(1, 40),
    window=st.sampled_from([-1, 3, 8, 30]),
    allowed=st.integers(1, 4),
    base=st.sampled_from([1.0, 1.75]),
    breakers=st.lists(st.sampled_from(["\n", ":", "ba", "<>", "aba"]), max_size=2),
    path=st.lists(_TOKENS, max_size=6),
)
def test_repetitions_are_penalized_as_in_llama_cpp(
    text: list[int],
    begins: int,
    window: int,
    allowed: int,
    base: float,
    breakers: list[str],
    path: list[int],
) -> None:
    config = GenerationConfig(
        dry_multiplier=0.8,
        dry_base=base,
        dry_allowed_length=allowed,
        dry_penalty_last_n=window,
        dry_sequence_breakers=tuple(breakers),
    )
    repetition = RepetitionPenalty(config, Spelling(_VOCABULARY))
    for end in range(min(begins, len(text)), len(text) + 1):
        for below in ([], path, path[:3], path[1:]):
            tokens, penalties = repetition.penalties(text[:end], below)
            found = dict(zip(tokens.tolist(), penalties.tolist(), strict=True))
            assert found == pytest.approx(_dry([*text[:end], *below], config))


def test_a_long_repetition_leaves_finite_logits() -> None:
    config = GenerationConfig(dry_multiplier=100, dry_base=100, dry_sequence_breakers=())
    logits = np.zeros(2, dtype=np.float32)
    Adjustments(config, 2).adjust(logits, [0] * 500)
    assert np.isfinite(logits).all()
    assert logits[0] < -1e29


class _Counted(list[int]):
    """Counts the tokens that are read."""

    reads = 0

    def __getitem__(self, index: int | slice) -> int | list[int]:  # type: ignore[override]
        found = super().__getitem__(index)
        self.reads += len(found) if isinstance(found, list) else 1
        return found


def test_a_node_does_not_cost_a_look_at_the_whole_text() -> None:
    config = GenerationConfig(dry_multiplier=1, dry_sequence_breakers=("ba",))
    repetition = RepetitionPenalty(config, Spelling(Letters(["a", "b", *map(str, range(5000))])))
    text = _Counted([*range(2, 5000), 7, 8])
    assert repetition.penalties(text)[0].tolist() == [9]
    text.reads = 0
    assert repetition.penalties(text, [9])[0].tolist() == [10]
    assert repetition.penalties(text, [9, 10])[0].tolist() == [11]
    text += [9, 10]
    assert repetition.penalties(text)[0].tolist() == [11]
    assert text.reads < 50


@given(
    st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.6, 1.0]),
)
def test_xtc_leaves_the_least_likely_of_the_likely_tokens(logits: list[float], threshold: float) -> None:
    scores = np.array(logits, dtype=np.float32)
    tokens = np.arange(len(logits))
    chances = np.exp(scores.astype(np.float64) - scores.max())
    chances /= chances.sum()
    order = sorted(tokens.tolist(), key=lambda token: (-scores[token], token))
    likely = [token for token in order if chances[token] >= threshold]
    expected = set(order) - set(likely[:-1])
    near = any(math.isclose(chance, threshold, rel_tol=1e-9) for chance in chances)
    assert near or set(left_by_xtc(scores, tokens, threshold).tolist()) == expected


def test_the_coin_of_xtc_follows_from_seed_and_position() -> None:
    config = GenerationConfig(xtc_probability=0.3)
    tossed = [excludes(config, 5, position) for position in range(2000)]
    assert tossed == [excludes(config, 5, position) for position in range(2000)]
    assert tossed != [excludes(config, 6, position) for position in range(2000)]
    assert 0.25 < sum(tossed) / 2000 < 0.35
    assert all(excludes(GenerationConfig(xtc_probability=1), 5, position) for position in range(50))


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_xtc_applies_at_any_temperature(temperature: float) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    config = GenerationConfig(temperature=temperature, xtc_probability=1, xtc_threshold=0.1)
    assert Sampler(config, 4).choose(logits, [0]) == 2


@given(
    st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=12), st.sampled_from([0.0, -1.0, 0.2, 1.0, 3.0])
)
def test_top_n_sigma_by_its_definition(logits: list[float], sigmas: float) -> None:
    values = np.array([*logits, -np.inf], dtype=np.float32)
    config = GenerationConfig(temperature=1, top_n_sigma=sigmas)
    left = set(Sampler(config, len(values)).distribution(values, 0)[0].tolist())
    if sigmas <= 0:
        assert left == set(range(len(values)))
    else:
        cut = max(logits) - sigmas * np.std(np.array(logits, dtype=np.float64))
        assert {at for at, value in enumerate(logits) if value >= cut + 1e-5} <= left
        assert left <= {at for at, value in enumerate(logits) if value >= cut - 1e-5}


def test_samplers_apply_in_the_order_of_llama_cpp() -> None:
    def left(logits: Sequence[float], **settings: float) -> list[int]:
        config = GenerationConfig(temperature=1, **settings)
        values = np.array(logits, dtype=np.float32)
        return sorted(Sampler(config, len(values)).distribution(values, 0)[0].tolist())

    chances = np.log([0.4, 0.3, 0.2, 0.06, 0.04])
    # Min-p has left three tokens, of which XTC takes away two.
    assert left(chances, min_p=0.4, xtc_probability=1) == [2]
    # Of all tokens, the first has 0.4; of the two that top-k leaves, it has 0.57.
    assert left(chances, top_k=2, xtc_probability=1, xtc_threshold=0.45) == [0, 1]
    assert left(chances, xtc_probability=1, xtc_threshold=0.25) == [1, 2, 3, 4]
    # The deviation is that of all tokens, not of those that top-k leaves.
    assert left([10, 9, 0, 0, 0, 0], top_k=2, top_n_sigma=1) == [0, 1]


_STRINGS = ["b", "ab", "Aba", "abb\n", ":\na", "<>b", "bB", "a:b"]
_BANNED = st.lists(st.sampled_from(_STRINGS), min_size=1, max_size=3)


@given(banned=_BANNED, prompt=_TEXTS, answer=st.lists(_TOKENS, max_size=12), split=st.integers(0, 12))
def test_exactly_the_tokens_that_complete_a_banned_string_are_refused(
    banned: list[str], prompt: list[int], answer: list[int], split: int
) -> None:
    strings = BannedStrings(banned, Spelling(_VOCABULARY), len(prompt))
    allowed: list[int] = []
    for token in answer:
        at = min(split, len(allowed))
        refused = set(strings.refused([*prompt, *allowed[:at]], allowed[at:]).tolist())
        for candidate in range(_VOCABULARY.n_tokens):
            text = _VOCABULARY.text([*allowed, candidate]).lower()
            assert (candidate in refused) == any(string.lower() in text for string in banned)
        if token not in refused:
            allowed.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_next_best_token_is_chosen_in_place_of_a_banned_one(temperature: float) -> None:
    config = GenerationConfig(temperature=temperature, banned_strings=("AB",))
    adjustments = Adjustments(config, _VOCABULARY.n_tokens, Spelling(_VOCABULARY), 1)
    sampler = Sampler(config, _VOCABULARY.n_tokens, 1, adjustments=adjustments)
    logits = np.array([0, 30, 90, -50, 5, 25, -50], dtype=np.float32)
    assert sampler.choose(logits, [1]) == 1  # "ab" is never chosen
    assert sampler.choose(logits, [1, 0]) == 4  # and neither "b" nor "B" behind "a"
    assert sampler.choose(logits, [0]) == 1  # the prompt's "a" is no part of the answer
    assert logits[2] == 90


def test_an_answer_of_which_nothing_is_left_is_an_error() -> None:
    config = GenerationConfig(banned_strings=("a", "b"))
    adjustments = Adjustments(config, _VOCABULARY.n_tokens, Spelling(_VOCABULARY), 0)
    logits = np.array([1, 2, 3, -np.inf, 4, 5, -np.inf], dtype=np.float32)
    with pytest.raises(UsageError, match="only banned strings fit"):
        Sampler(config, _VOCABULARY.n_tokens, adjustments=adjustments).choose(logits, [6])
