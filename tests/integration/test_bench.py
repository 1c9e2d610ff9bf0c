"""`edgespec bench` with real models: in memory, streamed, interrupted."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli.main import main
from tests.desk import Desk
from tests.waiting import PATIENCE_S

SMALL = ["--prompts", "1", "--repetitions", "1", "--max-tokens", "8", "--tree-budget", "8"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("at_a_desk")]


def test_the_default_model_in_memory(
    q4_drafter_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "bench.json"), "--html", str(tmp_path / "bench.html")]
    assert main(["bench", "--draft", str(q4_drafter_path), "--exact", *SMALL, *files]) == 0
    out, err = capsys.readouterr()
    assert [line.split("|")[1].strip() for line in out.splitlines()] == [
        "row",
        "-" * len("in memory, tree 8"),
        "in memory, plain",
        "in memory, tree 8",
    ]
    assert "in memory, tree 8: " in err
    document = json.loads((tmp_path / "bench.json").read_text())
    plain, tree = document["rows"]
    assert (plain["error"], tree["error"]) == (None, None)
    assert (plain["identical"], tree["identical"]) == (True, True)
    assert (plain["exact"], plain["tokens_per_pass"], plain["nodes_per_pass"]) == (True, 1.0, 1.0)
    assert 1 < tree["tokens_per_pass"] <= tree["nodes_per_pass"] <= 8
    assert plain["tokens_per_second"] > 0
    assert plain["draft_s"] < plain["pass_s"] <= plain["round_s"]
    assert plain["compute_share"] > 0
    assert plain["disk_share"] is None
    assert plain["peak_rss_bytes"] > 100e6
    assert list(document["curves"]["memory"]["passes"]) == ["1", "2", "4", "8", "16", "32", "48", "64"]
    page = (tmp_path / "bench.html").read_text()
    assert page.count("<svg") == 1
    assert "in memory, tree 8" in page


def test_many_texts_at_once(short_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(short_path), "--draft", "none", "--exact", *SMALL]
    assert main(["bench", *asked, "--parallel", "1,3", "--json", str(tmp_path / "bench.json")]) == 0
    out = capsys.readouterr().out
    assert " per seq. " in out
    assert " first s " in out
    document = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ["in memory, plain", "in memory, 1 text", "in memory, 3 texts"]
    assert [row["error"] for row in rows.values()] == [None] * 3
    three = rows["in memory, 3 texts"]
    assert (three["texts_per_pass"], three["tokens_per_pass"]) == (3, 3)
    assert three["tokens_per_second_a_text"] == pytest.approx(three["tokens_per_second"] / 3, rel=1e-4)
    assert three["first_token_s"] > 0
    assert three["identical"] is True
    assert three["tokens"] == 24


def test_a_row_that_takes_too_long_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--draft", "none", "--prompts", "2", "--repetitions", "5", "--max-tokens", "200"]
    assert main(["bench", *asked, "--row-seconds", "1.5", "--json", "-", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["rows"]
    assert (row["cut"], row["error"]) == (True, None)
    assert 0 < row["tokens"] < 2 * 5 * 200
    assert row["samples"]
    assert document["curves"]["memory"]["passes"]["64"]["s"] > 0


def test_a_target_that_does_not_fit_its_memory(
    wide_path: Path, q4_drafter_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limited = [str(wide_path), "--memory", "260MiB", "--draft", "lookup", "--exact"]
    assert main(["bench", *limited, *SMALL, "--json", "-", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert document["settings"]["memory_bytes"] == 260 << 20
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == [
        "in memory, plain (widened, no limit)",
        "memory-mapped, plain (widened)",
        "streamed, plain (widened)",
        "streamed, tree 8 (widened)",
    ]
    assert [row["error"] for row in rows.values()] == [None] * 4
    streamed, tree = rows["streamed, plain (widened)"], rows["streamed, tree 8 (widened)"]
    assert (streamed["exact"], streamed["identical"], tree["identical"]) == (True, True, True)
    assert streamed["streamed_bytes_per_pass"] > 10e6
    assert streamed["disk_share"] > 0
    assert streamed["compute_share"] > 0
    assert len(document["disk"]["bytes_per_s"]) == 2
    assert set(document["curves"]) == {"memory", "stream"}


def test_a_row_that_fails_fails_the_bench_but_not_the_other_rows(
    wide_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too little memory to stream in does not matter to mapped weights."""
    asked = [str(wide_path), "--draft", "none", "--memory", "20MiB", *SMALL, "--json", "-", "--quiet"]
    assert main(["bench", *asked]) == 1
    out, err = capsys.readouterr()
    rows = json.loads(out)["rows"]
    assert rows[0]["tokens_per_second"] > 0
    assert "memory" in rows[-1]["error"]
    assert "streamed, plain (widened)" in err.splitlines()[-1]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_prints_the_rows_that_are_done(tmp_path: Path) -> None:
    arguments = ["--draft", "lookup", *SMALL, "--tree-budget", "16"]
    arguments += ["--json", str(tmp_path / "bench.json")]
    process = subprocess.Popen(
        [sys.executable, "-m", "edgespec", "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("in memory, plain: "):
            break
    else:
        pytest.fail("".join(said))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "in memory, plain" in out
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["interrupted"]
    assert 1 <= len(document["rows"]) < 3


def test_a_bench_stopped_before_its_first_row_prints_no_empty_table() -> None:
    with contextlib.closing(Desk("bench", "--draft", "none", *SMALL)) as desk:
        desk.wait_for("Row 1 of")
        desk.type("\x03")
        desk.wait_for("Stopped before the first row was measured.")
        assert desk.leave() == 130
        assert desk.screen[-1] == "Stopped before the first row was measured."
