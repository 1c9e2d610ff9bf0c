"""Packed layers spread over folders on two disks: the same text, and every folder may be wrong or gone.

The second disk is in memory here, which is another device wherever there is a folder in it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.base.progress import no_progress
from edgespec.engine.engine import Engine
from edgespec.errors import OutputError, StreamError
from edgespec.llama.quantize import make_drafter
from edgespec.llama.runtime.backend import start_backend
from edgespec.machine.disks import TMPFS, disk_of
from edgespec.measure.folder_rates import folder_rates
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.packing import choice, division
from edgespec.offload.packing.index import packs_folder
from edgespec.offload.packing.pack import gains_from_packing
from edgespec.profiles.store import DiskProfile, ProfileStore, disk_key
from tests.least_memory import load_in_least_memory, weights_of
from tests.program import run_captured as run
from tests.tiny import write_tiny

PROMPT = "Write a short story about a fox and a crow who share a house."
GREEDY = edgespec.GenerationConfig(max_tokens=16)
RATES = (1e9, 2e9)  # bytes per second, of the disk and of memory


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A folder on a disk, and one on another; how fast both read is known."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or disk_of(memory).kind != TMPFS:
        pytest.skip("no folder here lies in memory")
    with tempfile.TemporaryDirectory(dir=memory) as place:
        found = (tmp_path / "one", Path(place) / "two")
        for folder, rate in zip(found, RATES, strict=True):
            ProfileStore().put(disk_key(folder.parent), DiskProfile(rate, rate, 1 << 20, 4))
        yield found


@pytest.fixture(scope="module")
def model(short_q4_path: Path) -> Path:
    start_backend()
    if not gains_from_packing(ModelFiles.of(read_header(short_q4_path)).layers()):
        pytest.skip("this processor has no kernel layout for these weights, so nothing would be packed")
    return short_q4_path


def load(model: Path, *folders: Path, pack: str = "always", **options: Any) -> Engine:
    options = {"context": 256, "exact": True, "threads": 1, **options}
    return load_in_least_memory(model, pack=pack, pack_dir=[*map(str, folders)], **options)


def text_of(engine: Engine) -> str:
    engine.target.rewind(0)
    answer = engine.generate(PROMPT, GREEDY)
    assert len(answer.tokens) > 5  # or equal answers would mean little
    return answer.text


def parts(folders: tuple[Path, Path]) -> list[Path]:
    return [part for folder in folders if folder.is_dir() for part in folder.iterdir()]


def test_layers_from_two_disks_give_the_text_of_memory(model: Path, folders: tuple[Path, Path]) -> None:
    with edgespec.load(model, draft="none", exact=True, context=256, threads=1) as engine:
        expected = text_of(engine)
    with load(model, *folders) as engine:
        assert text_of(engine) == expected
        assert any("streamed from 2 disks" in note for note in engine.notes)
        weights = weights_of(engine)
        assert (weights.packed, [path.parent for path in weights.paths]) == (True, [*folders])
        assert all(rate > 0 for rate in weights.disk_rates.values())
        assert weights.disk_rates.keys() == {*weights.paths}
    sizes = [part.stat().st_size for part in parts(folders)]
    assert abs(sizes[1] - 2 * sizes[0]) < 20 << 20  # their rates, within a few pieces
    (pack,) = packs_folder().glob("*.pack")
    assert pack.stat().st_size < 1 << 20 < min(sizes)
    # What passes have found is known of each disk.
    assert all(ProfileStore().disk(disk_key(folder)).streamed_rate > 0 for folder in folders)  # type: ignore[union-attr]
    made = [part.stat().st_mtime_ns for part in parts(folders)]
    for named in (folders, folders[::-1], ()):
        with load(model, *named, pack="auto") as engine:
            assert text_of(engine) == expected
            assert weights_of(engine).store.spread
    assert [part.stat().st_mtime_ns for part in parts(folders)] == made


def test_a_folder_may_go_while_a_model_is_loaded_and_between_loads(
    model: Path, folders: tuple[Path, Path]
) -> None:
    with load(model, *folders) as engine:
        expected = text_of(engine)
        shutil.rmtree(folders[1])
        assert text_of(engine) == expected  # the system keeps what is open
    with load(model, pack="never") as engine:
        from_model = text_of(engine)
    with load(model, *folders, pack="auto") as engine:
        (note,) = [note for note in engine.notes if "two" in note and "cannot be read" in note]
        assert "streaming the model file itself" in note
        assert "pack='always'" in note
        assert not weights_of(engine).packed
        assert text_of(engine) == from_model
    assert len(parts(folders)) == 1  # the other part waits for its disk
    with load(model, *folders) as engine:
        assert any("packed the layers again" in note for note in engine.notes)
        assert weights_of(engine).store.spread
        assert text_of(engine) == expected


@pytest.mark.parametrize("damage", ["cut", "another pack's"])
def test_a_part_that_does_not_belong_is_said(model: Path, folders: tuple[Path, Path], damage: str) -> None:
    load(model, *folders).close()
    part = parts(folders)[1]
    content = part.read_bytes()
    part.write_bytes(content[:-4096] if damage == "cut" else content[:8] + bytes(16) + content[24:])
    with load(model, *folders, pack="auto") as engine:
        (note,) = [note for note in engine.notes if note.startswith(f"'{part}' is damaged")]
        assert ("bytes instead of" if damage == "cut" else "other packed layers") in note
        assert not weights_of(engine).packed
        text_of(engine)


def test_damaged_content_is_noticed_and_packed_anew(model: Path, folders: tuple[Path, Path]) -> None:
    with load(model, *folders) as engine:
        expected = text_of(engine)
    part = parts(folders)[0]
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with load(model, *folders) as engine, pytest.raises(StreamError, match="is damaged, and was removed"):
        text_of(engine)
    assert parts(folders) == []
    with load(model, *folders) as engine:
        assert text_of(engine) == expected
        assert len(parts(folders)) == 2


def test_wrong_folders_are_said_and_the_others_used(
    model: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    file, missing = tmp_path / "file", tmp_path / "missing" / "packs"
    file.touch()
    with load(model, folders[0], file, missing, tmp_path, pack="auto") as engine:
        assert f"'{file}' cannot hold packed layers: Not a directory." in engine.notes
        assert f"'{missing}' cannot hold packed layers: No such file or directory." in engine.notes
        (same,) = [note for note in engine.notes if "on the same disk" in note]
        assert same.startswith(f"'{tmp_path}' is on the same disk as '{folders[0]}'")
        assert [path.parent for path in weights_of(engine).paths] == [folders[0]]
        assert weights_of(engine).packed
    # Another folder moves them.
    with load(model, *folders) as engine:
        assert weights_of(engine).store.n_disks == 2
    with load(model, folders[0], pack="auto") as engine:
        assert weights_of(engine).store.n_disks == 1
    assert [part.parent for part in parts(folders)] == [folders[0]]


def test_without_any_folder_the_model_itself_is_streamed(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with load(model, file, pack="auto", exact=False) as engine:
        assert any("No folder of pack_dir can hold packed layers" in note for note in engine.notes)
        assert not weights_of(engine).packed
        text_of(engine)
    with pytest.raises(OutputError, match="No folder of pack_dir can hold packed layers"):
        load(model, file)


def test_memory_is_no_disk_unless_packing_is_asked_for(model: Path, folders: tuple[Path, Path]) -> None:
    with load(model, *folders, pack="auto") as engine:
        assert f"'{folders[1]}' is in memory, so no layers are packed there." in engine.notes
        assert [path.parent for path in weights_of(engine).paths] == [folders[0]]
    with load(model, folders[1], pack="auto", exact=False) as engine:
        assert any("lies in memory" in note and "pack_dir" in note for note in engine.notes)
        assert not weights_of(engine).packed


def test_each_disk_needs_room_for_its_part(
    model: Path, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(folders[1].parent).free
    monkeypatch.setattr(choice, "_free_disk", lambda folder: 0 if folder == folders[1] else free)
    monkeypatch.setattr(division, "TMPFS", "none")  # or "auto" would leave it out
    with load(model, *folders, pack="auto", exact=False) as engine:
        assert any(f"in '{folders[1]}', and 0 B are free" in note for note in engine.notes)
        assert not weights_of(engine).packed
    assert parts(folders) == []


def test_an_interrupted_packing_leaves_nothing_and_is_done_by_the_next_load(
    model: Path, folders: tuple[Path, Path]
) -> None:
    def interrupt(what: str, fraction: float) -> None:
        if what.startswith("Packing") and fraction > 0.5:
            assert len(parts(folders)) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(model, *folders, on_progress=interrupt)
    assert parts(folders) == []
    assert list(packs_folder().glob("*.pack")) == []
    with load(model, *folders) as engine:
        assert weights_of(engine).store.n_disks == 2
        text_of(engine)


def test_experts_are_read_from_two_disks(smol_path: Path, folders: tuple[Path, Path], tmp_path: Path) -> None:
    plain = write_tiny(tmp_path / "plain.gguf", "qwen3moe", smol_path)
    mixture = make_drafter(plain, tmp_path / "q4_0.gguf", quantization="q4_0")
    with edgespec.load(mixture, draft="none", exact=True, context=256, threads=1) as engine:
        expected = text_of(engine)
    with load(mixture, *folders) as engine:
        weights = weights_of(engine)
        assert weights.store.experts
        assert text_of(engine) == expected
        assert all(rate > 0 for rate in weights.disk_rates.values())


def test_a_disk_is_measured_once(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "profiles")
    (rate,) = folder_rates([tmp_path], store, no_progress)
    assert rate > 1e6
    assert [path.name for path in tmp_path.iterdir()] == ["profiles"]  # the file that was read is gone
    assert folder_rates([tmp_path], store, no_progress) == [rate]
    store.put_streamed_rate(disk_key(tmp_path), 5e8)
    assert folder_rates([tmp_path], store, no_progress) == [5e8]


def test_plans_and_lists_know_the_folders(
    q4_drafter_path: Path,
    folders: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(division, "TMPFS", "none")  # or the part there would take up the budget
    named = [word for folder in folders for word in ("--pack-dir", str(folder))]
    words = ["plan", str(q4_drafter_path), "-c", "256", "--draft", "none", *named]
    memory = str(_budget(q4_drafter_path, folders) + (40 << 20))  # trees of a plan are larger
    code, out, err = run(capsys, *words, "--memory", memory, "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert any("2 disks read 2.8 GiB/s" in note for note in plan["notes"])
    assert not any(folder.exists() for folder in folders)  # a plan makes nothing

    load(q4_drafter_path, *folders).close()
    (pack,) = packs_folder().glob("*.pack")
    sizes = [part.stat().st_size for part in parts(folders)]
    _, out, _ = run(capsys, "models", "list", "--json")
    (listed,) = json.loads(out)["packed_files"]
    assert listed["parts"] == [*map(str, parts(folders))]
    assert listed["bytes"] == sum(sizes) + pack.stat().st_size
    shutil.rmtree(folders[1])
    code, out, _ = run(capsys, "models", "remove", str(pack), "--yes", "--json")
    removal = json.loads(out)
    assert code == 0
    assert removal["freed_bytes"] == sizes[0] + listed["bytes"] - sum(sizes)
    assert any(str(folders[1]) in sentence for sentence in removal["kept"])
    assert (parts(folders), pack.exists()) == ([], False)


def _budget(model: Path, folders: tuple[Path, Path]) -> int:
    """A budget for which the model is streamed."""
    with load(model, *folders) as engine:
        budget = engine.memory.budget_bytes
    for folder in folders:
        shutil.rmtree(folder)
    return budget
