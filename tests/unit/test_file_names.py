"""Names of files that are no text: bytes that are not UTF-8, as on disks of other systems."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from edgespec.bench.report.document import write_whole
from edgespec.engine.sessions.file import Conversation, SessionFile

pytestmark = pytest.mark.skipif(
    sys.platform in ("win32", "darwin"), reason="names of files are always text there"
)
NAME = b"caf\xe9.gguf".decode(errors="surrogateescape")


def test_a_benchs_document_about_one_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write_whole(path, json.dumps({"model": NAME}, ensure_ascii=False))
    assert json.loads(path.read_bytes()) == {"model": NAME}


def test_a_saved_conversation_knows_its_model_again(tmp_path: Path) -> None:
    file = SessionFile(tmp_path / "talk.json")
    said = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "日"}]
    file.write(Conversation({"model": f"{NAME} 0123"}, messages=said, model_path=f"/models/{NAME}"))
    read = file.read()
    file.close()
    assert read is not None
    assert (read.identity["model"], read.model_path) == (f"{NAME} 0123", f"/models/{NAME}")
    assert read.messages == said
    assert "日" in file.path.read_text()
