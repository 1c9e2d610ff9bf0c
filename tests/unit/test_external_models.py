"""Models that other programs have: found where they are, usable by name, and never removed."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from edgespec.cli.main import main
from edgespec.cli.prompt import is_model
from edgespec.cli.removal import plan_removal
from edgespec.errors import ModelFileError
from edgespec.files.user_folders import data_folder
from edgespec.models.hub import catalog
from edgespec.models.hub.external import display_name, external_models, find_external
from tests.links import needs_links

MEDIA = "application/vnd.ollama.image"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without models in it."""
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("XDG_CACHE_HOME", "WIN_PD_OVERRIDE_LOCAL_APPDATA"):
        monkeypatch.setenv(name, str(tmp_path / ".cache"))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def gguf(path: Path, size: int = 64) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF" + bytes(size - 4))
    return path


def pulled_by_ollama(store: Path, name: str, tag: str, digits: str, *, data: bytes = b"GGUF....") -> Path:
    blob = store / "blobs" / f"sha256-{digits * 64}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    layers = [
        {"mediaType": f"{MEDIA}.template", "digest": "sha256:1", "size": 1},
        {"mediaType": f"{MEDIA}.model", "digest": f"sha256:{digits * 64}", "size": len(data)},
    ]
    manifest = store / "manifests" / name / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


def test_ollama(home: Path) -> None:
    store = home / ".ollama" / "models"
    library = "registry.ollama.ai/library"
    small = pulled_by_ollama(store, f"{library}/llama3.2", "latest", "a")
    large = pulled_by_ollama(store, f"{library}/qwen3", "8b-q4_K_M", "b")
    theirs = pulled_by_ollama(store, "hf.co/org/Repo-GGUF", "Q8_0", "c")
    pulled_by_ollama(store, f"{library}/safetensors", "latest", "d", data=b"{}")
    pulled_by_ollama(store, f"{library}/gone", "latest", "e").unlink()
    (store / "manifests" / library / "broken").mkdir()
    (store / "manifests" / library / "broken" / "latest").write_text("[1")
    found = {model.name: (model.path, model.quant) for model in external_models()}
    assert found == {
        "llama3.2:latest": (small, ""),
        "qwen3:8b-q4_K_M": (large, "Q4_K_M"),
        "hf.co/org/Repo-GGUF:Q8_0": (theirs, "Q8_0"),
    }
    assert catalog.find("llama3.2", fetch=False) == small
    assert catalog.find("QWEN3:8B-Q4_K_M", fetch=False) == large
    assert catalog.hub_name_of("qwen3:8b-q4_K_M") is None, "what Ollama has is not downloaded again"
    assert catalog.hub_name_of("qwen3:8b-q8_0") is not None
    assert display_name(large) == "qwen3:8b-q4_K_M"


def test_a_manifest_cannot_lead_out_of_the_store(home: Path) -> None:
    store = home / ".ollama" / "models"
    gguf(home / ".ollama" / "elsewhere.gguf")
    pulled_by_ollama(store, "registry.ollama.ai/library/evil", "latest", "a")
    manifest = store / "manifests/registry.ollama.ai/library/evil/latest"
    manifest.write_text(manifest.read_text().replace(f"sha256:{'a' * 64}", "../../elsewhere.gguf"))
    assert external_models() == []


def test_lm_studio(home: Path) -> None:
    (home / ".lmstudio-home-pointer").write_text(str(home / "studio"))
    one = gguf(home / "studio/models/bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q4_K_M.gguf")
    gguf(home / "studio/models/bartowski/Llama-3.2-1B-Instruct-GGUF/mmproj-model-f16.gguf")
    parts = [gguf(home / f".lmstudio/models/org/Big-GGUF/big-Q8_0-0000{n}-of-00002.gguf") for n in (1, 2)]
    found = {model.name: (model.source, model.path, model.n_bytes) for model in external_models()}
    assert found == {
        "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M": ("lm studio", one, 64),
        "org/Big-GGUF:Q8_0": ("lm studio", parts[0], 128),
    }
    # As well as by the same name on the Hub, so that nothing is downloaded twice.
    assert catalog.find("org/Big-GGUF:q8_0", fetch=False) == parts[0]
    assert catalog.find("org/Big-GGUF", fetch=False) == parts[0]


@pytest.mark.parametrize("settings", ['{"downloadsFolder": "FOLDER"}', '{"downloadsFolder": 3}', "{", "[]"])
def test_the_folder_in_lm_studios_settings(settings: str, home: Path) -> None:
    there = gguf(home / "disk" / "org" / "Repo" / "a-Q4_0.gguf")
    (home / ".lmstudio").mkdir()
    (home / ".lmstudio" / "settings.json").write_text(settings.replace("FOLDER", (home / "disk").as_posix()))
    assert [model.path for model in external_models()] == ([there] if "FOLDER" in settings else [])


