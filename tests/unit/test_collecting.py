"""Files of `--collect`: prompts, answers and the target's distributions."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from edgespec.drafting.tuning.data.answers import TOP
from edgespec.drafting.tuning.data.collecting import Collector, collected
from edgespec.files.cache_kind import CacheKind
from edgespec.generation.result import Generation
from edgespec.speculation.tree import Acceptance, TokenTree

TARGET = "0123456789abcdef0123456789abcdef"
VOCAB = 50


def refuse(reason: str) -> None:
    raise AssertionError(reason)


def logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, VOCAB)).astype(np.float32)


def say(collector: Collector, prompt: list[int], said: list[int], *, passes: int) -> None:
    """An answer in passes that each accept one drafted token and add another."""
    observer = collector.observe(prompt)
    for number in range(passes):
        observer.add(logits(number), TokenTree.chain([1, 2]), Acceptance((0, 1), 3))
    observer.finish(Generation(tokens=said))


def test_answers_come_back_with_what_else_might_have_been_said() -> None:
    collector = Collector(TARGET, refuse)
    assert not collector.path.exists()
    said = list(range(10, 17))
    for first in range(20):
        say(collector, [first, 2, 3], said, passes=4)
    learned, held_out = collected(TARGET)
    assert len(learned) + len(held_out) == 20
    assert learned
    assert held_out
    assert {answer.text.prompt[0] for answer in [*learned, *held_out]} == set(range(20))
    answer = learned[0]
    assert answer.text.answer == tuple(said)
    assert answer.top.shape == (8, TOP)  # one row more than tokens: what might have followed the last one
    rows = np.concatenate([logits(number) for number in range(4)])
    assert (answer.top[:, 0] == rows.argmax(1)).all()
    best = rows.max(1) - np.log(np.exp(rows).sum(1))
    assert np.abs(answer.logprobs[:, 0] - best).max() < 2e-3
    # The split stays when more is collected.
    say(Collector(TARGET, refuse), [99, 2, 3], said, passes=4)
    again = collected(TARGET)
    assert {a.text.prompt for a in held_out} <= {a.text.prompt for a in again[1]}
    assert collected("f" * 32) == ([], [])


def test_long_texts_are_cut_into_parts_that_know_what_stood_before() -> None:
    collector = Collector(TARGET, refuse)
    prompt, said = list(range(400)), [token % VOCAB for token in range(600)]
    say(collector, prompt, said, passes=300)
    learned, held_out = collected(TARGET)
    parts = sorted([*learned, *held_out], key=lambda part: -len(part.text.answer) - len(part.top))
    assert sorted(len(part.text.answer) for part in parts) == [88, 256, 256]
    assert all(len(part.text.prompt) == 256 for part in parts)
    whole = prompt + said
    for part in parts:
        text = [*part.text.prompt, *part.text.answer]
        assert any(whole[at : at + len(text)] == text for at in range(len(whole)))


def test_answers_that_teach_nothing_are_not_kept() -> None:
    collector = Collector(TARGET, refuse)
    say(collector, [1], [2, 3], passes=1)
    say(collector, [1], [], passes=0)  # stopped while the prompt was read
    assert not collector.path.exists()


def test_others_cannot_read_it_and_it_can_be_deleted() -> None:
    collector = Collector(TARGET, refuse)
    say(collector, [1], [2, 3, 4, 5], passes=2)
    assert stat.S_IMODE(collector.path.stat().st_mode) == 0o600
    assert CacheKind.COLLECTED.forget() == 1
    assert collected(TARGET) == ([], [])


def test_a_full_disk_ends_the_collecting_and_not_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    collector = Collector(TARGET, told.append)
    CacheKind.COLLECTED.folder.parent.mkdir(parents=True, exist_ok=True)
    CacheKind.COLLECTED.folder.write_bytes(b"no folder")
    for _ in range(2):
        say(collector, [1], [2, 3, 4, 5], passes=2)
    assert len(told) == 1
    assert told[0].endswith("Collecting stopped.")
    CacheKind.COLLECTED.folder.unlink()


def test_of_very_many_answers_the_latest_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.drafting.tuning.data.collecting._MAX_READ", 5)
    for number in range(3):
        collector = Collector(TARGET, refuse)
        for first in range(3):
            say(collector, [3 * number + first], [2, 3, 4, 5], passes=2)
        os.utime(collector.path, (number, number))
    learned, held_out = collected(TARGET)
    assert {answer.text.prompt[0] for answer in [*learned, *held_out]} == {4, 5, 6, 7, 8}


def test_the_oldest_files_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.drafting.tuning.data.collecting._MAX_BYTES", 1)
    paths: list[Path] = []
    for _ in range(2):
        collector = Collector(TARGET, refuse)
        say(collector, [1], [2, 3, 4, 5], passes=2)
        paths.append(collector.path)
    assert [path.exists() for path in paths] == [False, True]
