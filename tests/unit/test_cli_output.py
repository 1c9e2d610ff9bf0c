"""Output of the command line to terminals and files."""

from __future__ import annotations

import io

import pyte
import pytest

from edgespec.cli.screen import status as status_line
from edgespec.cli.screen.formatting import details, format_statistics
from edgespec.cli.screen.results import ResultStream
from edgespec.cli.screen.status import RemainingTime, StatusLine, aside, format_prefill
from edgespec.cli.screen.terminal import Terminal
from edgespec.errors import OutputError
from edgespec.generation.expert_use import ExpertUse
from edgespec.generation.result import FinishReason, Generation, PassRecord, Timings


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
    assert format_statistics(answer) == "5 tokens, 1.00/s, 0.8x"


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
    passes = [PassRecord(9, 2, 0.1, 0.4, 0.0), PassRecord(9, 1, 0.1, 0.4, 0.0)]
    answer = Generation(tokens=[1, 2, 3, 4, 5], passes=passes, exact=True, finish_reason="length", seed=7)
    answer.timings = Timings(decode_s=2.0, verify_s=1.5, io_wait_s=0.5, draft_s=0.2)
    answer.plain_pass_s = 0.8
    rows = details(answer)
    assert rows["answer"] == "5 tokens in 2.00 s, 1.00/s; cut off by max_tokens"
    assert rows["speed-up"] == "0.80x over plain decoding, which takes 800 ms per token"
    assert rows["drafts"] == "2 passes, 2.50 tokens each; 3 of 16 drafted tokens accepted"
    assert rows["time"] == "0.20 s drafting, 1.00 s computing passes, 0.50 s waiting for the disk"
    assert rows["limited by"] == "the processor: the model's arithmetic took most of the time"
    answer.timings.draft_s = 0.9
    assert details(answer)["limited by"] == "the processor: the model's arithmetic took longest"
    answer.timings.draft_s = 1.2
    assert details(answer)["limited by"] == "the drafter: drafting took longest"
    answer.timings.draft_s = 1.6
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


class Window:
    """A terminal's screen whose lines fold when it becomes narrower, as most terminals' do."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._screen = pyte.Screen(columns, 10)

    def write(self, text: str) -> int:
        pyte.Stream(self._screen).feed(text)
        return len(text)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def resize(self, columns: int) -> None:
        shown, self.columns = self.lines, columns
        self._screen = pyte.Screen(columns, 10)
        self.write("\r\n".join(shown))


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Window:
    made = Window(90)
    monkeypatch.setattr(status_line, "_write", made.write)
    monkeypatch.setattr(status_line, "_columns", lambda: made.columns)
    return made


def test_a_window_that_becomes_narrower_keeps_one_line_of_progress(window: Window) -> None:
    window.write("Attached: words.txt\r\n")
    line = StatusLine(shown=True)
    line._text = format_prefill(512, 2745, 30.0, window.columns)
    line._draw()
    for columns in (50, 30, 60, 20):
        window.resize(columns)
        line._draw()
        assert [shown[:20] for shown in window.lines] == ["Attached: words.txt", window.lines[1][:20]]
        assert "Reading the" in window.lines[1]
        assert len(window.lines[1]) < columns
    line.erase()
    assert window.lines == ["Attached: words.txt"]


def test_what_is_printed_takes_the_place_of_the_line(window: Window) -> None:
    with StatusLine(shown=True) as line:
        line.say("Row 1 of 3")
        with aside():
            window.write("in memory: 3 tokens/s\r\n")
        assert window.lines[0] == "in memory: 3 tokens/s"
    assert window.lines == ["in memory: 3 tokens/s"]


def test_what_is_done_at_once_needs_no_word(window: Window) -> None:
    with StatusLine(shown=True) as line:
        line.waiting("Reading the prompt")
    assert window.lines == []
