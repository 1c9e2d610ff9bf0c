"""A model, a prompt, or both, typed without a flag; and text from a pipe beside them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgespec.cli.main import main
from edgespec.cli.prompt import _WAITING, is_model
from edgespec.models.hub import catalog
from tests.unit.talking import TalkingEngine

SKY = "Why is the sky blue?"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a model, a model with another name, a text, and a folder."""
    (tmp_path / "my model.gguf").write_bytes(b"GGUF")
    (tmp_path / "blob").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("Buy milk.")
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "word",
    [
        "none.gguf",
        "dir/none.GGUF",
        "my model.gguf",
        "./my other model.gguf",
        "blob",
        "/models/x",
        "~/x",
        "smollm2-135m",
        "Llama3.2-3B",
        "llama3.2-3b:Q8_0",
        "org/repo",
        "org/repo:Q4_K_M",
        "hf.co/org/repo",
    ],
)
def test_what_is_a_model(word: str) -> None:
    assert is_model(word)


@pytest.mark.parametrize(
    "word",
    [
        SKY,
        "Hello!",
        "2+2=",
        "Grüße",
        "",
        "What is in model.gguf",
        "Compare and/or with both",
        "Hi\nthere",
        "x" * 5000,
        "a\0b",
        "notes.txt is what?",
        "/etc/passwd holds what?",
    ],
    ids=lambda word: word[:20],
)
def test_what_is_a_prompt(word: str) -> None:
    assert not is_model(word)


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("lama3.2-3b", "Did you mean llama3.2-3b"),
        ("gemma2", "Did you mean gemma3-270m"),
        ("notes.txt", ""),
        ("models", ""),
        ("Hello", ""),
        ("deepseek:8x7b", "Did you mean deepseek-r1-1.5b"),
        ("yonder:8x7b", ""),
    ],
)
def test_a_single_word_that_names_no_model_is_refused(
    word: str, near: str, engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = catalog.unknown_model(word)
    assert main(["generate", word]) == elsewhere.exit_code == 1
    _, err = capsys.readouterr()
    assert err.startswith(f"Error: {elsewhere.what}\n{elsewhere.hint} If it is a prompt")
    assert near in err
    assert "-p" in err
    assert engine.asked == []
    assert main(["generate", "-p", word]) == 0
    assert engine.asked[-1][0] == word


@pytest.mark.parametrize(
    ("typed", "model"),
    [
        ([SKY], None),
        (["a.gguf", SKY], "a.gguf"),
        (["-m", "a.gguf", SKY], "a.gguf"),
        (["a.gguf", "-p", SKY], "a.gguf"),
        (["models", "-p", SKY], "models"),
        (["--model", "models", "--prompt", SKY], "models"),
    ],
)
def test_models_and_prompts(
    typed: list[str], model: str | None, engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["generate", *typed]) == 0
    assert engine.loaded_with.get("model") == model
    assert engine.asked[0][0] == SKY
    monkeypatch.setenv("EDGESPEC_MODEL", "env.gguf")
    assert main(["generate", *typed]) == 0
    assert engine.loaded_with["model"] == (model or "env.gguf")
    assert engine.asked[1][0] == SKY


def test_with_a_model_named_a_word_is_a_prompt_unless_it_names_another(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-m", "a.gguf", "Hello"]) == 0
    assert (engine.loaded_with["model"], engine.asked[0][0]) == ("a.gguf", "Hello")
    for word in ("llama3.2-3b", "b.gguf"):
        assert main(["generate", "-m", "a.gguf", word]) == 2
        assert capsys.readouterr().err.startswith(f"Error: Two models were named: {word} and a.gguf.\n")


@pytest.mark.parametrize(
    ("typed", "what", "hint"),
    [
        (
            "Write a haiku",
            "Expected a model and a prompt, but got 3 arguments: Write a haiku",
            'Put the prompt in quotes: "Write a haiku"',
        ),
        ("a.gguf Hi -p Hi", "Both --prompt and the prompt 'Hi' were given.", "Give one of them."),
        ("-m a.gguf Hi -p Hi", "Both --prompt and the prompt 'Hi' were given.", "Give one of them."),
        ("a.gguf Hi --input x", "Both a prompt and --input were given.", "Give one of them."),
    ],
)
def test_words_that_are_too_many(
    typed: str, what: str, hint: str, engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *typed.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == ("", f"Error: {what}")
    assert hint in err
    assert engine.asked == []


def test_words_of_a_prompt_without_quotes(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hello", "there"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Error: There is no model 'Hello'.")
    assert "several words need quotes" in err
    assert engine.asked == []


@pytest.fixture
def pipe_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    """Makes data what a pipe on standard input holds, up to its end."""
    with ExitStack() as stack:

        def fill(data: bytes) -> None:
            reader, writer = os.pipe()
            os.write(writer, data)
            os.close(writer)
            stdin = stack.enter_context(os.fdopen(reader, encoding="utf-8"))
            monkeypatch.setattr(sys, "stdin", stdin)

        yield fill


@pytest.mark.parametrize(
    ("data", "asked"),
    [(b"Buy milk.\n", "Buy milk.\n\nSummarize:"), (b"", "Summarize:"), (b" \n", "Summarize:")],
)
@pytest.mark.parametrize("words", [["-p", "Summarize:"], ["Summarize:"]], ids=["flag", "word"])
def test_a_pipe_goes_before_the_prompt(
    words: list[str], data: bytes, asked: str, engine: TalkingEngine, pipe_in: Callable[[bytes], None]
) -> None:
    pipe_in(data)
    assert main(["generate", *words]) == 0
    assert engine.asked[0][0] == asked


def test_a_file_goes_before_the_prompt_too(
    folder: Path, engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (folder / "notes.txt").open(encoding="utf-8") as notes:
        monkeypatch.setattr(sys, "stdin", notes)
        assert main(["generate", "-p", "Summarize:"]) == 0
    assert engine.asked[0][0] == "Buy milk.\n\nSummarize:"


@pytest.mark.skipif(sys.platform == "win32", reason="makes a terminal of POSIX")
def test_other_kinds_of_standard_input_are_left_alone(
    engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal that nobody types at, no standard input at all, and that of a service."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs, encoding="utf-8") as terminal, Path(os.devnull).open(encoding="utf-8") as nothing:
        for stdin in (terminal, nothing, None):
            monkeypatch.setattr(sys, "stdin", stdin)
            assert main(["generate", "-p", "Hi"]) == 0
    os.close(ours)
    assert [prompt for prompt, _, _ in engine.asked] == ["Hi"] * 3


def test_a_pipe_that_nobody_writes_to_is_told(
    engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    told: list[str] = []

    def note(_self: object, text: str) -> None:
        told.append(text)
        os.close(writer)

    monkeypatch.setattr("edgespec.cli.screen.terminal.Terminal.note", note)
    with os.fdopen(reader, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["generate", "-p", "Hi"]) == 0
    assert told == [_WAITING]
    assert engine.asked[0][0] == "Hi"


def test_an_argument_that_is_no_text(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, name in (("-p", "The prompt"), ("--system", "The system prompt")):
        assert main(["generate", "-p", "Hi", flag, "caf\udce9"]) == 2
        what = f"{name} is not valid UTF-8: byte 0xe9 at offset 3."
        assert capsys.readouterr().err.startswith(f"Error: {what}\n")
    assert engine.asked == []


@pytest.mark.usefixtures("talking_session")
def test_a_piped_chat_is_one_question(
    engine: TalkingEngine, pipe_in: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(b"/bye\nwas a command.\n\nWhat is it here?\n")
    assert main(["chat"]) == 0
    pipe_in(b"Buy milk.\n")
    assert main(["chat", "Summarize:"]) == 0
    assert [prompt for prompt, _, _ in engine.asked] == [
        "/bye\nwas a command.\n\nWhat is it here?",
        "Buy milk.\n\nSummarize:",
    ]
    pipe_in(b"")
    assert main(["chat"]) == 2
    assert capsys.readouterr().err.startswith("Error: The prompt is empty.")


def test_a_model_without_a_template_is_told_once(
    engine: TalkingEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.has_chat_template = False
    note = "The model has no chat template, so it continues the prompt as plain text. "
    note += "--raw hides this note.\n"
    assert main(["generate", "-p", "Hi", "--n", "2"]) == 0
    assert capsys.readouterr().err == note
    (folder / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert main(["generate", "--input", "in.jsonl"]) == 0
    assert capsys.readouterr().err == note + "2 answered.\n"
    assert main(["generate", "-p", "Hi", "--raw"]) == 0
    assert capsys.readouterr().err == ""
