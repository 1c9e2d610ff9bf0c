"""TextStream: any bytes, any split, any stop strings give the text up to the first stop."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.text.stream import TextStream

# Few letters, so that stop strings occur, overlap and nearly occur; and characters of 2 to 4 bytes.
_TEXT = st.text(alphabet="aab\né€😀", max_size=40)
_STOPS = st.lists(st.text(alphabet="aab\né€😀", min_size=1, max_size=5), max_size=4)
_CUTS = st.lists(st.integers(min_value=0, max_value=160), max_size=12)


def _pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def _expected(text: str, stops: Sequence[str]) -> str:
    return text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]


@given(_TEXT, _CUTS, _STOPS)
def test_joined_chunks_are_the_text_up_to_the_earliest_stop(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    stream = TextStream(stops)
    chunks = [stream.push(piece) for piece in _pieces(text.encode(), cuts)] + [stream.flush()]
    assert "".join(chunks) == _expected(text, stops)
    assert stream.stopped == any(stop in text for stop in stops)
    if stream.stopped:
        assert stream.stop_string in stops
        assert text.startswith(stream.stop_string, len(_expected(text, stops)))
    assert not any("\ufffd" in chunk for chunk in chunks)


@given(st.binary(max_size=40), _CUTS)
def test_any_bytes_decode_as_they_would_in_one_piece(data: bytes, cuts: list[int]) -> None:
    stream = TextStream()
    chunks = [stream.push(piece) for piece in _pieces(data, cuts)] + [stream.flush()]
    assert "".join(chunks) == codecs.getincrementaldecoder("utf-8")("replace").decode(data)


@given(_TEXT, _STOPS)
def test_only_what_could_begin_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    stream = TextStream(stops)
    shown, seen = "", ""
    for character in text:
        shown += stream.push(character.encode())
        seen += character
        if any(stop in seen for stop in stops):
            break
        held = seen[len(shown) :]
        longest = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert held == seen[len(seen) - longest :]


def test_a_character_is_shown_once_its_last_byte_is_there() -> None:
    stream = TextStream()
    assert [stream.push(bytes([byte])) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]


@pytest.mark.parametrize(("stop", "held"), [([], ""), (["bc"], "b")])
def test_an_unfinished_character_at_the_end_is_dropped(stop: list[str], held: str) -> None:
    stream = TextStream(stop)
    assert stream.push("ab😀".encode()[:-1]) + held == "ab"
    assert stream.flush() == held


def test_nothing_follows_a_stop() -> None:
    stream = TextStream(["<end>"])
    assert stream.push(b"one<e") == "one"
    assert stream.push(b"nd>two") == ""
    assert stream.stopped
    assert (stream.push(b"three"), stream.flush()) == ("", "")


def test_a_near_miss_is_shown_as_soon_as_it_is_one() -> None:
    stream = TextStream(["<end>"])
    assert [stream.push(piece) for piece in (b"a<en", b"<en", b"x")] == ["a", "<en", "<enx"]


def test_an_earlier_start_wins_over_an_earlier_end() -> None:
    stream = TextStream(["bc", "abcd"])
    # After "abc", "abcd" may still come, and would begin before "bc".
    assert (stream.push(b"-abc"), stream.stopped) == ("-", False)
    assert (stream.push(b"d"), stream.stopped) == ("", True)

    stream = TextStream(["bc", "abcd"])
    assert (stream.push(b"-abc"), stream.push(b"x"), stream.stopped) == ("-", "a", True)

    stream = TextStream(["bc", "abcd"])
    assert (stream.push(b"-abc"), stream.flush(), stream.stopped) == ("-", "a", True)


def test_empty_stop_strings_are_ignored() -> None:
    stream = TextStream(["", "x"])
    assert (stream.push(b"ab"), stream.stopped) == ("ab", False)


def test_a_repetitive_stop_string_is_searched_in_linear_time() -> None:
    # 100,000 characters against a stop string of 5,000 that nearly matches at every position: a
    # search that starts over at each would need 5e8 comparisons and not end within the test run.
    stream = TextStream(["a" * 5000 + "b"])
    assert len("".join(stream.push(b"a" * 10) for _ in range(10_000))) == 100_000 - 5_000
    assert len(stream.flush()) == 5_000
