"""What the command line writes to terminals and files."""

from __future__ import annotations

import io

import pytest

from edgespec.cli.terminal import (
    ResultStream,
    format_prefill,
    format_statistics,
)
from edgespec.errors import OutputError
from edgespec.generation import Generation, PassRecord


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_model_cannot_steer_the_terminal() -> None:
    terminal, file = FakeTerminal(), io.StringIO()
    for stream in (terminal, file):
        ResultStream(stream, "it").text("a\x1b[2J\tb\r\n")
    assert terminal.getvalue() == "a\ufffd[2J\tb\ufffd\n"
    assert file.getvalue() == "a\x1b[2J\tb\r\n"


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
    assert format_statistics(answer) == "5 tokens, 2.0 tokens/s, 2.50 tokens per pass, bound by disk, exact"
    answer.plain_pass_s, answer.timings.verify_s, answer.timings.io_wait_s = 0.8, 1.5, 0.5
    assert format_statistics(answer).endswith("bound by compute, 2.0x plain decoding, exact")


def test_prefill_line() -> None:
    assert format_prefill(0, 400, 0.0) == f"Reading the prompt {'─' * 20} 0 of 400"
    assert format_prefill(100, 400, 30.0).endswith(" 100 of 400, 1:30 left")
    assert format_prefill(100, 400, 1500.0, columns=40) == "Reading the prompt 100 of 400, 1:15:00 left"
