"""Speeds as people read them, and the plain passes that they are compared with."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.api.protocol import timings
from edgespec.api.speculation import of_answer
from edgespec.base.units import readable_duration, readable_rate
from edgespec.bench.report.row_tables import format_rows
from edgespec.bench.rows.figures import Row
from edgespec.cli.screen.formatting import details, format_statistics
from edgespec.costs.curves import Curve
from edgespec.engine.plain_passes import PlainPasses
from edgespec.generation.result import Generation, PassRecord, Timings
from edgespec.serving.request_log import RequestLogEntry


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (146.72, "147 tokens/s"),
        (46.72, "46.7 tokens/s"),
        (1.0, "1.00 tokens/s"),
        (0.5, "0.500 tokens/s"),
        (0.42, "2.4 s per token"),
        (1 / 24, "24 s per token"),
        (1 / 240, "240 s per token"),
        (1 / 600, "10 min per token"),
    ],
)
def test_a_slow_speed_is_said_as_the_time_of_a_token(rate: float, said: str) -> None:
    assert readable_rate(rate) == said


@given(st.floats(1e-6, 1e6))
def test_no_speed_is_said_to_be_nothing(rate: float) -> None:
    number = float(re.findall(r"^[\d.]+", readable_rate(rate, digits=2))[0])
    assert number > 0
    assert float(readable_duration(rate).split()[0]) > 0 or rate < 1e-5


def answer_of(passes: list[PassRecord], plain_pass_s: float = 0.0) -> Generation:
    tokens = sum(record.accepted + 1 for record in passes)
    seconds = sum(record.seconds for record in passes)
    return Generation(
        tokens=list(range(tokens)),
        passes=passes,
        timings=Timings(decode_s=seconds),
        plain_pass_s=plain_pass_s,
    )


def test_slow_answers_have_a_speed_everywhere() -> None:
    answer = answer_of([PassRecord(1, 0, 0.0, 24.0, 0.0)] * 25)
    assert format_statistics(answer) == "25 tokens, 25 s per token"
    assert "25 s per token" in details(answer)["answer"]
    assert "25 s per token" in repr(answer)
    assert "25 s per token" in str(RequestLogEntry.of("/v1", 200, 600.0, [answer], streamed=False))
    assert of_answer(answer)["speculation"]["timings"]["tokens_per_second"] == 0.04
    slow = Row("slow", "stream", "none", tokens_per_second=0.04, tokens_per_second_a_text=0.004)
    slow.tokens_per_second_min = slow.tokens_per_second_max = 0.04
    cells = re.search(r"\| +0\.0400 \| +0\.00400 \|", format_rows([slow]))
    assert cells, "a column of tokens per second has numbers"


def test_where_nothing_was_drafted_there_is_no_factor_and_no_share() -> None:
    answer = answer_of([PassRecord(1, 0, 0.0, 0.4, 0.0)] * 4, plain_pass_s=0.1)
    assert answer.gain == 0
    assert "x" not in format_statistics(answer)
    assert "speed-up" not in details(answer)
    assert details(answer)["drafts"].endswith("nothing drafted")
    figures = of_answer(answer)["speculation"]
    assert figures["gain"] is figures["acceptance_rate"] is None


def test_an_answer_in_company_has_no_factor() -> None:
    shared = [PassRecord(2, 1, 0.0, 0.4, 0.0, shared=True)] * 4
    assert answer_of(shared, plain_pass_s=0.1).gain == 0


def test_a_factor_is_the_shown_speed_in_plain_passes() -> None:
    answer = answer_of([PassRecord(4, 1, 0.1, 0.4, 0.0)] * 4, plain_pass_s=0.3)
    assert answer.gain == pytest.approx(answer.tokens_per_second * 0.3)
    assert "speed-up" in details(answer)


def test_an_answer_of_one_pass_has_no_speed() -> None:
    answer = answer_of([PassRecord(4, 3, 0.1, 0.4, 0.0)], plain_pass_s=0.3)
    answer.timings = Timings(prefill_s=0.5)
    assert details(answer)["answer"] == "4 tokens in the first pass; complete"
    assert details(answer)["speed-up"] == "unknown: the answer took a single pass"


@pytest.mark.parametrize("n_answers", [1, 2])
def test_a_response_and_its_log_have_one_speed(n_answers: int) -> None:
    answers = [answer_of([PassRecord(1, 0, 0.0, 0.3, 0.0)] * (9 - n)) for n in range(n_answers)]
    times = timings(answers)
    logged = RequestLogEntry.of("/v1", 200, 3.0, answers, streamed=False).tokens_per_second
    assert times["predicted_per_second"] == logged > 0
    if n_answers == 1:
        assert logged == round(answers[0].tokens_per_second, 3)
        assert times["predicted_per_token_ms"] == pytest.approx(1e3 / logged, rel=1e-3)


def test_factors_compare_with_plain_passes_of_the_same_minutes() -> None:
    now = [0.0]
    passes = PlainPasses(Curve.through([(1, 0.1), (9, 0.2)]), clock=lambda: now[0])
    assert passes.seconds == 0  # what was measured at another time says nothing
    passes.add(PassRecord(9, 3, 0.0, 0.8, 0.0))
    assert passes.seconds == pytest.approx(
        0.4
    )  # a machine that is slower now would decode plainly slower too
    for seconds in (0.5, 0.6, 9.0):
        passes.add(PassRecord(1, 0, 0.0, seconds, 0.0))
    assert passes.seconds == 0.6
    now[0] = 301
    assert passes.seconds == 0
    without_curve = PlainPasses(clock=lambda: now[0])
    without_curve.add(PassRecord(9, 3, 0.0, 0.8, 0.0))
    assert without_curve.seconds == 0


def test_an_answers_own_plain_passes_say_what_a_plain_pass_takes() -> None:
    known = PlainPasses()
    known.add(PassRecord(1, 0, 0.0, 0.1, 0.0))
    own = [PassRecord(1, 0, 0.0, seconds, 0.0) for seconds in (9.0, 0.2, 0.3, 0.25)]
    assert known.of(own[:2]) == 0.1, "one says little"
    assert known.of(own) == 0.25, "without the first, which reads the prompt's end"


@pytest.mark.parametrize(("waited", "alone"), [(0.75, 0.4), (0.5, 0.5)])
def test_a_plain_pass_has_the_memory_that_the_drafter_takes(waited: float, alone: float) -> None:
    passes = PlainPasses(read_share=0.4)
    passes.add(PassRecord(1, 0, 0.0, 1.0, 0.0, waited))
    assert passes.seconds == alone, "two fifths of the reads, but all of the arithmetic"
