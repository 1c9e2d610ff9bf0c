"""`edgespec models` against a Hub on loopback: list, show from the first megabytes, remove."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.widen import widen
from edgespec.base.progress import no_progress
from edgespec.config import Config
from edgespec.drafting.pair_check import examine_pair
from edgespec.errors import HubError
from edgespec.files.user_folders import cache_folder, nearest_existing
from edgespec.images.projector import find_projector
from edgespec.machine.cores import default_threads, thread_counts
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.types import BLOCK_SIZES
from edgespec.models.hub import catalog
from edgespec.models.hub.inspection import inspect_model, same_vocabulary
from edgespec.models.hub.registry import REGISTERED, DrafterPair, PairRegistry
from edgespec.models.hub.repository import Hub
from edgespec.offload.packing.index import packs_folder
from edgespec.planning.report.model_report import plan_for
from edgespec.profiles.store import DiskProfile, ProfileStore, disk_key, machine_identity
from tests.fuzz.headers import small_model
from tests.hub_server import HubServer
from tests.links import put
from tests.program import run_captured as run
from tests.tiny_images import write_projector

REPO = "acme/Small-GGUF"
Q4, Q8 = "Small-Q4_0.gguf", "Small-Q8_0.gguf"


@pytest.fixture
def server(smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    data = small_model(smol_path).to_bytes()
    with HubServer({REPO: {Q4: data, Q8: data + bytes(4096)}}) as server:
        hub = Hub(server.url, tmp_path / "hub")
        for name in ("from_environment", "without_token"):
            monkeypatch.setattr(Hub, name, classmethod(lambda _: hub))
        yield server


def test_a_model_on_the_hub_is_shown_and_not_downloaded(
    server: HubServer, smol_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The real header, whose vocabulary alone is over a megabyte, before 96 MB that must stay where they are.
    server.repositories[REPO] = {Q4: smol_path.read_bytes()}
    code, out, _ = run(capsys, "models", "show", f"{REPO}:Q4_0", "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["here"], facts["path"]) == (False, None)
    assert (facts["architecture"], facts["layers"], facts["vocabulary"]) == ("llama", 30, 49152)
    assert facts["bytes"] == smol_path.stat().st_size
    assert facts["parameters"] == 134_515_008
    assert facts["memory"]["verdict"] == "fits"
    assert {row["tensors"] for row in facts["quantization"]} >= {"embedding", "attention", "feed-forward"}
    asked = [request.range for request in server.downloads()]
    assert asked[0] == "bytes=0-2097151"
    assert len(asked) <= 3
    assert not (tmp_path / "hub").exists()


def test_a_long_header_is_read_in_steps(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.models.hub.inspection._FIRST_BYTES", 1000)
    data = server.repositories[REPO][Q4]
    (tmp_path / "local.gguf").write_bytes(data)
    (header,) = inspect_model(f"{REPO}:Q4_0", hub=Hub(server.url, tmp_path / "hub")).headers
    local = read_header(tmp_path / "local.gguf")
    assert (header.fingerprint, header.tensors) == (local.fingerprint, local.tensors)
    assert len(server.downloads()) > 1
    assert sum(int(r.range.split("-")[1]) for r in server.downloads()[-1:] if r.range) < len(data)


@pytest.mark.parametrize(
    "lacks",
    [set(), {"sizes"}, {"ranges"}, {"sizes", "ranges", "HEAD", "commit", "checksum"}, {"endurance"}],
    ids=lambda parts: " ".join(sorted(parts)),
)
def test_the_header_is_read_from_mirrors_too(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: set[str]
) -> None:
    monkeypatch.setattr("edgespec.models.hub.inspection._FIRST_BYTES", 1000)
    server.lacks = frozenset(lacks)
    data = server.repositories[REPO][Q4]
    (tmp_path / "local.gguf").write_bytes(data)
    (header,) = inspect_model(f"{REPO}:Q4_0", hub=Hub(server.url, tmp_path / "hub")).headers
    local = read_header(tmp_path / "local.gguf")
    assert (header.fingerprint, header.file_bytes) == (local.fingerprint, len(data))
    assert len(server.downloads()) > 1


def test_list_show_and_remove(server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for quant in ("Q4_0", "Q8_0"):
        code, out, err = run(capsys, "models", "pull", f"{REPO}:{quant}")
        assert (code, err) == (0, "")
    path = Path(out.strip())
    code, out, _ = run(capsys, "models", "list", "--json")
    here = {model["name"]: model for model in json.loads(out)["models"]}
    assert {"smollm2-135m", f"{REPO}:Q4_0", f"{REPO}:Q8_0"} == here.keys()
    assert here[f"{REPO}:Q8_0"]["path"] == str(path)
    code, out, _ = run(capsys, "models", "show", f"{REPO}:Q8_0")
    rows = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in out.splitlines() if "  " in line}
    assert rows["architecture"] == "llama"
    assert rows["layers"] == "2"
    assert rows["drafters"] == f"none known; edgespec draft make {REPO}:Q8_0"
    size = path.stat().st_size

    code, _, err = run(capsys, "models", "remove", f"{REPO}:Q8_0")
    assert code == 2
    assert "Cannot ask for confirmation: standard input is not a terminal." in err
    assert path.exists()
    code, out, _ = run(capsys, "models", "remove", f"{REPO}:Q8_0", "--yes")
    assert (code, out) == (0, f"{size} bytes freed ({size / 1024:.1f} KiB).\n")
    assert not path.exists()
    blobs = tmp_path / "hub" / "models--acme--Small-GGUF" / "blobs"
    [other] = path.parent.iterdir()
    assert len(list(blobs.iterdir())) == other.is_symlink()
    code, out, _ = run(capsys, "models", "remove", f"{REPO}:Q4_0", "--yes", "--json")
    assert code == 0
    assert not blobs.parent.exists()


def test_a_projector_comes_and_goes_with_its_models(
    server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = write_projector(tmp_path / "written.gguf", "idefics3", longest_edge=64)
    for label in ("F32", "F16", "BF16"):
        server.repositories[REPO][f"mmproj-Small-{label}.gguf"] = written.read_bytes()
    server.repositories[REPO]["mmproj-Small-F16.gguf"] += bytes(64)  # a blob of its own
    code, out, _ = run(capsys, "models", "show", f"{REPO}:Q4_0", "--json")
    shown = json.loads(out)["projector"]
    assert (code, shown["name"], shown["tokens"]) == (0, "mmproj-Small-F16.gguf", 80)
    code, out, err = run(capsys, "models", "pull", f"{REPO}:Q4_0")
    model = Path(out.strip())
    projector = model.with_name("mmproj-Small-F16.gguf")
    assert "It sees images, by mmproj-Small-F16.gguf beside it." in err
    assert sorted(model.parent.iterdir()) == sorted([model, projector])  # and no others
    assert find_projector(model, None).path == projector
    _, out, _ = run(capsys, "models", "pull", f"{REPO}:Q8_0", "--json")
    assert json.loads(out)["projector"] == str(projector)
    _, out, _ = run(capsys, "models", "list", "--json")
    here = {found["name"]: found for found in json.loads(out)["models"]}
    assert here.keys() == {"smollm2-135m", f"{REPO}:Q4_0", f"{REPO}:Q8_0"}
    assert here[f"{REPO}:Q4_0"]["projector"] == str(projector)
    assert here[f"{REPO}:Q4_0"]["bytes"] == model.stat().st_size + projector.stat().st_size
    _, out, _ = run(capsys, "models", "list")
    assert out.count("hub, sees images") == 2
    _, out, _ = run(capsys, "models", "show", f"{REPO}:Q4_0")
    assert "mmproj-Small-F16.gguf (" in out
    assert "80 tokens for 1024 x 768 pixels" in out
    _, out, _ = run(capsys, "models", "remove", f"{REPO}:Q8_0", "--yes", "--json")
    assert {row["kind"] for row in json.loads(out)["removed"]} == {"model"}  # the other one sees by it
    _, out, _ = run(capsys, "models", "remove", f"{REPO}:Q4_0", "--yes", "--json")
    assert {row["kind"] for row in json.loads(out)["removed"]} == {"model", "projector"}
    assert not (tmp_path / "hub" / "models--acme--Small-GGUF").exists()


def test_a_file_of_ones_own_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], smol_path: Path
) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(small_model(smol_path).to_bytes())
    code, out, err = run(capsys, "models", "remove", str(path), "--yes")
    assert (code, out) == (0, "Nothing removed.\n")
    assert "is your own file and stays." in " ".join(err.split())
    assert path.exists()


@pytest.mark.parametrize("removed", ["drafter", "target", "gone"])
def test_removing_a_model_forgets_its_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], smol_path: Path, removed: str
) -> None:
    target, drafter = tmp_path / "target.gguf", tmp_path / "drafter.gguf"
    shutil.copy(smol_path, target)
    drafter.write_bytes(small_model(smol_path).to_bytes())
    known = DrafterPair(read_header(target).fingerprint, target.name, str(drafter), REGISTERED, 0.5)
    other = DrafterPair("another", "other.gguf", str(smol_path), REGISTERED)
    for pair in (known, other):
        PairRegistry().add(pair)
    if removed == "gone":
        drafter.unlink()
    path = str(target if removed == "target" else drafter)
    code, _, err = run(capsys, "models", "remove", path)
    assert (code, "Cannot ask for confirmation: standard input is not a terminal." in err) == (2, True)
    assert "drafter.gguf drafts for target.gguf: forgotten" in " ".join(err.split())
    code, out, _ = run(capsys, "models", "remove", path, "--yes", "--json")
    assert code == 0
    assert [(row["target"], row["drafter"]) for row in json.loads(out)["forgotten"]] == [
        (known.target, str(drafter))
    ]
    code, out, _ = run(capsys, "draft", "list", "--json")
    assert [row["target"] for row in json.loads(out)["pairs"]] == ["another"]
    assert PairRegistry().concerning(known.target, []) == []
    if removed == "gone":
        code, _, err = run(capsys, "models", "remove", path)
        assert (code, "does not exist" in err) == (1, True)


@pytest.mark.slow
@pytest.mark.usefixtures("own_profiles")
def test_a_plan_is_the_same_however_the_drafter_is_named(
    smol_path: Path, q4_drafter_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By its name, the target is of a family for which the catalog knows the drafter.
    target = Path(shutil.copy(q4_drafter_path, tmp_path / "SmolLM2-1.7B-Instruct-Q4_K_M.gguf"))
    known = DrafterPair(
        read_header(target).fingerprint, target.name, str(smol_path), REGISTERED, 0.95, 1.0, 100
    )
    PairRegistry().add(known)
    link = tmp_path / "link.gguf"
    put(smol_path, link)
    monkeypatch.chdir(smol_path.parent)
    store = ProfileStore()
    for tensor in (*read_header(target).tensors, *read_header(smol_path).tensors):
        # Known beforehand: what is measured beside other programs is measured again for each plan.
        kind = machine_identity() | {"threads": "1", "type": str(tensor.type_id)}
        store.put_products(kind, (1e-10, 2e-10, 4e-10))
    found = {}
    for name in ("auto", "smollm2-135m", str(smol_path), smol_path.name, str(link)):
        asked = Config.of(model=target, draft=name, memory=1 << 30, context=512, threads=1)
        plan = plan_for(asked, no_progress)
        way = plan.chosen
        found[name] = (way.tokens_per_second, way.tokens_per_pass, way.nodes)
    assert len(set(found.values())) == 1, found


def test_a_chat_says_how_a_model_will_run_before_it_is_downloaded(
    server: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the catalog's sizes, whose repository this server lacks; and from the header that it has."""
    code, _, err = run(capsys, "chat", "qwen3.6-27b", "--memory", "8GiB", "-p", "Hi")
    assert code == HubError.exit_code
    said, where, *error = err.splitlines()
    assert "Downloading 15.9 GiB from unsloth/Qwen3.6-27B-MTP-GGUF:Q4_K_M." in said
    assert re.fullmatch(
        r"[\d.]+ GiB will stay in memory, [\d.]+ GiB read from disk per pass: "
        r"about [\d.]+ (tokens/s|s per token) without drafts on this processor \(estimated\)\.",
        where,
    )
    assert error[0].startswith("Error: ")
    assert not server.downloads()
    code, _, err = run(capsys, "chat", "qwen3.6-27b", "--memory", "300MiB", "-p", "Hi")
    assert "It will not fit in memory: " in err

    _, _, err = run(capsys, "chat", f"{REPO}:Q4_0", "-p", "Hi")
    assert f"{REPO}:Q4_0 is not installed. Downloading " in err
    assert re.search(r"^All .* will stay in memory", err, re.MULTILINE)
    _, _, err = run(capsys, "chat", f"{REPO}:Q4_0", "-p", "Hi")
    assert "Downloading" not in err


