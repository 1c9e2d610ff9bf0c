"""The configuration file: what it sets, who comes before it, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.cli.main import main
from edgespec.generation.config import GenerationConfig
from tests.unit.talking import TalkingEngine


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "edgespec.toml"
    monkeypatch.setenv("EDGESPEC_CONFIG", str(path))
    return path


def test_flags_then_environment_then_file(
    file: Path, engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        'memory = "1GiB"\ndevice = ["A", "B"]\n'
        'top_k = 3\ntop-p = 0.5\nmin_p = 0.1\nstop = ["X"]\n[generate]\nmin-p = 0.2\n'
    )
    monkeypatch.setenv("EDGESPEC_TOP_P", "0.25")
    assert main(["generate", "-p", "Hi", "--memory", "2GiB"]) == 0
    assert (engine.loaded_with["memory"], engine.loaded_with["device"]) == (2 << 30, ["A", "B"])
    assert engine.asked[0][1] == GenerationConfig(top_k=3, top_p=0.25, min_p=0.2, stop=("X",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('memry = "1GiB"', "{file} sets 'memry', but there is no such setting.\nDid you mean memory?"),
        ("[chat]\nfoo = 1", "{file} sets 'chat.foo', but there is no such setting."),
        ("context = 4096.5", "context must be from 16 to 10000000, not 4096.5.\nIt is set in {file}.\n"),
        ("temperature = 'hot'", "temperature must be a number, not 'hot'.\nIt is set in {file}.\n"),
        ("quiet = 5", "quiet must be true or false, not 5.\nIt is set in {file}.\n"),
        ("stop = 'END'", "stop must be a list of strings, not 'END'.\nIt is set in {file}.\n"),
        ("max_tokens = [1]", "max_tokens must be an integer, not [1].\nIt is set in {file}.\n"),
        ("top_p = nan", "--top-p must be above 0 and at most 1, not nan.\nIt is set in {file}.\n"),
        (
            "seed = -5",
            "--seed must be from 0 to {seed}, not -5.\n-1 takes a new seed each time. It is set in {file}.\n",
        ),
        ("memory = 5", "--memory must have a unit: 5GiB, 5MiB or, for bytes, 5B.\nIt is set in {file}.\n"),
        ("model = ''", "--model must be a non-empty string, not ''.\nIt is set in {file}.\n"),
        (
            "tree_budget = 1.5",
            "--tree-budget must be from 1 to 4096 or auto, not '1.5'.\nIt is set in {file}.\n",
        ),
        *(
            (f"{name} = true", f"{name} must be {wanted}, not true.\nIt is set in {{file}}.\n")
            for name, wanted in (
                ("top_k", "an integer"),
                ("context", "from 16 to 10000000"),
                ("system", "text"),
            )
        ),
        ("[context]\na = 1", "context must be from 16 to 10000000, not {{'a': 1}}.\nIt is set in {file}.\n"),
        ("generate = 1", "generate must be a table, not 1.\nIt is set in {file}.\n"),
        (
            "presets = 1",
            "Presets must be tables in {file}.\nBegin each with a line such as [presets.reviewer].",
        ),
        ("[presets]\ncontext = 1", "Presets must be tables in {file}."),
        ("a = ", "{file} is not valid TOML: "),
    ],
)
def test_what_is_wrong_with_it(
    text: str, message: str, file: Path, engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert main(["generate", "-p", "Hi"]) == 2
    assert capsys.readouterr().err.startswith(f"Error: {message.format(file=file, seed=2**64 - 1)}")
    assert engine.asked == []


@pytest.mark.usefixtures("talking_session")
def test_other_names_of_an_option_and_the_table_of_run(file: Path, engine: TalkingEngine) -> None:
    file.write_text("temp = 0.5\n[chat]\ntop_k = 7\n")
    assert main(["generate", "-p", "Hi"]) == 0
    assert main(["run", "-p", "Hi"]) == 0
    asked = [(config.temperature, config.top_k) for _, config, _ in engine.asked]
    assert asked == [(0.5, 0), (0.5, 7)]


def test_config_shows_where_values_come_from(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("temperature = 0.5\n")
    monkeypatch.setenv("EDGESPEC_CONTEXT", "99")
    monkeypatch.setenv("EDGESPEC_API_KEY", "hush")
    assert main(["config", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(file)
    assert found["settings"]["chat"]["temperature"] == {"value": 0.5, "from": str(file)}
    assert found["settings"]["serve"]["context"] == {
        "value": "99",
        "from": "EDGESPEC_CONTEXT in the environment",
    }
    assert found["settings"]["serve"]["api-key"]["value"] == "(not shown)"
    assert found["settings"]["generate"].keys() == {"temperature", "context"}
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"File: {file}"
    changed = [line.split() for line in lines if line.startswith(("temperature", "context"))]
    assert changed == [
        ["context", "99", "EDGESPEC_CONTEXT", "in", "the", "environment"],
        ["temperature", "0.5", str(file)],
    ]
    assert len(lines) == 6  # nothing that was left alone
    assert main(["config", "--path"]) == 0
    assert capsys.readouterr().out == f"{file}\n"


def test_a_file_that_is_named_has_to_be_there(
    tmp_path: Path, engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none.toml"
    monkeypatch.setenv("EDGESPEC_CONFIG", str(missing))
    what = f"Error: EDGESPEC_CONFIG names {missing}, which does not exist.\n"
    for command in (["generate", "-p", "Hi"], ["models", "list"], ["config"]):
        assert main(command) == 2
        assert capsys.readouterr().err.startswith(what)
    assert engine.asked == []
    for command in (["generate", "--help"], ["--version"], ["config", "--path"]):
        assert main(command) == 0
    missing.touch()
    assert main(["generate", "-p", "Hi"]) == 0


def test_a_byte_order_mark_is_no_part_of_the_file(file: Path, engine: TalkingEngine) -> None:
    file.write_text("top_k = 3", encoding="utf-8-sig")
    assert main(["generate", "-p", "Hi"]) == 0
    assert engine.asked[0][1] == GenerationConfig(top_k=3)


def test_the_model_may_stand_in_the_file(file: Path, engine: TalkingEngine) -> None:
    file.write_text('model = "a.gguf"\n')
    assert main(["generate", "-p", "Hi"]) == 0
    assert engine.loaded_with["model"] == "a.gguf"
    assert main(["generate", "What is this?"]) == 0
    assert engine.loaded_with["model"] == "a.gguf"
    assert main(["generate", "b.gguf", "What is this?"]) == 0
    assert engine.loaded_with["model"] == "b.gguf"


def test_a_preset_goes_before_the_rest_of_the_file(
    file: Path, engine: TalkingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big.gguf").write_bytes(b"GGUF")
    file.write_text(
        "temperature = 0.1\nmax-tokens = 5\n[generate]\ntop_k = 7\n[presets.pirate]\nsystem = 'Ahoy.'\n"
        f"temp = 0.9\nstop = ['X']\nmemory = '2GiB'\nmodel = '{tmp_path / 'big.gguf'}'\n"
    )
    assert main(["generate", "--preset", "pirate", "-p", "Hi", "--memory", "3GiB"]) == 0
    prompt, config, _ = engine.asked[-1]
    assert prompt == [{"role": "system", "content": "Ahoy."}, {"role": "user", "content": "Hi"}]
    assert config == GenerationConfig(temperature=0.9, max_tokens=5, top_k=7, stop=("X",))
    assert engine.loaded_with["memory"] == 3 << 30
    assert engine.loaded_with["model"] == str(tmp_path / "big.gguf")
    monkeypatch.setenv("EDGESPEC_TEMPERATURE", "0.3")
    assert main(["generate", "--preset", "pirate", "smollm2-135m", "Hi"]) == 0
    assert engine.asked[-1][1].temperature == 0.3
    assert engine.loaded_with["model"] == "smollm2-135m"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("pirate", "There is no preset 'pirat'.\nDid you mean pirate?"),
        ("brief", "There is no preset 'pirat'.\nA preset is a table [presets.pirat] in {file}."),
        (
            "pirat]\ntemprature = 1\n[chat",
            "{file} sets 'presets.pirat.temprature', but there is no such setting.",
        ),
        ("pirat]\ntemperature = -1\n[chat", "--temperature must be from 0 to 100, not -1."),
    ],
)
@pytest.mark.parametrize("command", [["generate", "-p", "Hi"], ["serve", "--port", "0"]])
def test_what_is_wrong_with_a_preset(
    command: list[str], table: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f"[presets.{table}]\n")
    assert main([*command, "--preset", "pirat"]) == 2
    assert capsys.readouterr().err.startswith(f"Error: {message.format(file=file, seed=2**64 - 1)}")


def test_config_names_the_presets(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("[presets.pirate]\nsystem = 'Ahoy.'\n[presets.brief]\n")
    assert main(["config"]) == 0
    assert "Presets: pirate, brief" in capsys.readouterr().out.splitlines()
