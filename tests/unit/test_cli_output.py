"""Output of the command line to terminals and files."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pyte
import pytest
from rich.console import Console

from edgespec.cli.screen.formatting import details, fitted, format_statistics, table
from edgespec.cli.screen.results import ResultStream
from edgespec.cli.screen.status import RemainingTime, StatusLine, format_prefill
from edgespec.cli.screen.terminal import Terminal, is_terminal
from edgespec.errors import OutputError
from edgespec.generation.expert_use import ExpertUse
from edgespec.generation.result import FinishReason, Generation, PassRecord, Timings


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_null_device_is_no_terminal() -> None:
    with Path(os.devnull).open() as nothing:
        assert not is_terminal(nothing)
    assert is_terminal(FakeTerminal())


def test_a_model_cannot_steer_the_terminal() -> None:
    terminal, file = FakeTerminal(), io.StringIO()
    for stream in (terminal, file):
        ResultStream(stream, "it").verbatim("a\x1b[2J\tb\u202e\u2069\r\n")
    assert terminal.getvalue() == "a\ufffd[2J\tb\ufffd\ufffd\ufffd\n"
    assert file.getvalue() == "a\x1b[2J\tb\u202e\u2069\r\n"


@pytest.mark.parametrize(("encoding", "line"), [("utf-8", '{"a": "é"}\n'), ("ascii", '{"a": "\\u00e9"}\n')])
def test_json_in_any_encoding(encoding: str, line: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    ResultStream(stream, "it").record({"a": "é"})
    assert raw.getvalue().decode(encoding) == line


def test_a_closed_stream_is_an_output_error() -> None:
    with pytest.raises(OutputError, match=r"^it is closed\."):
        ResultStream(None, "it")


def test_statistics_line() -> None:
    passes = [PassRecord(8, 2, 0.1, 0.4, 0.0), PassRecord(8, 1, 0.1, 0.4, 0.0)]
    answer = Generation(tokens=[1, 2, 3, 4, 5], passes=passes, exact=True)
    answer.timings.decode_s = 2.0
    assert format_statistics(answer) == "5 tokens, 1.00/s"
    answer.plain_pass_s, answer.timings.verify_s, answer.timings.io_wait_s = 0.8, 1.5, 0.5
    assert format_statistics(answer) == "5 tokens, 1.00/s", "nothing was gained"
    answer.plain_pass_s = 1.8
    assert format_statistics(answer) == "5 tokens, 1.00/s, 1.8x"
    answer.drafts, answer.passes = True, [*passes, *3 * [PassRecord(1, 0, 0.0, 0.4, 0.0)]]
    assert format_statistics(answer) == "5 tokens, 1.00/s, drafting paused: it did not pay"


def test_experts_are_told_of_where_they_are_read_one_by_one() -> None:
    use = ExpertUse(hits=90, misses=30, read_bytes=60 << 20)
    passes = [PassRecord(1, 0, 0.0, 0.4, 0.0, experts=use), PassRecord(2, 1, 0.0, 0.4, 0.0, experts=use)]
    answer = Generation(tokens=[1, 2, 3], passes=passes)
    assert details(answer)["experts"] == (
        "75% found in memory; 20.0 of 80.0 read from disk per token (40.0 MiB)"
    )
    assert answer.to_json("a question")["experts"]["read_bytes_per_token"] == 40 << 20
    assert "experts" not in details(Generation(tokens=[1], passes=[PassRecord(1, 0, 0.0, 0.4, 0.0)]))


def test_the_figures_by_name_are_words_that_people_know() -> None:
    def passes(draft_s: float) -> list[PassRecord]:
        return [PassRecord(9, 2, 9.0, 9.0, 0.0), PassRecord(9, 1, draft_s, 1.25, 0.05, wait_s=0.5)]

    answer = Generation(tokens=[1, 2, 3, 4, 5], exact=True, finish_reason="length", seed=7)
    answer.passes, answer.timings = passes(0.7), Timings(decode_s=2.0)
    answer.plain_pass_s = 0.8
    rows = details(answer)
    assert rows["answer"] == "5 tokens in 2.00 s, 1.00/s; cut off by max_tokens"
    assert rows["speed-up"] == "0.80x over plain decoding, which takes 800 ms per token"
    assert rows["drafts"] == "2 passes, 2.50 tokens each; 3 of 16 drafted tokens accepted"
    # The parts of the answer's 2.00 seconds; the first pass belongs to the prompt.
    assert rows["time"] == "0.70 s drafting, 0.80 s computing passes, 0.50 s waiting for the disk"
    assert rows["limited by"] == "the processor: the model's arithmetic took longest"
    answer.passes = passes(0.2)
    assert details(answer)["limited by"] == "the processor: the model's arithmetic took most of the time"
    answer.passes = passes(1.2)
    assert details(answer)["limited by"] == "the drafter: drafting took longest"
    answer.passes = passes(1.6)
    assert details(answer)["limited by"] == "the drafter: drafting took most of the time"
    assert rows["mode"].startswith("exact: bit-identical")
    assert rows["seed"] == "7"


@pytest.mark.parametrize(
    ("reason", "context_full", "said"),
    [
        ("stop", False, []),
        ("length", True, []),
        ("length", False, ["The answer was cut off by --max-tokens. More."]),
    ],
)
def test_an_answer_that_was_cut_off_says_so(
    reason: FinishReason, context_full: bool, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = Generation(tokens=[1, 2], finish_reason=reason, context_full=context_full)
    Terminal(verbose=True).statistics(answer, "More.")
    assert capsys.readouterr().err.splitlines() == ["2 tokens", *said]


def test_how_long_something_takes_is_said_when_it_is_long_and_no_guess() -> None:
    now = [100.0]
    pace = RemainingTime(lambda: now[0])
    assert not pace.is_due()
    now[0] += 2
    assert pace.left(0.01) == ""  # a guess
    now[0] += 2
    assert pace.left(0.5) == ""  # 8 s in all
    assert pace.left(0.1) == ", about 0:36 left"
    assert pace.left(1.0) == pace.left(0.0) == ""
    now[0] += 6
    assert pace.is_due()
    now[0] += 29
    assert not pace.is_due()
    now[0] += 1
    assert pace.is_due()


def test_long_work_in_a_pipe_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("edgespec.cli.screen.terminal.RemainingTime", lambda: RemainingTime(lambda: now[0]))
    for long in (True, False):
        now[0] = 0.0
        with Terminal().working(long=long) as progress:
            for step in range(1, 5):
                now[0] = 10.0 * step
                progress("Timing passes", step / 5)
    assert capsys.readouterr().err.splitlines() == [
        "Timing passes 20%, about 0:40 left",
        "Timing passes 80%, about 0:10 left",
    ]


def test_prefill_line() -> None:
    assert format_prefill(0, 400, 0.0) == f"Reading the prompt {'─' * 20} 0 of 400"
    assert format_prefill(100, 400, 30.0).endswith(" 100 of 400, 1:30 left")
    assert format_prefill(100, 400, 1500.0, columns=40) == "Reading the prompt 100 of 400, 1:15:00 left"


def shown(file: io.StringIO) -> list[str]:
    """The lines on a terminal's screen after what was written to it."""
    screen = pyte.Screen(60, 10)
    pyte.Stream(screen).feed(file.getvalue().replace("\n", "\r\n"))
    return [line.rstrip() for line in screen.display if line.strip()]