def test_without_a_network_a_chat_ends_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub("http://127.0.0.1:9", tmp_path / "hub")  # nobody answers there
    for name in ("from_environment", "without_token"):
        monkeypatch.setattr(Hub, name, classmethod(lambda _: hub))
    for name, announced in (("qwen3.6-27b", True), ("acme/Unknown-GGUF", False)):
        code, out, err = run(capsys, "chat", name, "-p", "Hi")
        assert (code, out) == (HubError.exit_code, "")
        assert ("without drafts on this processor" in err) is announced
        assert "cannot be reached" in err
        assert "Without a network, give the path of a GGUF file." in " ".join(err.split())


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize(
    ("name", "layers", "types"),
    [("qwen3.6-27b", 64, {"Q4_K", "Q5_K", "Q6_K"}), ("qwen3:8b-q8_0", 36, {"Q8_0"})],
)
def test_a_model_of_the_catalog_is_shown_without_a_network(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    layers: int,
    types: set[str],
    *,
    offline: bool,
) -> None:
    hub = Hub("http://127.0.0.1:9", tmp_path / "hub", offline=offline)
    for method in ("from_environment", "without_token"):
        monkeypatch.setattr(Hub, method, classmethod(lambda _: hub))
    code, out, err = run(capsys, "models", "show", name, "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["approximate"], facts["here"], facts["layers"]) == (True, False, layers)
    assert {kind for row in facts["quantization"] for kind in row["types"]} == types
    cause = (
        "HF_HUB_OFFLINE forbids asking the Hub."
        if offline
        else "127.0.0.1:9 cannot be reached (ConnectError)."
    )
    assert f"{cause} The figures are approximate: they follow from the catalog's sizes." in " ".join(
        err.split()
    )
    code, out, _ = run(capsys, "models", "show", name)
    assert code == 0
    if name == "qwen3.6-27b":
        assert "the model's own MTP layer; edgespec draft make" in out
    assert "approximate" in out
    assert "None" not in out
    assert "chat template" not in out


def test_a_model_without_sizes_in_the_catalog_needs_the_network(tmp_path: Path) -> None:
    said = r"cannot be reached .* The catalog lists only the file size of deepseek4-flash, about"
    with pytest.raises(HubError, match=said):
        inspect_model("deepseek4-flash", hub=Hub("http://127.0.0.1:9", tmp_path / "hub"))


def test_the_catalog_is_listed(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "models", "list", "--all")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("llama3.3-70b"))
    assert "Llama 3" in line
    assert "llama3.1-8b, llama3.2-3b, llama3.2-1b" in line
    code, out, _ = run(capsys, "models", "list", "--all", "--json")
    assert len(json.loads(out)["catalog"]) == len(catalog.entries())


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from edgespec.cli.main import main; main(['models', '--help']); "
        "main(['draft', '--help']); "
        "slow = ('huggingface_hub', 'httpx2', 'numpy', 'llama_cpp.llama_cpp', 'torch'); "
        "print([m for m in slow if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_packed_layer_files_are_listed_and_can_be_removed(capsys: pytest.CaptureFixture[str]) -> None:
    folder = packs_folder()
    folder.mkdir(parents=True)
    pack = folder / "large-0123456789abcdef.pack"
    pack.write_bytes(bytes(4096))
    pack.with_suffix(".lock").touch()
    _, out, _ = run(capsys, "models", "list", "--json")
    packed = json.loads(out)["packed_files"]
    assert packed == [{"path": str(pack), "bytes": 4096, "parts": []}]
    code, out, _ = run(capsys, "models", "remove", str(pack), "--yes", "--json")
    assert (code, json.loads(out)["freed_bytes"]) == (0, 4096)
    assert list(folder.glob("*")) == []


