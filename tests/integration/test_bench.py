"""`edgespec bench` with real models: in memory, streamed within a memory cap, interrupted."""

from __future__ import annotations

import contextlib
import json
import mmap
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from edgespec.bench.rows.capped import cap_kind
from edgespec.cli.main import main
from tests.desk import Desk
from tests.tiny import write_tiny
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
    assert page.count("<svg") == 3
    assert "in memory, tree 8" in page


def test_many_texts_at_once_beside_llama_cpp_itself(
    short_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model of two layers; llama.cpp's own program is not looked for outside of the environment."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    asked = [str(short_path), "--draft", "none", "--exact", *SMALL]
    assert main(["bench", *asked, "--parallel", "1,3", "--json", str(tmp_path / "bench.json")]) == 0
    out = capsys.readouterr().out
    assert " per seq. " in out
    assert " first s " in out
    document = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["name"]: row for row in document["rows"]}
    ours, theirs = "in memory, 3 texts", "llama.cpp, 3 texts"
    assert list(rows) == [
        "in memory, plain",
        "in memory, 1 text",
        ours,
        "llama.cpp, 1 text",
        theirs,
    ]
    assert [row["error"] for row in rows.values()] == [None] * 5
    assert (rows[ours]["texts_per_pass"], rows[ours]["tokens_per_pass"]) == (3, 3)
    assert rows[ours]["tokens_per_second_a_text"] == pytest.approx(
        rows[ours]["tokens_per_second"] / 3, rel=1e-4
    )
    assert rows[ours]["first_token_s"] > 0
    assert rows[ours]["identical"] is True
    assert rows[ours]["tokens"] == 24
    assert rows[theirs]["tokens_per_second"] > 0
    assert "measured through llama-cpp-python" in rows[theirs]["notes"][0]


