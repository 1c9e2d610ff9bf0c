"""Images in the lines of a batch: found beside the input, told in results, and compared by resumed runs."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.batch.input_file import summarize_input
from edgespec.cli.main import main
from tests.links import put
from tests.tiny_images import png, write_projector
from tests.unit.talking import TalkingEngine, records, write_lines

PICTURE, ANOTHER = png(), png(seed=2)
URL = f"data:image/png;base64,{base64.b64encode(ANOTHER).decode()}"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an input with a picture; the program runs elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "cat.png").write_bytes(PICTURE)
    return tmp_path


def test_images_stand_before_the_prompt(
    engine: TalkingEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(folder / "in.jsonl", {"id": "a", "prompt": "What?", "images": ["cat.png", URL]})
    assert main(["generate", "--input", str(source)]) == 0
    ((prompt, _, raw),) = engine.asked
    file, data = (
        {"type": "image", "path": str(folder / "cat.png"), "sha256": sha256(PICTURE)},
        {"type": "image", "data": ANOTHER, "name": "Image 2", "sha256": sha256(ANOTHER)},
    )
    assert prompt == [{"role": "user", "content": [file, data, {"type": "text", "text": "What?"}]}]
    assert not raw
    (record,) = records(capsys.readouterr().out)
    assert list(record)[:3] == ["id", "prompt", "images"]
    assert (record["prompt"], record["images"]) == ("What?", ["cat.png", f"sha256:{sha256(ANOTHER)}"])


def test_images_are_parts_of_messages(
    engine: TalkingEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: list[Any] = [
        {"type": "text", "text": "See"},
        {"type": "image", "path": "cat.png"},
        {"type": "image", "data": base64.b64encode(ANOTHER).decode()},
        {"type": "image_url", "image_url": {"url": URL}},
    ]
    body = {"messages": [{"role": "user", "content": [parts[0], parts[3]]}]}
    source = write_lines(
        folder / "in.jsonl",
        {"messages": [{"role": "user", "content": parts}]},
        {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": body},
    )
    assert main(["generate", "--input", str(source)]) == 0
    (first, _, _), (second, _, _) = engine.asked
    assert [part.get("data", part.get("path")) for part in first[0]["content"][1:]] == [
        str(folder / "cat.png"),
        ANOTHER,
        ANOTHER,
    ]
    assert second[0]["content"] == [parts[0], {"type": "image", "data": ANOTHER, "name": "Image 1"}]
    told, _ = records(capsys.readouterr().out)
    shown = [{"type": "image", "sha256": sha256(data)} for data in (PICTURE, ANOTHER, ANOTHER)]
    assert told["prompt"] == [{"role": "user", "content": [parts[0], *shown]}]


BAD = {
    '"images": ["dog.png"]': "There is no image file",
    '"images": ["in.jsonl"]': "is not an image that can be read",
    '"images": ["https://example.com/a.png"]': "images are not fetched",
    '"images": ["data:image/png;base64,a*"]': "Base64 cannot be decoded",
    '"images": [7]': "Image 1 must be a path or a data URL, not 7.",
    '"images": "cat.png"': '"images" must be a list',
}


@pytest.mark.parametrize("field", BAD)
def test_a_line_whose_image_cannot_be_read_fails_alone(
    field: str, engine: TalkingEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder / "in.jsonl"
    source.write_text(f'{{"prompt": "a", {field}}}\n{{"prompt": "b"}}\n')
    assert main(["generate", "--input", str(source)]) == 1
    failed, answered = records(capsys.readouterr().out)
    assert BAD[field] in failed["error"]
    assert (failed["id"], answered["text"]) == (1, "Blue as ever.")
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "sound"}], "neither a text nor an image"),
        ([{"type": "image"}], "must be a path or a data URL, not null"),
        ([7], "neither a text nor an image"),
    ],
)
def test_parts_of_other_kinds_are_refused(
    content: list[Any], said: str, engine: TalkingEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(folder / "in.jsonl", {"messages": [{"role": "user", "content": content}]})
    assert main(["generate", "--input", str(source)]) == 1
    assert said in capsys.readouterr().err
    assert engine.asked == []


def test_a_resumed_run_knows_another_image(
    engine: TalkingEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(
        folder / "in.jsonl",
        {"id": "a", "prompt": "What?", "images": ["cat.png"]},
        {"id": "b", "prompt": "What?", "images": [URL]},
    )
    command = ["generate", "--input", str(source), "--output", str(folder / "out.jsonl")]
    assert main(command) == 0
    assert main(command) == 0
    assert len(engine.asked) == 2  # nothing is answered twice
    (folder / "cat.png").rename(folder / "moved.png")
    lines = [
        {"id": "a", "prompt": "What?", "images": ["moved.png"]},
        json.loads(source.read_text().splitlines()[1]),
    ]
    write_lines(source, *lines)
    assert main(command) == 0
    assert len(engine.asked) == 2  # it is the same image elsewhere
    (folder / "moved.png").write_bytes(ANOTHER)
    assert main(command) == 2
    assert "the prompt or the system prompt differs" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert len(engine.asked) == 3


def seeing(folder: Path, smol_path: Path) -> Path:
    """A model with a projector beside it."""
    model = folder / "model.gguf"
    put(smol_path, model)
    write_projector(folder / "mmproj-model.gguf", "idefics3")
    return model


def test_a_resumed_run_knows_another_projector(
    engine: TalkingEngine, folder: Path, smol_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = seeing(folder, smol_path)
    source = write_lines(
        folder / "in.jsonl",
        {"id": "a", "prompt": "What?", "images": ["cat.png"]},
        {"id": "b", "prompt": "So?"},
    )
    output = folder / "out.jsonl"
    command = ["generate", str(model), "--input", str(source), "--output", str(output)]
    assert main(command) == 0
    about_image, text = records(output.read_text())
    assert about_image["projector"] == "mmproj-model.gguf"
    assert "projector" not in text
    assert main(command) == 0
    assert len(engine.asked) == 2
    write_projector(folder / "mmproj-model.gguf", "idefics3", longest_edge=64)
    capsys.readouterr()
    assert main(command) == 2
    said = capsys.readouterr().err
    assert (
        "has an answer made with different settings, at line 1: the projector is a different mmproj-" in said
    )
    named = write_projector(folder / "other.gguf", "idefics3", longest_edge=96)
    assert main([*command, "--mmproj", str(named)]) == 2
    assert "the projector was mmproj-model.gguf and is now other.gguf" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert len(engine.asked) == 3, "the answer to the text stays"
    (folder / "mmproj-model.gguf").unlink()
    assert main(command) == 0, "what is not known agrees with everything"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ({"prompt": "What?", "images": ["cat.png"]}, True),
        ({"prompt": "What?", "images": []}, False),
        ({"prompt": 'Explain "images": ["a"] and "type": "image".'}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image", "path": "cat.png"}]}]}, True),
        ({"body": {"input": [{"type": "image_url", "image_url": {"url": URL}}]}}, True),
        ({"body": {"input": [{"type": "input_image", "image_url": URL}]}}, True),
    ],
)
def test_an_input_tells_whether_its_lines_have_images(line: Any, found: bool, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "text"}, line)
    assert summarize_input(str(source)).has_images == found
    assert not summarize_input("-").has_images
