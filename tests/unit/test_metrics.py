"""Figures for monitoring: totals, and the last minute by a clock that the test turns."""

from __future__ import annotations

import math
import re

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from edgespec.serving.metrics import OUTCOMES, LastMinute, Metrics, TrafficSums


class Clock:
    def __init__(self) -> None:
        self.now = 1000.25

    def __call__(self) -> float:
        return self.now


def figures(metrics: Metrics) -> dict[str, float]:
    """All samples by name, with the outcome where there is one, as a monitor reads the page."""
    page, content_type = metrics.page()
    assert content_type.startswith("text/plain; version=0.0.4")
    return {
        f"{sample.name} {sample.labels['outcome']}"
        if "outcome" in sample.labels
        else sample.name: sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def new_metrics(clock: Clock) -> Metrics:
    return Metrics(queue_length=lambda: 3, in_flight=lambda: 2, is_up=lambda: True, now=clock)


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, 50)), max_size=40))
def test_the_last_minute_is_the_sum_of_its_seconds(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    recent = LastMinute(clock)
    added: list[tuple[float, int]] = []
    for seconds, tokens in steps:
        clock.now += seconds
        recent.add(TrafficSums(tokens=tokens))
        added.append((clock.now, tokens))
    expected = sum(tokens for at, tokens in added if int(at) > int(clock.now) - 60)
    assert recent.sums.tokens == expected
    assert 1.0 <= recent.length_s <= 60.0
    assert len(recent._seconds) <= 60, "memory does not grow with time"


def test_totals_grow_and_the_last_minute_passes() -> None:
    clock = Clock()
    metrics = new_metrics(clock)
    clock.now += 30
    for sequences in (4, 2):
        metrics.pass_done(sequences, seconds=0.5, disk_bytes=1000)
        for _ in range(sequences):
            metrics.tokens_generated(1)
    metrics.request_ended("answered")
    metrics.prompt_accepted(7)
    metrics.first_token(0.2)
    told = figures(metrics)
    assert told["edgespec_up"] == 1
    assert (told["edgespec_queue_length"], told["edgespec_sequences_in_flight"]) == (3, 2)
    assert {outcome: told[f"edgespec_requests_total {outcome}"] for outcome in OUTCOMES} == {
        **dict.fromkeys(OUTCOMES, 0),
        "answered": 1,
    }
    assert told["edgespec_prompt_tokens_total"] == 7
    assert told["edgespec_generated_tokens_total"] == 6
    assert (told["edgespec_passes_total"], told["edgespec_pass_sequences_total"]) == (2, 6)
    assert told["edgespec_pass_seconds_total"] == 1.0
    assert told["edgespec_disk_read_bytes_total"] == 2000
    assert told["edgespec_tokens_per_second"] == 6 / 30
    assert told["edgespec_tokens_per_pass"] == told["edgespec_sequences_per_pass"] == 3
    assert told["edgespec_disk_read_bytes_per_second"] == 2000 / 30
    assert told["edgespec_first_token_seconds_count"] == 1
    clock.now += 61
    told = figures(metrics)
    assert told["edgespec_generated_tokens_total"] == 6
    assert told["edgespec_disk_read_bytes_total"] == 2000
    assert told["edgespec_tokens_per_second"] == told["edgespec_disk_read_bytes_per_second"] == 0
    assert math.isnan(told["edgespec_tokens_per_pass"]), "no pass, no tokens a pass"


def test_names_follow_the_conventions() -> None:
    """Base units, totals that say so, and a sentence for every figure of our own."""
    page = new_metrics(Clock()).page()[0].decode()
    told = dict(re.findall(r"# HELP (edgespec_\w+) (.*)", page))
    assert len(told) >= 15
    assert all(text.endswith(".") for name, text in told.items() if not name.endswith("_created"))
    assert not [name for name in told if re.search(r"_(ms|mb|mib|gb|minutes)(_|$)", name)]
