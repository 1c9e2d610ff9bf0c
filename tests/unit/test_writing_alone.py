"""Files that a program writes over a longer time are kept from others, and symbolic links stay."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

import edgespec
from edgespec.cli.batch.result_file import ResultFile, read_record
from edgespec.cli.removal import plan_removal
from edgespec.engine.sessions.file import Conversation, SessionFile, read_conversation, saved_sessions
from edgespec.engine.sessions.session import Session
from edgespec.errors import OutputError, SessionError
from edgespec.files import writing
from edgespec.files.writing import atomic_large_write, atomic_write, is_locked, open_locked, writing_to
from edgespec.models.gguf.header import read_header
from tests.links import needs_links

IN_USE = "is being written by another program"


def result(number: int) -> dict[str, object]:
    return {"id": number, "index": 0, "finish_reason": "stop", "text": "answer", "fingerprint": {}}


@needs_links
def test_a_second_run_does_not_write_the_same_results(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)
    keys = [read_record(result(number)).key for number in (1, 2)]
    with ResultFile(str(path)) as file:
        for name in (path, link):
            with pytest.raises(OutputError, match=IN_USE) as caught:
                ResultFile(str(name))
            assert caught.value.hint == "Wait for it, or choose another file."
        for number in (2, 1):
            file.record(result(number), keys[number - 1], in_order=number == 2)
        file.tidy(keys, ordered=True)
        with pytest.raises(OutputError, match=IN_USE):
            ResultFile(str(path))
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [1, 2]
    assert sorted(tmp_path.iterdir()) == [link, path], "no lock is left"
    with ResultFile(str(path)) as file:
        assert len(file.done) == 2


def test_results_without_an_id_stay_when_others_are_brought_into_order(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    own = [{**result(0), "id": None, "text": text} for text in ("first", "second")]
    path.write_text("".join(json.dumps(one) + "\n" for one in own))
    keys = [(number, 0) for number in (1, 2)]
    with ResultFile(str(path)) as file:
        for number in (2, 1):
            file.record(result(number), (number, 0), in_order=number == 2)
        file.tidy(keys, ordered=True)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found == [*own, result(1), result(2)]


def test_what_took_long_to_make_is_on_the_disk_before_it_replaces_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    sync, move = os.fsync, writing.replace
    monkeypatch.setattr("os.fsync", lambda file: [steps.append("fsync"), sync(file)])
    monkeypatch.setattr(writing, "replace", lambda old, new: [steps.append("replace"), move(old, new)])
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(result(number)) + "\n" for number in (2, 1)))
    with ResultFile(str(path)) as file:
        file.tidy([(1, 0), (2, 0)], ordered=True)
    with atomic_large_write(tmp_path / "drafter.gguf", tmp_path / "drafter.gguf.partial") as large:
        large.write(b"hours of training")
    assert steps == 2 * ["fsync", "replace"]


def test_results_may_go_where_no_lock_can_be(tmp_path: Path) -> None:
    with ResultFile("/dev/null"), ResultFile("/dev/null"):
        pass


def test_a_partial_file_of_another_program_is_neither_emptied_nor_removed(tmp_path: Path) -> None:
    path, partial = tmp_path / "model.gguf", tmp_path / "model.gguf.partial"
    with atomic_large_write(path, partial) as file:
        file.write(b"first")
        file.flush()
        with (
            pytest.raises(OutputError, match=IN_USE),
            writing_to(path),
            atomic_large_write(path, partial),
        ):
            pass
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


@needs_links
@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_stays_and_its_file_is_replaced(exists: bool, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "out", tmp_path / "link"
    link.symlink_to(real)
    if exists:
        real.write_bytes(b"before")
    with atomic_write(link) as file:
        file.write(b"small")
    assert real.read_bytes() == b"small"
    with atomic_large_write(link, real.with_name("out.partial")) as file:
        file.write(b"large")
    assert real.read_bytes() == b"large"
    assert link.is_symlink()


@needs_links
def test_a_session_that_is_a_link_is_written_through_it(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    file = SessionFile(link)
    with pytest.raises(SessionError, match="open in another program"):
        SessionFile(real)
    file.write(Conversation({"model": "m"}, "Be brief."))
    file.close()
    assert link.is_symlink()
    again = SessionFile(real)
    saved = again.read()
    assert saved is not None
    assert saved.system == "Be brief."
    again.close()


@needs_links
def test_a_removed_model_leaves_what_is_under_way(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download of another quantization, a pack, and a search for a drafter."""
    repository = tmp_path / "models--org--repo"
    blob, snapshot = repository / "blobs" / ("b" * 64), repository / "snapshots" / ("a" * 40)
    blob.parent.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    shutil.copy(smol_path, blob)
    model = snapshot / "m-Q4_K_M.gguf"
    model.symlink_to(blob)
    partial = blob.with_name("c" * 64 + ".edgespec.incomplete")
    partial.write_bytes(b"part of m-Q8_0.gguf")
    stem = read_header(model).fingerprint[:16]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("edgespec.cli.removal.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr("edgespec.offload.packing.index.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr("edgespec.cli.removal.drafters_folder", lambda: tmp_path / "drafters")
    pack = tmp_path / "cache" / "packs" / f"m-{stem}.pack.1.partial"
    work = tmp_path / "drafters" / "work" / stem / "lock"
    for path in (pack, work):
        path.parent.mkdir(parents=True)
    with open_locked(pack), open_locked(work):
        removal = plan_removal(model)
        assert {file.path for file in removal.files} == {model, blob}
        assert len(removal.kept) == 3
        removal.carry_out()
        assert partial.exists()
        assert pack.exists()
    assert not is_locked(pack)


def test_a_session_is_saved_over_no_other_file(smol_path: Path, tmp_path: Path) -> None:
    library, first = tmp_path / "package.json", tmp_path / "first.json"
    library.write_text('{"name": "my work"}')
    with edgespec.load(smol_path, draft="none", context=256) as engine:
        with closing(Session(engine, "Be brief.")) as session:
            with pytest.raises(SessionError, match="is not a saved session"):
                session.save_to(library, overwrite=True)
            session.save_to(first)
            session.save_to(session.file or first)
        with closing(Session(engine, "Another.")) as session:
            with pytest.raises(SessionError, match="holds another conversation"):
                session.save_to(first)
            session.save_to(tmp_path / "second")
            session.save_to(first, overwrite=True)
    assert library.read_text() == '{"name": "my work"}'
    assert json.loads(first.read_text())["system"] == "Another."
    assert not list(tmp_path.glob(".*")), "no lock is left"


@needs_links
def test_one_dangling_link_hides_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.engine.sessions.file.sessions_folder", lambda: tmp_path)
    file = SessionFile(tmp_path / "trip.json")
    file.write(Conversation({"model": "m"}))
    file.close()
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    record = json.loads((tmp_path / "trip.json").read_text())
    for damage in (
        {"identity": ["m"]},
        {"known": {"text": "a", "tokens": [float("inf")]}},
        {"known": {"text": "a", "tokens": [1 << 31]}},
    ):
        (tmp_path / "damaged.json").write_text(json.dumps(record | damage))
        assert [session.name for session in saved_sessions()] == ["trip"]
        with pytest.raises(SessionError, match="is not a saved session"):
            read_conversation(tmp_path / "damaged.json")


@pytest.mark.parametrize("cache", ["hub", "models--hub"])
def test_where_there_are_no_links_other_models_of_a_repository_stay(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / cache))
    repository = tmp_path / cache / "models--org--repo"
    old, new = (repository / "snapshots" / (digit * 40) for digit in "ab")
    models = [old / "deep" / "m-Q4_K_M.gguf", new / "m-Q8_0.gguf"]
    (repository / "blobs").mkdir(parents=True)
    for path in models:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"a damaged model")
    assert plan_removal(models[0]).carry_out() == models[1].stat().st_size
    assert models[1].exists()
    assert not old.exists()
    plan_removal(models[1]).carry_out()
    assert not repository.exists()
    assert (tmp_path / cache).exists()


def test_a_model_in_a_copy_of_the_hubs_cache_is_its_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    path = tmp_path / "backup" / "models--org--repo" / "snapshots" / ("a" * 40) / "m.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"a damaged model")
    removal = plan_removal(path)
    assert (removal.files, removal.kept) == ([], [f"{path} is your own file and stays."])
