"""Files that a program writes over a longer time are kept from others, and symbolic links stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.cli.batch.formats import records
from edgespec.cli.batch.output.merge import Merger
from edgespec.cli.batch.output.result_file import ResultFile
from edgespec.engine.sessions.file import Conversation, SessionFile
from edgespec.errors import OutputError, SessionError
from edgespec.files.writing import atomic_large_write, atomic_write, writing_to

IN_USE = "is being written by another program"


def result(number: int) -> dict[str, object]:
    return {"id": number, "index": 0, "finish_reason": "stop", "text": "answer", "fingerprint": {}}


def test_a_second_run_does_not_write_the_same_results(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)
    keys = [records.read_record(result(number)).key for number in (1, 2)]
    with ResultFile(str(path)) as file:
        for name in (path, link):
            with pytest.raises(OutputError, match=IN_USE) as caught:
                ResultFile(str(name))
            assert caught.value.hint == "Wait for it, or choose another file."
        with pytest.raises(OutputError, match=IN_USE):
            Merger([path], "-").write(path)
        for number in (2, 1):
            file.record(result(number), keys[number - 1], in_order=number == 2)
        file.tidy(keys, ordered=True)
        with pytest.raises(OutputError, match=IN_USE):
            ResultFile(str(path))
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [1, 2]
    assert sorted(tmp_path.iterdir()) == [link, path], "no lock is left"
    with ResultFile(str(path)) as file:
        assert len(file.done) == 2


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
