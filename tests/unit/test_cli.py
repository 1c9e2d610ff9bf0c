"""The command line: options, messages, exit codes, JSONL and Ctrl-C, with an engine that only talks."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

import edgespec
from edgespec.cli.chat import Talk
from edgespec.cli.commands import TypedChat
from edgespec.cli.interrupt import cancelling
from edgespec.cli.jobs import read_jobs
from edgespec.cli.main import app, main
from edgespec.cli.options import LoadOptions, OutputOptions, SamplingOptions, parse_size
from edgespec.cli.prompting import join_lines
from edgespec.cli.terminal import (
    ResultStream,
    Terminal,
    details,
    format_prefill,
    format_statistics,
    in_columns,
)
from edgespec.errors import ContextLengthError, OutputError, UsageError
from edgespec.generation import Chunk, Generation, GenerationConfig, PassRecord

SLOW_TO_IMPORT = [
    "torch",
    "numpy",
    "llama_cpp",
    "huggingface_hub",
    "prompt_toolkit",
    "jinja2",
    "psutil",
    "rich.console",
]


class TalkingEngine:
    """Answers every prompt with the same words, one a pass."""

    has_chat_template = True
    context = 4096
    description = "talker, drafted by nobody"
    notes = ("It only talks.",)

    def __init__(self) -> None:
        self.words = ["Blue", " as", " ever."]
        self.asked: list[tuple[Any, GenerationConfig, bool]] = []
        self.loaded_with: dict[str, Any] = {}
        self.last_generation: Generation | None = None
        self.on_word: Callable[[int], None] = lambda _: None
        self.on_load: Callable[[Callable[[str, float], None]], None] = lambda _: None
        self.closed = False
        self.full = False
        self.says_yes = False
        self.last_round = None
        self.cancelled = False

    def load(self, **arguments: Any) -> TalkingEngine:
        self.loaded_with = arguments
        self.on_load(arguments["on_progress"])
        return self

    def close(self) -> None:
        self.closed = True

    def stream(
        self,
        prompt: Any,
        config: GenerationConfig | None = None,
        *,
        raw: bool = False,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[Chunk]:
        self.asked.append((prompt, config or GenerationConfig(), raw))
        if prompt == "too long":
            raise ContextLengthError("The prompt has 9 tokens.", "Shorten it.")
        self.cancelled = False
        answer = self.last_generation = Generation(prompt_tokens=3, context_full=self.full)
        for number, word in enumerate(self.words):
            self.on_word(number)
            if self.cancelled:
                answer.finish_reason = "cancelled"
                break
            answer.tokens.append(number)
            answer.text += word
            answer.passes.append(PassRecord(4, 0, 0.0, 0.0, 0.0))
            yield Chunk(word, (number,), answer.passes[-1])
        yield Chunk("", generation=answer)

    def cancel(self) -> None:
        self.cancelled = True

    def __enter__(self) -> TalkingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TalkingEngine:
    talker = TalkingEngine()
    monkeypatch.setattr(edgespec, "load", talker.load, raising=False)
    return talker


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def write_lines(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


# Help and options


def test_columns_are_broken_between_words_and_paths_are_not() -> None:
    rows = [
        ("/set NAME VALUE", "change a setting"),
        ("path", "/a/long/folder/with/a/file.json"),
        ("none", ""),
    ]
    assert in_columns(rows) == [
        "/set NAME VALUE  change a setting",
        "path             /a/long/folder/with/a/file.json",
        "none",
    ]
    assert in_columns(rows, 30) == [
        "/set NAME VALUE  change a",
        "                 setting",
        "path             /a/long/folder/with/a/file.json",
        "none",
    ]


def test_help_imports_nothing_slow() -> None:
    program = f"import sys, edgespec.cli.main; print([m for m in {SLOW_TO_IMPORT} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"edgespec {edgespec.__version__}\n", "")


def test_without_a_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: edgespec" in capsys.readouterr().out


@pytest.mark.parametrize("group", ["models", "draft"])
def test_a_group_without_a_command_prints_its_help_and_no_empty_error(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([group]) == 2
    out, err = capsys.readouterr()
    assert f"Usage: edgespec {group}" in out + err
    assert "Error" not in err


def test_a_path_that_leads_nowhere_is_not_pulled(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["models", "pull", str(tmp_path / "none.gguf")]) == 1
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == ("", f"Error: {tmp_path / 'none.gguf'} does not exist.")


def test_every_command_ends_its_help_with_examples_that_can_be_typed() -> None:
    def leaves(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        for name, below in getattr(command, "commands", {}).items():
            yield from leaves(below, (*words, name))
        if not getattr(command, "commands", {}):
            yield words, command

    for words, command in leaves(typer.main.get_command(app), ("edgespec",)):
        examples = [line for line in (command.epilog or "").split("\n\n") if line.startswith("edgespec")]
        assert examples, words
        flags = {
            flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        for example in examples:
            typed = shlex.split(example)
            assert tuple(typed[: len(words)]) == words
            assert {word for word in typed if word.startswith("-")} <= flags


def test_every_shared_option_has_its_environment_variable() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shared = {name for group in (LoadOptions, SamplingOptions, OutputOptions) for name in vars(group())}
    for name, command in commands.items():
        for option in command.params:
            if option.name in shared and name != "config":
                flag = option.opts[0].removeprefix("--")
                assert option.envvar == "EDGESPEC_" + flag.replace("-", "_").upper()


def test_defaults_in_help_are_the_librarys() -> None:
    signature = inspect.signature(edgespec.load)
    command = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
    told = {option.name: option.help for option in command.params if option.name != "help"}
    for name in ("context", "gpu_layers", "offload", "pack", "draft"):
        assert told[name].endswith(f"Default: {signature.parameters[name].default}.")
    assert set(LoadOptions.__dataclass_fields__) == set(signature.parameters) - {"on_progress"}


def test_flags_reach_the_library(engine: TalkingEngine) -> None:
    flags = "m.gguf --memory 1.5GiB --tree-budget 12 --no-exact --draft d.gguf --threads 3 --context 99"
    sampling = "--temperature 0.5 --top-k 4 --seed 7 --stop A --stop B --max-tokens 9"
    assert main(["generate", "-p", "Hi", *flags.split(), *sampling.split()]) == 0
    progress = engine.loaded_with.pop("on_progress")
    assert callable(progress)
    assert engine.loaded_with == {
        "model": "m.gguf",
        "memory": 3 * 2**29,
        "tree_budget": 12,
        "exact": False,
        "draft": "d.gguf",
        "threads": 3,
        "context": 99,
    }
    config = GenerationConfig(max_tokens=9, temperature=0.5, top_k=4, seed=7, stop=("A", "B"))
    assert engine.asked == [("Hi", config, False)]


def test_what_is_not_asked_for_is_left_to_the_library(engine: TalkingEngine) -> None:
    assert main(["generate", "-p", "Hi", "--tree-budget", "auto"]) == 0
    assert set(engine.loaded_with) == {"on_progress"}
    assert engine.asked[0][1] == GenerationConfig()


def test_environment_variables_are_defaults(engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_TEMPERATURE", "0.25")
    monkeypatch.setenv("EDGESPEC_MEMORY", "2GB")
    monkeypatch.setenv("EDGESPEC_EXACT", "0")
    assert main(["generate", "-p", "Hi", "--memory", "1GB"]) == 0
    assert engine.asked[0][1].temperature == 0.25
    assert engine.loaded_with["memory"] == 10**9
    assert engine.loaded_with["exact"] is False


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("12GiB", 12 * 2**30), ("800MB", 800 * 10**6), ("1.5g", 3 * 2**29), (" 2 kib ", 2048)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e3", "12XB", "nan", "0", "0.4", "99999999TiB", "\u0661GB"]
)
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


# Failures


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate -p Hi --temperature -1", "temperature is -1.0.\nIt must be from 0 to 100."),
        ("generate -p Hi --max-tokens 0", "max_tokens is 0.\nIt must be at least 1."),
        ("generate -p Hi --memory 12XB", "'12XB' is not a size.\nWrite it like 12GiB, 800MB or 4000000000."),
        ("generate -p Hi --memory 0", "A size of 0 makes no sense.\nIt must be above 0 and below 8 EiB."),
        (
            "generate -p Hi --tree-budget -2",
            "The tree budget is '-2'.\nIt must be a number of nodes, or auto.",
        ),
        ("generate -p Hi --input x", "Both --prompt and --input were given.\nGive one of them."),
        (
            "generate -p Hi --raw --system x",
            "With --raw there is no place for --system.\nLeave one of them out.",
        ),
        (
            "generate --input no.jsonl",
            "no.jsonl cannot be read: No such file or directory.\nGive a file to --input.",
        ),
        (
            "generate --bogus",
            "No such option: --bogus (Possible options: --verbose)\nSee 'edgespec generate --help'.",
        ),
        ("generat", "No such command 'generat'. Did you mean 'generate'?\nSee 'edgespec --help'."),
    ],
)
def test_usage_errors(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert capsys.readouterr() == ("", f"Error: {message}\n")


@pytest.mark.parametrize(
    "flags", ["--threads 0", "--context 3", "--tree-budget 5000", "--offload cloud", "--pack x"]
)
def test_the_library_refuses_absurd_values(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: The ")
    assert "\nIt must be " in err


def test_an_error_as_json_has_the_shape_of_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", "--json", "--top-p", "3"]) == 2
    out, err = capsys.readouterr()
    (record,) = records(out)
    assert record.keys() == Generation().to_json("Hi").keys()
    assert (record["prompt"], record["finish_reason"]) == ("Hi", "error")
    assert record["error"] == "top_p is 3.0. It must be above 0 and at most 1."
    assert err == "Error: top_p is 3.0.\nIt must be above 0 and at most 1.\n"


def test_an_unexpected_failure_is_called_a_bug(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_word: int) -> None:
        raise ZeroDivisionError("oh")

    engine.on_word = fail
    assert main(["generate", "-p", "Hi"]) == 1
    hint = "Run it again with --verbose and report what it prints."
    assert capsys.readouterr().err == f"Error: This is a bug in EdgeSpec: ZeroDivisionError: oh\n{hint}\n"
    assert main(["generate", "-p", "Hi", "--verbose"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_out_of_memory(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_word: int) -> None:
        raise MemoryError

    engine.on_word = fail
    assert main(["generate", "-p", "Hi"]) == 1
    assert capsys.readouterr().err.startswith("Error: There is not enough memory.\n")


def test_a_closed_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", "-p", "Hi"]) == 1
    err = capsys.readouterr().err
    assert err == "Error: Standard output is closed.\nLeave it open, or use --output FILE.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", "--output", "/dev/full"]) == 1
    assert "Error: /dev/full cannot be written: No space left on device.\n" in capsys.readouterr().err


# generate


def test_text_goes_to_stdout_and_nothing_else_does(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-p", "Hi"]) == 0
    assert capsys.readouterr() == ("Blue as ever.\n", "")


def test_verbose_tells_on_stderr(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.full = True
    assert main(["generate", "-p", "Hi", "--verbose"]) == 0
    assert capsys.readouterr() == (
        "Blue as ever.\n",
        "talker, drafted by nobody\nIt only talks.\n"
        "3 tokens, 0.0 tokens/s, 1.00 tokens per pass, bound by disk, not bit-exact\n"
        "The context of 4096 tokens is full; --context makes it larger.\n",
    )


def test_a_prompt_from_stdin(engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüß\n\n".encode())))
    assert main(["generate", "--raw"]) == 0
    assert engine.asked[0][0] == "Grüß\n"
    assert engine.asked[0][2] is True


@pytest.mark.parametrize(("data", "what"), [(b"", "empty"), (b"\xff", "not valid UTF-8")])
def test_a_wrong_prompt_from_stdin(
    data: bytes, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["generate"]) == 2
    assert capsys.readouterr().err.startswith(f"Error: The prompt is {what}.\n")


def test_a_system_prompt_makes_messages(engine: TalkingEngine) -> None:
    assert main(["generate", "-p", "Hi", "--system", "Be brief."]) == 0
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert engine.asked[0][0] == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_was_written(
    number: signal.Signals, code: int, engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.on_word = lambda word: os.kill(os.getpid(), number) if word == 1 else None
    assert main(["generate", "-p", "Hi"]) == code
    assert capsys.readouterr() == ("Blue\n", "Interrupted: the answer ends early.\n")


def test_ctrl_c_while_the_model_loads(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """A load that hears of it stops at once; one that does not is closed when it is done."""

    def swallow(_on_progress: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def hear(on_progress: Callable[[str, float], None]) -> None:
        signal.raise_signal(signal.SIGINT)
        on_progress("Loading", 0.5)
        raise AssertionError("on_progress did not stop the load")

    for engine.on_load in (swallow, hear):
        assert main(["generate", "-p", "Hi"]) == 130
    assert engine.closed
    assert engine.asked == []
    assert capsys.readouterr() == ("", "")


# generate --input


def test_lines_are_answered_in_order(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": "Hm?"}]
    prompts = write_lines(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": "Hi", "temperature": 0.5, "stop": "x"},
        "",
        {"messages": messages, "max_tokens": 2},
    )
    assert main(["generate", "--input", str(prompts), "--top-k", "3"]) == 0
    out, err = capsys.readouterr()
    assert [(r["id"], r["prompt"], r["text"]) for r in records(out)] == [
        ("a", "Hi", "Blue as ever."),
        (3, messages, "Blue as ever."),
    ]
    assert [config for _, config, _ in engine.asked] == [
        GenerationConfig(top_k=3, temperature=0.5, stop=("x",)),
        GenerationConfig(top_k=3, max_tokens=2),
    ]
    assert err == "2 answered.\n"


BAD_LINES = {
    "{": "It is not valid JSON: Expecting property name enclosed in double quotes at column 2.",
    "[1]": 'It is not a JSON object. Write {"prompt": "..."}.',
    "{}": 'It must have either "prompt" or "messages".',
    '{"prompt": "a", "messages": []}': 'It must have either "prompt" or "messages".',
    '{"prompt": 3}': "The prompt is not a text, or empty.",
    '{"prompt": "\\ud800"}': "The text holds half a surrogate pair.",
    '{"messages": []}': "The messages are not a list, or empty.",
    '{"messages": [{"role": "boss", "content": ""}]}': "A message is wrong. It must have a "
    '"role" (system, user, assistant, tool) and a text as "content".',
    '{"prompt": "a", "temprature": 1}': "There is no field 'temprature'. Did you mean 'temperature'?",
    '{"prompt": "a", "top_k": "few"}': "The field 'top_k' is \"few\", which is of the wrong kind.",
    '{"prompt": "a", "max_tokens": 1.5}': "The field 'max_tokens' is 1.5, which is of the wrong kind.",
    '{"prompt": "a", "stop": [1]}': "The field 'stop' is [1], which is of the wrong kind.",
    '{"prompt": "a", "n": 0}': "The field 'n' is 0. It must be from 1 to 1000.",
    '{"prompt": "a", "top_p": 2}': "top_p is 2. It must be above 0 and at most 1.",
    '{"prompt": "a", "id": true}': "The id is true. It must be a text or a whole number.",
    '{"prompt": "a", "id": "good"}': "The id 'good' is that of line 1 too.",
    '{"prompt": "too long"}': "The prompt has 9 tokens. Shorten it.",
    "[" * 100_000: "It is not JSON that can be read.",
}


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES.items(), ids=[line[:40] for line in BAD_LINES])
def test_a_bad_line_is_told_and_the_others_are_done(
    bad: str, reason: str, engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"id": "good", "prompt": "Hi"}
    prompts = write_lines(tmp_path / "in.jsonl", good, bad, good | {"id": "last"})
    assert main(["generate", "--input", str(prompts)]) == 1
    out, err = capsys.readouterr()
    assert err == f"line 2: {reason}\n2 answered, 1 failed.\n"
    assert [r["finish_reason"] for r in records(out)] == ["stop", "error", "stop"]
    assert records(out)[1]["error"] == f"line 2: {reason}"


def test_a_second_run_goes_on(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", *({"id": i, "prompt": f"Q{i}"} for i in "abcd"))
    done, failed = Generation(text="old").to_json("Qa", "a"), Generation(finish_reason="error")
    answers = write_lines(tmp_path / "out.jsonl", done, failed.to_json("Qb", "b"))
    with answers.open("a") as file:
        file.write('{"id": "c", "prompt": "Q')
    assert main(["generate", "--input", str(prompts), "--output", str(answers)]) == 0
    assert capsys.readouterr() == ("", "3 answered, 1 were there already.\n")
    assert [prompt for prompt, _, _ in engine.asked] == ["Qb", "Qc", "Qd"]
    written = [(r["id"], r["text"]) for r in records(answers.read_text())]
    assert written == [("a", "old")] + [(i, "Blue as ever.") for i in "bcd"]


def test_an_interrupted_run_goes_on(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "Q1"}, {"prompt": "Q2"}, {"prompt": "Q3"})
    command = ["generate", "--input", str(prompts), "--output", str(tmp_path / "out.jsonl")]

    def interrupt(word: int) -> None:
        if len(engine.asked) == 2 and word == 1:
            os.kill(os.getpid(), signal.SIGINT)

    engine.on_word = interrupt
    assert main(command) == 130
    assert capsys.readouterr().err == "Interrupted at line 2. 1 answered.\n"
    engine.on_word = lambda _: None
    assert main(command) == 0
    results = records((tmp_path / "out.jsonl").read_text())
    assert [(r["id"], r["finish_reason"]) for r in results] == [(1, "stop"), (2, "stop"), (3, "stop")]


def test_a_failed_line_is_tried_again_and_has_one_result_in_its_place(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(
        tmp_path / "in.jsonl", {"id": 1, "prompt": "too long"}, "{", {"id": 3, "prompt": "Q"}
    )
    answers = tmp_path / "out.jsonl"
    other = Generation(text="other").to_json("?", "another line")
    write_lines(answers, other)
    command = ["generate", "--input", str(prompts), "--output", str(answers)]
    for _ in range(2):
        assert main(command) == 1
        results = [(r["id"], r["finish_reason"]) for r in records(answers.read_text())]
        assert results == [("another line", "stop"), (1, "error"), (2, "error"), (3, "stop")]
    write_lines(prompts, {"id": 1, "prompt": "short"}, "{", {"id": 3, "prompt": "Q"})
    assert main(command) == 1
    assert capsys.readouterr().err.endswith("1 answered, 1 were there already, 1 failed.\n")
    results = [(r["id"], r["finish_reason"]) for r in records(answers.read_text())]
    assert results == [("another line", "stop"), (1, "stop"), (2, "error"), (3, "stop")]


def test_several_answers_to_a_line(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(
        tmp_path / "in.jsonl", {"id": "a", "prompt": "Q"}, {"prompt": "R", "n": 1, "seed": 9}
    )
    command = [
        "generate",
        "--input",
        str(prompts),
        "--output",
        str(tmp_path / "out"),
        "--n",
        "3",
        "--seed",
        "5",
    ]
    for told in ("4 answered.\n", "0 answered, 4 were there already.\n"):
        assert main(command) == 0
        assert capsys.readouterr().err == told
    results = records((tmp_path / "out").read_text())
    assert [(r["id"], r.get("index")) for r in results] == [("a", 0), ("a", 1), ("a", 2), (2, None)]
    assert [config.seed for _, config, _ in engine.asked] == [5, 6, 7, 9]


def test_several_answers_to_one_prompt(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", "--n", "2"]) == 0
    assert capsys.readouterr().out == f"{ANSWER}\n\n{ANSWER}\n"
    assert main(["generate", "-p", "Hi", "--n", "0"]) == 2
    assert capsys.readouterr().err == "Error: --n is 0.\nIt must be from 1 to 1000.\n"


@pytest.mark.parametrize(
    "content",
    ["my notes\n", '{"settings": 1}', '{"id": 1}\n', '"text"\n'],
    ids=["text", "json", "other", "str"],
)
def test_a_file_of_something_else_is_left_alone(
    content: str, engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "notes"
    precious.write_text(content)
    assert main(["generate", "-p", "Hi", "--output", str(precious)]) == 1
    assert precious.read_text() == content
    assert engine.loaded_with == {}
    what = f"{precious} holds something else than results, on line 1."
    assert capsys.readouterr().err.startswith(f"Error: {what}\n")


def test_outputs_that_cannot_be_written(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "Q1"})
    reasons = {
        tmp_path
        / "no"
        / "x": f"cannot be written: there is no folder {tmp_path / 'no'}.\nMake the folder first.",
        tmp_path: "cannot be written: Is a directory.\nGive another name to --output.",
        prompts: "is the input file.\nGive another name to --output.",
    }
    for path, reason in reasons.items():
        assert main(["generate", "--input", str(prompts), "--output", str(path)]) == 1
        assert capsys.readouterr() == ("", f"Error: {path} {reason}\n")
    assert engine.loaded_with == {}


def test_one_prompt_into_a_file(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "out.jsonl"
    for _ in range(2):
        assert main(["generate", "-p", "Hi", "--output", str(answers)]) == 0
    assert capsys.readouterr().out == ""
    assert [r["text"] for r in records(answers.read_text())] == ["Blue as ever."] * 2


def test_memory_does_not_grow_with_the_lines(
    engine: TalkingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for their ids: a few hundred bytes a line."""
    monkeypatch.setattr(engine, "asked", deque(maxlen=1))
    peaks = []
    for lines in (200, 1200):
        prompts = write_lines(tmp_path / f"{lines}.jsonl", *({"prompt": "x" * 2000} for _ in range(lines)))
        tracemalloc.start()
        assert main(["generate", "--input", str(prompts), "--output", str(tmp_path / f"{lines}.out")]) == 0
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / 1000 < 400


