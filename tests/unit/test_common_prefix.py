"""The common prefix of sequences, as far as they are alike in any type."""

from __future__ import annotations

from typing import SupportsIndex

from hypothesis import given
from hypothesis import strategies as st

from edgespec.llama.cache.kv_cache import common_prefix

_TOKENS = st.lists(st.integers(0, 1), max_size=5)


@given(st.integers(0, 600), _TOKENS, _TOKENS, st.sampled_from([list, tuple]))
def test_it_ends_where_they_differ(length: int, one: list[int], other: list[int], kind: type) -> None:
    same = list(range(7, 7 + length))
    a, b = [*same, *one], [*same, *other]
    found = common_prefix(a, kind(b))
    assert a[:found] == b[:found]
    assert found == min(len(a), len(b)) or a[found] != b[found]


class Looked(list[int]):
    """Counts the single tokens that are looked at."""

    looks = 0

    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:  # type: ignore[override]
        self.looks += not isinstance(index, slice)
        return super().__getitem__(index)


def test_a_long_one_is_not_looked_at_token_by_token() -> None:
    tokens = Looked([1] * 10_000)
    assert common_prefix(tokens, [*tokens, 2][1:]) == 9_999
    assert tokens.looks <= 256