def test_the_status_line_stays_below_what_is_printed_and_disappears() -> None:
    file = FakeTerminal()
    console = Console(file=file, force_terminal=True, width=60)
    with StatusLine(console) as line:
        line.say("Row 1 of 3 " * 9)
        console.print("in memory: 3 tokens/s")
        console.print("streamed: 1 token/s")
        above, other, below = shown(file)
        assert (above, other) == ("in memory: 3 tokens/s", "streamed: 1 token/s")
        assert below[2:12] == "Row 1 of 3"
        assert below.endswith("…")
    assert shown(file) == [above, other]


def test_what_is_done_at_once_needs_no_word() -> None:
    file = FakeTerminal()
    with StatusLine(Console(file=file, force_terminal=True, width=60)) as line:
        line.waiting("Reading the prompt")
    assert "Reading" not in file.getvalue()
    assert shown(file) == []


def test_wide_characters_keep_columns_and_windows() -> None:
    rows = table(("NAME", "TURNS"), [("\u65e5\u672c", "1"), ("trip", "2")]).splitlines()
    assert rows == ["NAME  TURNS", "\u65e5\u672c  1", "trip  2"]
    assert fitted("\u65e5\u672c\u65e5\u672c", 8) == "\u65e5\u672c\u65e5\u672c"
    assert fitted("\u65e5\u672c\u65e5\u672c", 7) == "\u65e5\u672c\u65e5\u2026"
    assert fitted("\u65e5\u672c\u65e5\u672c", 6) == "\u65e5\u672c \u2026"