@pytest.mark.slow
def test_a_smaller_model_in_the_same_folder_is_named_as_a_drafter(
    smol_path: Path,
    q4_drafter_path: Path,
    gemma_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nobody registered it, and the catalog does not know the family: the vocabularies are compared."""
    folder = tmp_path / "models"
    folder.mkdir()
    target, small = folder / "target.gguf", folder / "small.gguf"
    widen(q4_drafter_path, target, 4 * q4_drafter_path.stat().st_size)
    shutil.copy(q4_drafter_path, small)
    put(gemma_path, folder / "other-vocabulary.gguf")
    (folder / "damaged.gguf").write_bytes(b"GGUF and no more")
    code, out, _ = run(capsys, "models", "show", str(target), "--json")
    assert code == 0
    assert [(row["name"], row["here"]) for row in json.loads(out)["drafters"]] == [(str(small), True)]
    code, out, _ = run(capsys, "models", "show", str(target))
    assert f"{small}: has the same vocabulary; use it with --draft" in out
    code, out, _ = run(capsys, "models", "show", str(small))
    assert "none known" in out, "a larger model does not draft"


def test_vocabularies_of_files_are_compared_but_for_padding(smol_path: Path, gemma_path: Path) -> None:
    smol, gemma = read_header(smol_path), read_header(gemma_path)
    assert same_vocabulary(smol, smol)
    assert not same_vocabulary(smol, gemma)
    tokens = smol.metadata["tokenizer.ggml.tokens"]
    start, end = tokens.byte_range
    assert b"<|endoftext|>" in smol_path.read_bytes()[start:end]
    other = replace(smol, metadata={**smol.metadata, "tokenizer.ggml.pre": "another"})
    assert not same_vocabulary(smol, other)


@pytest.mark.slow
def test_pairing_says_in_words_what_was_compared_and_how_far_it_is(
    q4_drafter_path: Path, smol_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[tuple[str, float]] = []
    examined = examine_pair(
        str(smol_path),
        str(q4_drafter_path),
        measure_agreement=True,
        on_progress=lambda what, fraction: said.append((what, fraction)),
    )
    assert examined.fits
    writing = [fraction for what, fraction in said if what == "Generating text with the target"]
    assert len({*writing}) > 50, "after every pass, not after every text"
    assert writing == sorted(writing)
    reading = [fraction for what, fraction in said if what == "Reading it with the drafter"]
    assert len(reading) > 4
    details = {check.name: check.detail for check in examined.checks}
    assert details["tokenizer"] == "byte-pair encoding"
    assert details["special tokens"] == "begin <|im_start|>, end <|im_end|>"
    assert "<|im_end|>" in details["end tokens"]


def test_what_the_catalog_knows_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "models", "show", catalog.DEFAULT)
    assert code == 0
    licence = catalog.entries()[catalog.DEFAULT].licence
    assert any(line.split() == ["licence", licence] for line in out.splitlines())
    code, out, _ = run(capsys, "models", "show", catalog.DEFAULT, "--json")
    assert code == 0
    assert json.loads(out)["catalog"]["licence"] == licence


def test_a_repository_is_planned_file_by_file(
    server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Split files are one row, and neither damaged files nor projectors are rows."""
    small = server.repositories[REPO][Q4]
    server.repositories[REPO] |= {
        "Small-Q5_K_M-00001-of-00002.gguf": small,
        "Small-Q5_K_M-00002-of-00002.gguf": small,
        "Small-IQ3_M.gguf": b"no model",
        "mmproj-F16.gguf": small,
    }
    code, out, err = run(capsys, "plan", REPO, "--draft", "none", "--json")
    assert code == 0, err
    found = json.loads(out)
    rows = {row["name"]: row for row in found["files"]}
    assert rows.keys() == {"Q4_0", "Q8_0", "Q5_K_M"}
    assert rows["Q5_K_M"]["bytes"] == 2 * len(small)
    assert rows["Q4_0"]["perplexity_loss"] == pytest.approx(0.0753, abs=1e-3)
    assert rows["Q8_0"]["plan"]["plain"]["tokens_per_second"] > 0
    assert found["fastest"] in ("Q8_0", "Q5_K_M"), "Q4_0 loses more than 5 %"
    (note,) = found["notes"]
    assert note.startswith("Left out: Small-IQ3_M.gguf is not a GGUF file")
    assert not (tmp_path / "hub").exists(), "only headers were read"

    code, shown, _ = run(capsys, "models", "show", REPO)
    assert code == 0
    assert len([line for line in shown.splitlines() if re.match(r"[* ] Q\d", line)]) == 3
    assert max(map(len, shown.split("\n\n")[0].splitlines())) <= 80
    code, out, err = run(capsys, "models", "pull", REPO)
    assert (code, out) == (2, "")
    assert f"Choose one: edgespec models pull {REPO}:{found['fastest']}" in err
    assert "STREAMED" in err
    code, out, _ = run(capsys, "models", "pull", f"{REPO}:Q8_0", "--quiet")
    assert code == 0
    assert run(capsys, "models", "pull", REPO)[1] == out, "a single file here is meant"


@pytest.mark.slow
def test_a_repository_of_the_catalog_is_planned_without_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub("http://127.0.0.1:9", tmp_path / "hub", offline=True)
    monkeypatch.setattr(Hub, "from_environment", classmethod(lambda _: hub))
    store = ProfileStore()
    for threads in {*thread_counts(), default_threads()}:
        for type_id in BLOCK_SIZES:
            key = machine_identity() | {"threads": str(threads), "type": str(type_id)}
            store.put_products(key, [1e-10, 2e-10, 8e-10])
    store.put(disk_key(nearest_existing(cache_folder())), DiskProfile(1e9, 1e9, 1 << 20, 1))
    code, out, err = run(capsys, "plan", "qwen2.5-7b", "--memory", "4GiB", "--json")
    assert code == 0, err
    found = json.loads(out)
    rows = {row["name"]: row for row in found["files"]}
    assert {"Q3_K_M", "IQ4_XS", "Q4_K_M", "Q8_0"} <= rows.keys()
    assert "MXFP4" not in rows
    assert (
        rows["Q3_K_M"]["bits_per_weight"]
        < rows["Q4_K_M"]["bits_per_weight"]
        < rows["Q8_0"]["bits_per_weight"]
    )
    assert rows["Q8_0"]["plan"]["drafter"] == "qwen2.5-0.5b"
    for row in rows.values():
        plan = row["plan"]
        assert plan["code"]["tokens_per_second"] >= plan["prose"]["tokens_per_second"]
    assert "Sizes are approximate" in found["notes"][0]
    assert run(capsys, "plan", "acme/Unknown-GGUF")[0] == 1
