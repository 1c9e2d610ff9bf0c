"""Caches limited by bytes, against a plain list of what was used last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgespec.base.latest import LatestValues

_USES = st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(0, 50)), max_size=60)


@given(_USES, st.integers(1, 100), st.none() | st.integers(1, 6))
def test_what_was_used_last_is_kept(
    uses: list[tuple[bool, int, int]], max_bytes: int, max_values: int | None
) -> None:
    kept: LatestValues[int] = LatestValues(max_bytes, max_values)
    expected: list[tuple[int, int]] = []  # key and bytes, the latest last
    for puts, key, n_bytes in uses:
        known = [each for each in expected if each[0] == key]
        if puts:
            kept.put(key, key * 10, n_bytes)
            known = [(key, n_bytes)]
        else:
            assert kept.get(key) == (key * 10 if known else None)
        expected = [each for each in expected if each[0] != key] + known
        while len(expected) > 1 and (
            sum(size for _, size in expected) > max_bytes or len(expected) > (max_values or len(expected))
        ):
            del expected[0]
    assert [kept.get(key) is not None for key in range(9)] == [
        any(key == each for each, _ in expected) for key in range(9)
    ]


def test_what_is_removed_makes_room() -> None:
    kept: LatestValues[str] = LatestValues(10)
    kept.put("a", "first", 6)
    kept.remove("a")
    kept.remove("a")
    kept.put("b", "second", 5)
    kept.put("c", "third", 5)
    assert [kept.get(key) for key in "abc"] == [None, "second", "third"]