def test_a_row_that_takes_too_long_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--draft", "none", "--prompts", "2", "--repetitions", "5", "--max-tokens", "200"]
    assert main(["bench", *asked, "--row-seconds", "1.5", "-o", "json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["rows"]
    assert (row["cut"], row["error"]) == (True, None)
    assert 0 < row["tokens"] < 2 * 5 * 200
    assert row["samples"]
    assert document["curves"]["memory"]["passes"]["64"]["s"] > 0


def test_a_synthetic_mixture_by_the_share_of_its_experts_in_memory(
    smol_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use a tiny model, so that making the mixture takes no time; two of its six layers are a third of it."""
    tiny = write_tiny(tmp_path / "tiny.gguf", "llama", smol_path)
    made = ["--synthesize", "moe:32x2,skew=1,locality=0.2", "--held", "60,40", "--draft", "none"]
    assert main(["bench", str(tiny), *made, *SMALL, "--json", "-", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert any("synthetic mixture of experts" in note for note in document["notes"])
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == [
        "in memory, plain (mixed, no limit)",
        "memory-mapped, plain (mixed)",
        "streamed, plain (mixed, whole layers)",
        "streamed, plain (mixed)",
        "streamed, plain (mixed, 40 % of the experts)",
        "streamed, plain (mixed, 60 % of the experts)",
    ]
    assert {row["error"] for row in rows.values()} == {None}
    fewer, more = list(rows.values())[-2:]
    assert fewer["held"] < more["held"] < 1
    assert fewer["hit_rate"] <= more["hit_rate"]
    assert fewer["streamed_bytes_per_pass"] >= more["streamed_bytes_per_pass"]
    assert (fewer["identical"], more["identical"]) == (True, True)
    assert list(rows.values())[2]["held"] is None


@pytest.mark.skipif(cap_kind() == "none", reason="takes root, or systemd for the user")
def test_a_widened_target_within_a_cap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capped = ["--synthesize", "220MiB", "--memory-cap", "340MiB", "--draft", "lookup"]
    assert main(["bench", *capped, *SMALL, "--json", "-", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert document["limits"] == {
        "memory_bytes": int((340 << 20) * 0.95),
        "cap_bytes": 340 << 20,
        "cap": cap_kind(),
    }
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == [
        "in memory, plain (widened, no limit)",
        "memory-mapped, plain (widened)",
        "streamed, plain (widened)",
        "streamed, tree 8 (widened)",
    ]
    assert [row["error"] for row in rows.values()] == [None] * 4
    assert [row["capped"] for row in rows.values()] == [False, True, True, True]
    assert all(0 < row["peak_bytes"] <= 340 << 20 for row in rows.values() if row["capped"])
    streamed, tree = rows["streamed, plain (widened)"], rows["streamed, tree 8 (widened)"]
    assert (streamed["exact"], streamed["identical"], tree["identical"]) == (True, True, True)
    assert streamed["streamed_bytes_per_pass"] > 10e6
    assert streamed["disk_share"] > 0
    assert streamed["compute_share"] > 0
    assert len(document["disk"]["bytes_per_s"]) == 2
    assert set(document["curves"]) == {"memory", "stream"}
    assert document["notes"][0].startswith("The target is widened")
    cache = user_cache_path("edgespec")
    assert [*cache.glob("bench-models/*"), *cache.glob("packs/*")] == []


# Reports the pages of the model that were cached before it read any, as tokens a second.
_COUNTS_CACHED_PAGES = """#!{python}
import ctypes, mmap, sys
with open(sys.argv[sys.argv.index("-m") + 1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    n_pages = -(-len(mapped) // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * n_pages)()
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), resident) == 0
    cached = sum(page & 1 for page in resident)
    while file.read(1 << 20):
        pass
print(f"eval time = 1 ms / 1 runs ( 1 ms per token, {{cached + 1}} tokens per second)")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for cached pages")
@pytest.mark.skipif(cap_kind() == "none", reason="takes root, or systemd for the user")
def test_a_capped_run_finds_nothing_cached_by_the_run_before(
    q4_drafter_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "llama-completion"
    program.write_text(_COUNTS_CACHED_PAGES.format(python=sys.executable))
    program.chmod(0o755)
    model = shutil.copy(q4_drafter_path, tmp_path / "model.gguf")  # that nothing else has mapped
    command = ["bench", str(model), "--draft", "lookup", "--memory-cap", "400MiB"]
    command += ["--compare", f"llama.cpp={program}", "--prompts", "3", "--repetitions", "1"]
    assert main([*command, "--max-tokens", "2", "--tree-budget", "2", "--json", "-", "--quiet"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    row = rows["llama.cpp, plain"]
    assert row["error"] is None
    assert len(row["samples"]) == 3
    assert max(row["samples"]) < 0.02 * model.stat().st_size / mmap.PAGESIZE


def test_a_row_that_fails_fails_the_bench_but_not_the_other_rows(
    smol_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "llama-completion"
    broken.write_text("#!/bin/sh\necho 'out of order' >&2\nexit 3\n")
    broken.chmod(0o755)
    asked = [str(smol_path), "--draft", "none", *SMALL]
    assert main(["bench", *asked, "--compare", f"llama.cpp={tmp_path}", "-o", "jsonl", "--quiet"]) == 1
    out, err = capsys.readouterr()
    good, bad = map(json.loads, out.splitlines())
    assert good["error"] is None
    assert good["tokens_per_second"] > 0
    assert "out of order" in bad["error"]
    assert err.splitlines()[-1] == "1 of 2 rows failed: llama.cpp, plain."


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


@pytest.mark.parametrize("form", ["md", "csv"])
def test_a_bench_stopped_before_its_first_row_prints_no_empty_table(form: str) -> None:
    with contextlib.closing(Desk("bench", "--draft", "none", *SMALL, "-o", form)) as desk:
        desk.wait_for("Row 1 of")
        desk.type("\x03")
        desk.wait_for("Stopped before the first row was measured.")
        assert desk.leave() == 130
        assert desk.screen[-1] == "Stopped before the first row was measured."
