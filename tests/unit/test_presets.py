"""Presets: saved from options, used as defaults, listed and removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.cli import presets
from edgespec.cli.main import main
from tests.unit.talking import TalkingEngine


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config.toml"
    file.touch()
    monkeypatch.setenv("EDGESPEC_CONFIG", str(file))
    return tmp_path / "presets"


def test_a_preset_gives_what_is_not_given(engine: TalkingEngine, tmp_path: Path) -> None:
    system = tmp_path / "system.txt"
    system.write_text("Ahoy.\n")
    saved = ["--system-file", str(system), "--temperature", "0.5", "--stop", "X", "--memory", "2GiB"]
    assert main(["presets", "save", "pirate", *saved]) == 0
    assert main(["generate", "--preset", "pirate", "Hi", "--memory", "3GiB"]) == 0
    prompt, config, _ = engine.asked[-1]
    assert prompt == [{"role": "system", "content": "Ahoy."}, {"role": "user", "content": "Hi"}]
    assert (config.temperature, config.stop) == (0.5, ("X",))
    assert engine.loaded_with["memory"] == 3 << 30


def test_a_preset_goes_before_the_configuration_file(
    engine: TalkingEngine, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_folder.parent / "config.toml").write_text("temperature = 0.1\nmax-tokens = 5\n")
    assert main(["presets", "save", "warm", "--temperature", "0.9"]) == 0
    assert main(["generate", "--preset", "warm", "Hi"]) == 0
    assert (engine.asked[-1][1].temperature, engine.asked[-1][1].max_tokens) == (0.9, 5)
    monkeypatch.setenv("EDGESPEC_TEMPERATURE", "0.3")
    assert main(["generate", "--preset", "warm", "Hi"]) == 0
    assert engine.asked[-1][1].temperature == 0.3


def test_a_preset_is_served(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    presets.write("far", {"model": str(own_folder / "far.gguf"), "system": "Ahoy.", "temperature": 0.9})
    assert main(["serve", "--preset", "far", "--port", "0"]) == 1
    assert f"{own_folder / 'far.gguf'} does not exist" in capsys.readouterr().err
    presets.write("hot", {"temperature": -1})
    assert main(["serve", "--preset", "hot"]) == 2
    assert "--temperature must be" in capsys.readouterr().err


def test_a_preset_names_a_model_that_an_argument_replaces(
    engine: TalkingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.gguf").write_bytes(b"GGUF")
    Path("other.gguf").write_bytes(b"GGUF")
    assert main(["presets", "save", "big", "mine.gguf"]) == 0
    assert main(["generate", "--preset", "big", "-p", "Hi"]) == 0
    assert engine.loaded_with["model"] == str(tmp_path / "mine.gguf")  # from any folder
    assert main(["generate", "--preset", "big", "other.gguf", "Hi"]) == 0
    assert engine.loaded_with["model"] == "other.gguf"


def test_listing_showing_and_removing(capsys: pytest.CaptureFixture[str], own_folder: Path) -> None:
    assert main(["presets", "list"]) == 0
    assert (
        capsys.readouterr().err == "No presets yet. To save one: edgespec presets save NAME --system TEXT\n"
    )
    assert main(["presets", "save", "brief", "--system", 'Be "brief".', "-n", "9"]) == 0
    assert capsys.readouterr().err == (f"Wrote {own_folder / 'brief.toml'}. To use it: --preset brief\n")
    assert main(["presets", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "NAME   MODEL  SETTINGS",
        'brief  -      system Be "brief"., max-tokens 9',
    ]
    assert main(["presets", "show", "brief"]) == 0
    assert capsys.readouterr().out == 'system = "Be \\"brief\\"."\nmax-tokens = 9\n'
    assert main(["presets", "show", "brief", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"system": 'Be "brief".', "max-tokens": 9}
    assert main(["presets", "rm", "brief"]) == 0
    assert not (own_folder / "brief.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--preset", "brif", "Hi"], "There is no preset 'brif'.\nDid you mean brief?"),
        (["presets", "rm", "nope"], "There is no preset 'nope'.\n'edgespec presets list' lists them."),
        (["presets", "save", "a/b", "-n", "1"], "'a/b' is not a valid preset name."),
        (["presets", "save", "brief", "-n", "1"], "The preset 'brief' already exists.\nAdd --force"),
        (["presets", "save", "new"], "Nothing to save."),
        (["presets", "save", "new", "--memory", "12"], "The size 12 has no unit."),
        (["presets", "save", "new", "--temperature", "-1"], "--temperature must be from 0 to 100, not -1."),
    ],
)
def test_mistakes_are_explained(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], engine: TalkingEngine
) -> None:
    presets.write("brief", {"max-tokens": 3})
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
    assert engine.asked == []


def test_a_name_that_no_option_has_is_refused(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str], own_folder: Path
) -> None:
    presets.write("odd", {"temprature": 1})
    assert main(["generate", "--preset", "odd", "Hi"]) == 2
    assert capsys.readouterr().err == (
        f"Error: {own_folder / 'odd.toml'} sets 'temprature', but there is no such setting.\n"
        "Did you mean temperature?\n"
    )


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30), st.lists(st.text("ab\"\\\n'"))
)
def test_any_text_comes_back(text: str, stops: list[str]) -> None:
    presets.write("any", {"system": text, "stop": stops, "seed": 7, "raw": True, "temperature": 0.25})
    assert presets.read("any") == {"system": text, "stop": stops, "seed": 7, "raw": True, "temperature": 0.25}