def test_llama_cpp(home: Path) -> None:
    cache = home / ".cache" / "llama.cpp"
    old = gguf(cache / "ggml-org_gemma-3-1b-it-GGUF_gemma-3-1b-it-Q4_K_M.gguf")
    (cache / "manifest=ggml-org=gemma-3-1b-it-GGUF=latest.json").write_text("{}")
    plain = gguf(cache / "some_file.gguf")
    new = gguf(cache / "models--org--New-GGUF" / "snapshots" / "abc" / "new-Q4_0.gguf")
    found = {model.name: model.path for model in external_models()}
    assert found == {"ggml-org/gemma-3-1b-it-GGUF:Q4_K_M": old, "some_file": plain, "org/New-GGUF:Q4_0": new}
    # It is laid out like the Hub's cache, and still is not EdgeSpec's to remove.
    for path in (old, plain, new):
        removal = plan_removal(path)
        assert removal.files == []
        assert removal.kept == [f"{path} is in llama.cpp's cache and stays."]


def test_folders_of_ones_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = home / "one", home / "two"
    alone = gguf(one / "deep" / "alone-Q4_0.gguf")
    twins = [gguf(one / place / "twin.gguf") for place in ("a", "b")]
    other = gguf(two / "other.gguf")
    gguf(one / ".hidden" / "x.gguf")
    gguf(one / "1/2/3/4/5/too_deep.gguf")
    with contextlib.suppress(OSError):  # on Windows, that takes a right
        (one / "link.gguf").symlink_to(alone)
    monkeypatch.setenv("EDGESPEC_MODELS_FOLDER", os.pathsep.join([str(one), str(two), "/nowhere"]))
    assert {model.name for model in external_models()} == {"alone-Q4_0", "a/twin", "b/twin", "other"}
    assert catalog.find("alone-q4_0") == alone
    assert catalog.find("a/twin", fetch=False) == twins[0]
    assert catalog.find("other.gguf") == other
    assert find_external("twin") is None
    assert is_model("other")


@needs_links
def test_a_link_that_leads_nowhere_is_no_model(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = gguf(home / "own" / "small-Q4_0.gguf")
    there.with_name("gone.gguf").symlink_to(home / "gone")
    there.with_name("loop.gguf").symlink_to("loop.gguf")
    monkeypatch.setenv("EDGESPEC_MODELS_FOLDER", str(home / "own"))
    assert [model.path for model in external_models()] == [there]
    assert catalog.find(home / "own", fetch=False) == there
    assert main(["models", "list"]) == 0
    assert "small-Q4_0" in capsys.readouterr().out


def test_without_a_folder_of_ones_own_there_is_one_in_the_data_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_MODELS_FOLDER", "")  # so that it is put back after this test
    monkeypatch.delenv("EDGESPEC_MODELS_FOLDER")
    folder = data_folder() / "models"
    assert main(["config"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"Models folder: {folder} (does not exist)"
    path = gguf(folder / "dropped.gguf")
    assert catalog.find("dropped") == path
    assert main(["config"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"Models folder: {folder}"
    monkeypatch.setenv("EDGESPEC_MODELS_FOLDER", str(home / "elsewhere"))
    assert find_external("dropped") is None


def test_a_name_that_is_nearly_right(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf(home / "models" / "zephyr-7b.gguf")
    monkeypatch.setenv("EDGESPEC_MODELS_FOLDER", str(home / "models"))
    with pytest.raises(ModelFileError, match=r"Did you mean zephyr-7b\?"):
        catalog.find("zephir-7b")


def test_they_are_listed_with_their_places(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blob = pulled_by_ollama(home / ".ollama" / "models", "registry.ollama.ai/library/mistral", "7b", "a")
    assert main(["list"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("mistral:7b"))
    assert line.split() == ["mistral:7b", "8", "B", "ollama", str(blob)]
    assert main(["models", "list", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert {
        "name": "mistral:7b",
        "source": "ollama",
        "path": str(blob),
        "bytes": 8,
        "quantization": "",
        "projector": None,
    } in models
    assert main(["rm", "mistral:7b", "--yes"]) == 0
    out, err = capsys.readouterr()
    assert err == f"{blob} is in ollama's store and stays. To remove it: ollama rm mistral:7b\n"
    assert out == "Nothing removed.\n"
    assert blob.exists()


@pytest.mark.parametrize("value", ['"MODELS"', '["MODELS", "/nowhere"]'])
def test_a_folder_in_the_configuration_file(
    value: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf(home / "models" / "mine.gguf")
    file = home / "edgespec.toml"
    monkeypatch.setenv("EDGESPEC_CONFIG", str(file))
    monkeypatch.setenv("EDGESPEC_MODELS_FOLDER", "")  # so that it is put back after this test
    monkeypatch.delenv("EDGESPEC_MODELS_FOLDER")
    file.write_text(f"models_folder = {value}\n".replace("MODELS", (home / "models").as_posix()))
    assert main(["list"]) == 0
    assert any(line.split()[0] == "mine" for line in capsys.readouterr().out.splitlines())
    assert main(["config"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(f"Models folder: {home / 'models'}")


def test_a_folder_of_the_wrong_kind(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / "edgespec.toml"
    monkeypatch.setenv("EDGESPEC_CONFIG", str(file))
    file.write_text("models_folder = 3\n")
    assert main(["list"]) == 2
    assert capsys.readouterr().err.startswith(
        f"Error: models_folder must be a folder or a list of folders, not 3 in {file}."
    )