def test_lines_are_read_one_by_one() -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b'\xef\xbb\xbf{"prompt": "Hi"}\n'

    jobs = read_jobs(endless())
    assert [next(jobs).identifier for _ in range(3)] == [1, 2, 3]


# Ctrl-C


class Witness:
    """Remembers which threads called for an end."""

    def __init__(self) -> None:
        self.callers: list[threading.Thread] = []

    def cancel(self) -> None:
        self.callers.append(threading.current_thread())


def test_ctrl_c_cancels_during_a_long_c_call() -> None:
    witness = Witness()
    with cancelling(witness) as interruption:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)  # a second or so without Python code
        timer.join()
    assert interruption.signal == signal.SIGINT
    assert interruption.exit_code == 130
    assert witness.callers[0] is not threading.main_thread()


def test_a_second_ctrl_c_ends_more_than_the_answer() -> None:
    witness = Witness()
    with cancelling(witness):
        signal.raise_signal(signal.SIGINT)
        assert witness.callers
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_afterwards_signals_do_what_they_did() -> None:
    earlier = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with cancelling(Witness(), signal.SIGTERM):
        assert signal.getsignal(signal.SIGTERM) != earlier[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == earlier
    assert signal.set_wakeup_fd(-1) == -1


def test_outside_the_main_thread_nothing_is_touched() -> None:
    seen: list[object] = []

    def work() -> None:
        with cancelling(Witness()) as interruption:
            seen.extend([bool(interruption), signal.getsignal(signal.SIGINT)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, signal.default_int_handler]


# chat


class TalkingSession:
    """A session whose answers are the engine's."""

    def __init__(self, engine: TalkingEngine) -> None:
        self.engine = engine
        self.system: str | None = None
        self.file = None
        self.unsaved = ""
        self.messages: list[dict[str, str]] = []

    def ask(self, text: str, config: GenerationConfig | None = None, **more: Any) -> Iterator[Chunk]:
        yield from self.engine.stream(text, config, **more)
        assert self.engine.last_generation is not None
        self.messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": self.engine.last_generation.text},
        ]

    def clear(self) -> None:
        self.messages.clear()

    @property
    def turns(self) -> int:
        return len(self.messages) // 2

    def drop_oldest(self, text: str = "", room: int = 256) -> int:
        dropped = self.turns - 1
        del self.messages[:-2]
        self.engine.full = False
        return dropped

    def undo(self) -> bool:
        had = bool(self.messages)
        del self.messages[-2:]
        return had


class TypingFriend:
    """A keyboard with everything already typed."""

    def __init__(self, messages: Sequence[str], says_yes: bool) -> None:
        self._messages = messages
        self._says_yes = says_yes

    def messages(self) -> Iterator[str]:
        yield from self._messages

    def confirm(self, question: str) -> bool:
        print(question, file=sys.stderr)
        return self._says_yes


@pytest.fixture
def typed(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[list[str], list[str], TalkingSession]]:
    """Runs a chat in which these messages are typed; gives the lines of stdout and stderr."""

    def run(*messages: str) -> tuple[list[str], list[str], TalkingSession]:
        session: Any = TalkingSession(engine)
        results = ResultStream(sys.stdout, "Standard output")
        talk = Talk(session, engine, GenerationConfig(), Terminal(), results)  # type: ignore[arg-type]
        TypedChat(talk).run(TypingFriend(messages, engine.says_yes))
        out, err = capsys.readouterr()
        return out.splitlines(), err.splitlines(), session

    return run


ANSWER = "Blue as ever."


def test_answers_go_to_stdout_and_commands_to_stderr(typed: Any) -> None:
    out, err, session = typed("Hi", "/undo", "/undo", "/nothing here", "/bye", "never read")
    assert out == [ANSWER]
    assert err[:2] == ["The last turn is taken back.", "There is nothing to undo."]
    assert session.messages == []


@pytest.mark.parametrize(
    ("command", "reply"),
    [
        ("/clera", "There is no command /clera. Did you mean /clear?"),
        ("/xyzzy", "There is no command /xyzzy. /help lists the commands."),
        ("/retry", "There is nothing to retry."),
        ("/stats", "There is no answer yet."),
        ("/system", "There is no system prompt."),
        ("/clear", "The conversation starts over."),
    ],
)
def test_replies_of_commands(command: str, reply: str, typed: Any) -> None:
    assert typed(command)[:2] == ([], [reply])


def test_a_path_is_no_command(typed: Any, engine: TalkingEngine) -> None:
    typed("/etc/passwd holds what?")
    assert engine.asked[0][0] == "/etc/passwd holds what?"


def test_retry_replaces_the_answer(typed: Any, engine: TalkingEngine) -> None:
    out, err, session = typed("Hi", "/retry")
    assert out == [ANSWER, ANSWER]
    assert err == ["The answer will be the same; /set temperature 0.7 without a seed varies it."]
    assert [message["role"] for message in session.messages] == ["user", "assistant"]


def test_system_sets_the_prompt(typed: Any) -> None:
    _, err, session = typed("/system Be  brief.", "/system")
    assert err == ["The system prompt is set.", "Be  brief."]
    assert session.system == "Be  brief."


def test_ctrl_c_in_an_answer_keeps_the_conversation(typed: Any, engine: TalkingEngine) -> None:
    engine.on_word = lambda word: (
        os.kill(os.getpid(), signal.SIGINT) if word == 1 and len(engine.asked) == 1 else None
    )
    out, err, session = typed("Hi", "Go on")
    assert out == ["Blue", ANSWER]
    assert err == ["Stopped; what was said so far is kept."]
    assert len(session.messages) == 4


def test_a_full_context_says_how_to_go_on(typed: Any, engine: TalkingEngine) -> None:
    engine.full = True
    go_on = "/undo takes back the last turn, /clear starts over, and --context makes it larger."
    full = "The context of 4096 tokens is full, so the answer ends early."
    assert typed("Hi")[1] == [full, go_on]
    assert typed("too long")[1] == ["The prompt has 9 tokens. Shorten it."]
    offer = "Drop the oldest turns to make room?"
    assert typed("Hi", "Hi")[1] == [full, go_on, full, offer, go_on]
    engine.says_yes = True
    _, err, session = typed("Hi", "Hi", "Hi")
    assert err == [full, go_on, full, offer, "1 turn dropped, 1 kept."]
    assert session.turns == 2


def test_settings_can_be_changed_and_shown(typed: Any, engine: TalkingEngine) -> None:
    _, err, _ = typed(
        "/set temperature 0.5", "/set stop X", "/set top_k few", "/set temprature 1", "/show", "Hi"
    )
    assert err[:4] == [
        "temperature is 0.5 from now on.",
        "stop is X from now on.",
        "top_k is 'few'. It must be a number.",
        "There is no setting 'temprature'. Did you mean temperature?",
    ]
    assert "temperature        0.5" in err
    assert "session            not saved" in err
    assert engine.asked[0][1] == GenerationConfig(temperature=0.5, stop=("X",))


def test_files_go_with_the_next_question(typed: Any, engine: TalkingEngine, tmp_path: Path) -> None:
    notes, code = tmp_path / "notes.md", tmp_path / "a.py"
    notes.write_text("Buy ```milk```.\n")
    code.write_text("print()\n")
    _, err, _ = typed(f"/file {notes}", f"What about @{code}? And @nobody?", "Hi", "/file none.txt")
    asked = "notes.md:\n````\nBuy ```milk```.\n````\n\na.py:\n```\nprint()\n```\n\n"
    asked += f"What about @{code}? And @nobody?"
    assert [prompt for prompt, _, _ in engine.asked] == [asked, "Hi"]
    assert err == [
        f"{notes} (16 characters) goes with the next question.",
        f"Attached: {notes}, {code}",
        "none.txt cannot be read: No such file or directory. Check the path.",
    ]


def test_a_file_that_is_named_twice_goes_once(typed: Any, engine: TalkingEngine, tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("Buy milk.")
    _, err, _ = typed(f"/file {notes}", f"What do @{notes} and @{tmp_path}/./notes.md say?")
    assert err[-1] == f"Attached: {notes}"
    assert engine.asked[0][0].count("Buy milk.") == 1


def test_a_binary_file_is_not_attached(typed: Any, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"\x89PNG\xff")
    _, err, _ = typed(f"/file {tmp_path / 'x.png'}")
    assert err == [f"{tmp_path / 'x.png'} is no text. Only text files can be attached, in UTF-8."]


@pytest.mark.parametrize(
    ("before", "offers"),
    [
        ("/st", ["/stats "]),
        ("/se", ["/set", "/sessions"]),
        ("/set tem", ["temperature "]),
        ("/copy ", ["code"]),
        ("/clear ", []),
        ("Hello /st", []),
        ("see @no", ["notes.md"]),
        ("/file no", ["notes.md"]),
        ("see @sub", ["sub/"]),
    ],
)
def test_what_tab_offers(
    before: str, offers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.md").touch()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    chat = TypedChat(Talk(None, None, GenerationConfig(), Terminal(), ResultStream(sys.stdout, "")))  # type: ignore[arg-type]
    found = [offer.text for offer in chat.completer(before)]
    assert found == (["/stats"] if before == "/st" else offers)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["Hi"], "Hi"),
        (["one \\", "two\\", "three"], "one \ntwo\nthree"),
        (['"""', "one", "", 'two"""'], "one\n\ntwo"),
        (['"""one line"""'], "one line"),
    ],
)
def test_lines_of_one_message(lines: list[str], message: str) -> None:
    prompts: list[str] = []
    typed = iter(lines)

    def read_line(prompt: str) -> str:
        prompts.append(prompt)
        return next(typed)

    assert join_lines(read_line) == message
    assert prompts == [">>> "] + ["... "] * (len(lines) - 1)


