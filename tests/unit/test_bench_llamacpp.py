"""Rows that llama.cpp's own programs measure."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.rows import llamacpp
from edgespec.bench.rows.capped import CappedResult, run_capped
from edgespec.bench.rows.llamacpp import LlamaCppBatchRows, LlamaCppSettings
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.processes.children import python_command


def program(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_llama_cpp_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UsageError, match="There is no llama-completion or llama-cli on the PATH"):
        llamacpp.find_programs("llama.cpp", speculative=False)
    cli = program(tmp_path / "bin" / "llama-cli")
    assert llamacpp.find_programs("llama.cpp", speculative=False) == llamacpp.LlamaCppPrograms(cli, None)
    with pytest.raises(UsageError, match="There is no llama-speculative-simple on the PATH"):
        llamacpp.find_programs("llama.cpp", speculative=True)
    second = program(tmp_path / "bin" / "llama-speculative-simple")
    for given in (f"llama.cpp={tmp_path}", f"llama.cpp={cli}", f"llama.cpp={tmp_path / 'bin'}"):
        assert llamacpp.find_programs(given, speculative=True) == llamacpp.LlamaCppPrograms(cli, second)
    with pytest.raises(UsageError, match="does not exist"):
        llamacpp.find_programs(f"llama.cpp={tmp_path / 'none'}", speculative=True)
    with pytest.raises(UsageError, match="Comparing with 'ollama' is not supported"):
        llamacpp.find_programs("ollama", speculative=True)


def shared(tmp_path: Path, **changes: Any) -> LlamaCppSettings:
    settings: dict[str, Any] = {
        "target": tmp_path / "big.gguf",
        "n_bytes": 10**9,
        "cap": 10**9,
        "context": 512,
        "threads": 2,
        "config": GenerationConfig(seed=1, max_tokens=8),
        "repetitions": 2,
        "row_seconds": 60.0,
        "marks": ("widened",),
    }
    return LlamaCppSettings(**settings | changes)


class RecordedRuns:
    """Run programs without a cap on memory, and keep their command lines."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> CappedResult:
        self.commands.append(command)
        return run_capped(command, None, **options)


PRINTS = """cat <<'END'
perf_print: prompt eval time =   100.00 ms /    20 tokens (    5.00 ms per token,   200.00 tokens per second)
perf_print:        eval time =   500.00 ms /    10 runs   (   50.00 ms per token,    20.00 tokens per second)
END
"""


def test_llama_cpp_rows(tmp_path: Path) -> None:
    plain = program(tmp_path / "llama-completion", PRINTS)
    simple = program(
        tmp_path / "llama-speculative-simple", "echo 'decoded   33 tokens in 3 s, speed:   11.000 t/s'\n"
    )
    programs = llamacpp.LlamaCppPrograms(plain, simple)
    others = llamacpp.LlamaCppRows(programs, tmp_path / "small.gguf", shared(tmp_path))
    assert [spec.name for spec in others.specs] == [
        "llama.cpp, plain (widened)",
        *(f"llama.cpp, draft {length} (widened)" for length in (4, 8, 16)),
    ]
    run = RecordedRuns()
    rows = [others.measure(spec, ["one", "two"], run) for spec in others.specs[:2]]
    assert [row.samples for row in rows] == [[20.0, 20.0], [pytest.approx(11.0)] * 2]
    assert rows[1].drafter == "small"
    assert all("--no-repack" in command for command in run.commands)
    assert [command[-1] for command in run.commands] == ["one", "two"] * 4
    program(plain, "echo 'no model' >&2; exit 3\n")
    assert others.measure(others.specs[0], ["one"], run).error == "Ended with status 3: no model"
    program(plain, "echo fine\n")
    assert others.measure(others.specs[0], ["one"], run).error == "It did not report its speed."


def batches(folder: Path | None, tmp_path: Path, **changes: Any) -> LlamaCppBatchRows:
    return LlamaCppBatchRows(folder, [1, 16], shared(tmp_path, **changes))


def test_llama_cpp_decodes_batches_with_its_own_program(tmp_path: Path) -> None:
    tool = program(
        tmp_path / "bin" / "llama-batched-bench",
        "echo 'loading' >&2\n"
        """echo '{"pp": 2, "tg": 8, "pl": 16, "t_pp": 0.5, "t_tg": 2.0, "speed_tg": 64.0}'\n""",
    )
    others = batches(tmp_path, tmp_path)
    assert [spec.name for spec in others.specs] == [
        "llama.cpp, 1 text (widened)",
        "llama.cpp, 16 texts (widened)",
    ]
    run = RecordedRuns()
    row = others.measure(others.specs[1], ["seven b", "seven b"], run)
    assert row.error is None
    assert (row.texts, row.samples, row.tokens_per_second_a_text) == (16, [64.0, 64.0], 4.0)
    assert row.first_token_s == 0.5 + 2.0 / 8, "the prompts, and one pass"
    assert row.notes == []
    assert len(run.commands) == 2
    assert run.commands[0][0] == str(tool)
    words = " ".join(run.commands[0])
    assert "-c 4096 -npp 2 -ntg 8 -npl 16 -t 2 --no-repack" in words
    assert "--no-repack" not in " ".join(batches(tmp_path, tmp_path, cap=None)._command(1, 2))
    program(tool, "echo 'no model' >&2; exit 3\n")
    assert others.measure(others.specs[0], ["one"], run).error == "Ended with status 3: no model"
    program(tool, "echo fine\n")
    assert others.measure(others.specs[0], ["one"], run).error == "It did not report its speed."
    assert "could not be rendered" in str(others.measure(others.specs[0], [], run).error)


def test_without_the_program_the_bindings_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    others = batches(None, tmp_path)
    command = others._command(16, 20)
    own = python_command("edgespec.llama.plain_batches")
    assert command[: len(own)] == own
    assert " ".join(command[len(own) + 2 :]) == "--prompt 20 --tokens 8 --texts 16 --threads 2 --no-repack"
    answered = others.measure(
        others.specs[0],
        ["one"],
        lambda *_a, **_k: CappedResult('{"t_pp": 1, "t_tg": 8, "speed_tg": 1}', 0, 0, 1.0),
    )
    assert answered.notes == ["There is no llama-batched-bench: measured through llama-cpp-python."]


def test_the_folder_of_the_programs(tmp_path: Path) -> None:
    tool = program(tmp_path / "bin" / "llama-cli")
    assert llamacpp.program_folder(None) is None
    assert llamacpp.program_folder("llama.cpp") is None
    assert llamacpp.program_folder(f"llama.cpp={tmp_path}") == tmp_path
    assert llamacpp.program_folder(f"llama.cpp={tool}") == tmp_path / "bin"