def test_a_model_without_a_template_cannot_chat(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.has_chat_template = False
    assert main(["chat"]) == 1
    what = "The model has no chat template, so it cannot chat."
    assert capsys.readouterr().err.startswith(f"Error: {what}\n")


# What is written


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_model_cannot_steer_the_terminal() -> None:
    terminal, file = FakeTerminal(), io.StringIO()
    for stream in (terminal, file):
        ResultStream(stream, "it").text("a\x1b[2J\tb\r\n")
    assert terminal.getvalue() == "a\ufffd[2J\tb\ufffd\n"
    assert file.getvalue() == "a\x1b[2J\tb\r\n"


@pytest.mark.parametrize(("encoding", "line"), [("utf-8", '{"a": "é"}\n'), ("ascii", '{"a": "\\u00e9"}\n')])
def test_json_in_any_encoding(encoding: str, line: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    ResultStream(stream, "it").record({"a": "é"})
    assert raw.getvalue().decode(encoding) == line


def test_a_closed_stream_is_an_output_error() -> None:
    with pytest.raises(OutputError, match=r"^it is closed\."):
        ResultStream(None, "it")


def test_statistics_line() -> None:
    passes = [PassRecord(8, 2, 0.1, 0.4, 0.0), PassRecord(8, 1, 0.1, 0.4, 0.0)]
    answer = Generation(tokens=[1, 2, 3, 4, 5], passes=passes, exact=True)
    answer.timings.decode_s = 2.0
    assert format_statistics(answer) == "5 tokens, 2.0 tokens/s, 2.50 tokens per pass, bound by disk, exact"
    answer.plain_pass_s, answer.timings.verify_s, answer.timings.io_wait_s = 0.8, 1.5, 0.5
    assert format_statistics(answer).endswith("bound by compute, 2.0x plain decoding, exact")


def test_prefill_line() -> None:
    assert format_prefill(0, 400, 0.0) == f"Reading the prompt {'─' * 20} 0 of 400"
    assert format_prefill(100, 400, 30.0).endswith(" 100 of 400, 1:30 left")
    assert format_prefill(100, 400, 1500.0, columns=40) == "Reading the prompt 100 of 400, 1:15:00 left"


# Rules of verification


def test_the_rule_is_a_setting_of_each_answer(engine: TalkingEngine, tmp_path: Path) -> None:
    flags = ["--temperature", "0.8", "--verify", "recursive", "--quiet"]
    lines = write_lines(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b", "verify": "block"})
    assert main(["generate", "--input", str(lines), "--output", str(tmp_path / "out.jsonl"), *flags]) == 0
    assert [config.verify for _, config, _ in engine.asked] == ["recursive", "block"]


def test_a_rule_of_the_wrong_kind_on_a_line(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    (job,) = read_jobs([b'{"prompt": "a", "verify": 3}'])
    assert job.error == "The field 'verify' is 3, which is of the wrong kind."


def test_lossy_output_is_labelled(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    told = "--verify lenience:factor=0.5 is lossy: the text may differ from the model's own.\n"
    flags = ["--temperature", "0.8", "--verify", "lenience"]
    for arguments in (["generate", "-p", "Hi"], ["generate", "-p", "Hi", "--quiet"]):
        assert main([*arguments, *flags]) == 0
        assert capsys.readouterr() == ("Blue as ever.\n", told)
    answer = Generation(verify="lenience:factor=0.5", lossy=True)
    assert format_statistics(answer).endswith(", lossy (lenience:factor=0.5)")
    assert details(answer)["mode"] == "lossy (lenience:factor=0.5)"
    assert answer.to_json("Hi")["speculation"]["lossy"] is True


def test_a_chat_says_that_it_is_lossy(
    engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", "--verify", "topk-gap"]) == 0
    err = capsys.readouterr().err
    assert err == "--verify topk-gap:k=3,gap=1 is lossy: the text may differ from the model's own.\n"


def test_lossless_rules_say_nothing(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--temperature", "0.8", "--verify", "recursive"], ["--verify", "typical"]):
        assert main(["generate", "-p", "Hi", *flags]) == 0  # at temperature 0 typical acceptance is greedy
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--verify recursiv", "There is no rule 'recursiv' to verify by.\nDid you mean recursive?"),
        (
            "--verify greedy --temperature 1",
            "The rule 'greedy' takes the likeliest token, and temperature is 1.0.\nLeave out one of them.",
        ),
        (
            "--verify block --temperature 1 --exact",
            "The text depends on the drafter with --verify block, and with --exact it must not.\n"
            "Leave out one of them.",
        ),
    ],
)
def test_rules_that_cannot_be_had(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", *flags.split()]) == 2
    assert capsys.readouterr() == ("", f"Error: {message}\n")
