"""The command line: options, help, messages and exit codes, with an engine that only talks."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import edgespec
from edgespec.base.units import parse_size
from edgespec.cli.commands.draft import gain_in_words
from edgespec.cli.main import app, main
from edgespec.cli.origin import NO_ORIGIN
from edgespec.cli.screen.formatting import in_columns
from edgespec.config import TREES
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation
from tests.unit.command_tree import leaf_commands
from tests.unit.talking import TalkingEngine, records

SLOW_TO_IMPORT = [
    "torch",
    "numpy",
    "llama_cpp.llama_cpp",
    "huggingface_hub",
    "prompt_toolkit",
    "jinja2",
    "psutil",
    "rich.console",
]


def test_columns_are_broken_between_words_and_paths_are_not() -> None:
    rows = [
        ("/set NAME VALUE", "change a setting of the chat"),
        ("path", "/a/long/folder/with/a/file.json"),
        ("none", ""),
    ]
    assert in_columns(rows) == [
        "/set NAME VALUE  change a setting of the chat",
        "path             /a/long/folder/with/a/file.json",
        "none",
    ]
    assert in_columns(rows, 40) == [
        "/set NAME VALUE  change a setting of",
        "                 the chat",
        "path             /a/long/folder/with/a/file.json",
        "none",
    ]
    assert in_columns(rows, 1) == in_columns(rows, 0) == in_columns(rows, 8)
    assert in_columns(rows, 30) == [
        "/set NAME VALUE",
        "  change a setting of the",
        "  chat",
        "path",
        "  /a/long/folder/with/a/file.json",
        "none",
    ]


def test_help_imports_nothing_slow() -> None:
    program = f"import sys, edgespec.cli.main; print([m for m in {SLOW_TO_IMPORT} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_plain_options_are_converted_without_pydantic() -> None:
    program = (
        "import sys; from edgespec.cli.main import main; "
        "main(['generate', '-m', 'nosuch.gguf', '-p', 'a b', '--max-tokens', '3', '--temperature', '0.5']); "
        "print('edgespec.cli.commands.generate' in sys.modules, 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True False"


def test_list_asks_nothing_of_the_network_or_of_models() -> None:
    slow = ("httpx2", "llama_cpp.llama_cpp", "numpy", "huggingface_hub.utils", "edgespec.generation.config")
    program = (
        "import sys; from edgespec.cli.main import main; main(['list']); "
        f"print([m for m in {slow} if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [["models", "ls"], ["sessions", "ls"]])
def test_commands_have_their_names_from_elsewhere(words: list[str]) -> None:
    assert main(words) == 0
    for other, own in ([["models", "rm"], "models remove"], [["sessions", "remove"], "sessions rm"]):
        assert main([*other, "--help"]) == 0, own


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


def options() -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Every option with the words that call its command, and with its main flag."""
    for words, command in leaf_commands():
        for option in command.params:
            if option.param_type_name == "option" and option.name != "help":
                yield words, option, option.opts[-1]


def test_every_command_ends_its_help_with_examples_that_can_be_typed() -> None:
    for words, command in leaf_commands():
        examples = [line for line in (command.epilog or "").split("\n\n") if line.startswith("edgespec")]
        assert examples, words
        flags = {
            flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        for example in examples:
            typed = shlex.split(example)
            assert tuple(typed[: 1 + len(words)]) == ("edgespec", *words)
            assert {word for word in typed if word.startswith("-")} <= flags


def test_every_option_has_its_environment_variable_unless_the_docs_except_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "configure.md").read_text()
    table = page.partition("| Without a variable |")[2].partition("\n\n")[0]
    without = set()
    for row in table.splitlines()[2:]:
        commands, flags = row.strip("|").split("|")
        without |= {
            (command, flag)
            for command in re.findall(r"`([^`]+)`", commands)
            for flag in re.findall(r"`(--[^`]+)`", flags)
        }
    found = set()
    for words, option, flag in options():
        if option.envvar is None:
            found.add((" ".join(words), flag))
        else:
            first = option.envvar if isinstance(option.envvar, str) else option.envvar[0]
            assert first == "EDGESPEC_" + flag.removeprefix("--").replace("-", "_").upper()
    assert found == without


def test_an_option_has_the_same_names_everywhere_and_a_variable_one_meaning() -> None:
    names: dict[str, set[str]] = {}  # by each short or other form, the options that it stands for
    forms: dict[str, set[tuple[str, ...]]] = {}
    shapes: dict[str, set[tuple[object, ...]]] = {}
    for words, option, flag in options():
        for form in option.opts:
            names.setdefault(form, set()).add(flag)
        if (" ".join(words), flag) != ("draft tune", "--answers"):  # generate's is also --n, as elsewhere
            forms.setdefault(flag, set()).add(tuple(option.opts))
        if option.envvar is not None and (words, flag) != (("bench",), "--tree-budget"):  # one or more rows
            shapes.setdefault(flag, set()).add((option.metavar, option.multiple, option.is_flag))
    assert {form: flags for form, flags in names.items() if len(flags) > 1} == {}
    assert {flag: found for flag, found in forms.items() if len(found) > 1} == {}
    assert {flag: found for flag, found in shapes.items() if len(found) > 1} == {}


def test_variables_reach_the_options_of_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value, command, message in [
        ("EDGESPEC_PORT", "70000", ["serve"], "EDGESPEC_PORT must be from 0 to 65535, not 70000."),
        ("EDGESPEC_QUEUE", "-1", ["serve"], "EDGESPEC_QUEUE must be from 0 to 10000, not -1."),
        ("EDGESPEC_HOST", "0.0.0.0", ["serve"], "Other machines can reach this server at 0.0.0.0"),
        ("EDGESPEC_SECONDS", "0", ["profile"], "EDGESPEC_SECONDS must be "),
        ("EDGESPEC_MEMORY", "lots", ["draft", "make", "x"], "EDGESPEC_MEMORY must be a size"),
        ("EDGESPEC_CONTEXT", "9", ["generate", "-p", "Hi"], "EDGESPEC_CONTEXT must be from 16 "),
        ("EDGESPEC_QUIET", "5", ["run", "Hi"], "EDGESPEC_QUIET must be true or false, not '5'."),
        ("EDGESPEC_N", "0", ["generate", "-p", "Hi"], "EDGESPEC_N must be from 1 to 1000, not 0."),
        (
            "EDGESPEC_ANSWERS",
            "0",
            ["generate", "-p", "Hi"],
            "EDGESPEC_ANSWERS must be from 1 to 1000, not 0.",
        ),
    ]:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert main(command) == 2
        assert capsys.readouterr().err.startswith(f"Error: {message}")


def test_defaults_in_help_are_the_librarys() -> None:
    signature = inspect.signature(edgespec.load)
    command = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
    told = {option.name: option.help for option in command.params if option.name != "help"}
    for name in ("context", "gpu_layers", "offload", "pack", "draft"):
        assert told[name].endswith(f"Default: {signature.parameters[name].default}.")


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


@pytest.mark.usefixtures("talking_session")
def test_short_options_are_those_of_llama_cpp(engine: TalkingEngine) -> None:
    flags = "-m m.gguf -md d.gguf -c 99 -n 9 -t 3 --temp 0.5 -s 7 -ngl 2"
    for command in (["generate"], ["run"]):
        assert main([*command, "-p", "Hi", *flags.split()]) == 0
        del engine.loaded_with["on_progress"]
        assert engine.loaded_with == {
            "model": "m.gguf",
            "draft": "d.gguf",
            "context": 99,
            "threads": 3,
            "gpu_layers": 2,
        }
    assert engine.asked[0][1] == GenerationConfig(max_tokens=9, temperature=0.5, seed=7)
    assert main(["generate", "-p", "Hi", "-n", "-1", "--seed", "-1"]) == 0
    assert engine.asked[-1][1].max_tokens is None
    assert main(["generate", "-hf", "org/name:Q4_K_M", "-p", "Hi"]) == 0
    assert engine.loaded_with["model"] == "org/name:Q4_K_M"


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("help", "--help"),
        ("help serve", "serve --help"),
        ("help models pair", "models pair --help"),
        ("version", "--version"),
    ],
)
def test_help_and_version_as_commands(words: str, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == main(options.split()) == 0
    text = capsys.readouterr().out
    assert text == text[: len(text) // 2] * 2


@pytest.mark.parametrize("name", ["pull", "list", "show", "rm", "run"])
def test_the_short_forms_of_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"Usage: edgespec {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "typed", "offers"),
    [
        ("--offload", "", ["auto", "stream", "mmap", "none"]),
        ("--offload", "s", ["stream"]),
        ("--tree", "se", ["sequoia", "sequences"]),
        ("--verify", "spec", ["specexec", "speculative", "specinfer", "spectr"]),
        ("--sampling", "", ["recommended", "greedy"]),
        ("--tree-budget", "a", ["auto"]),
        ("--draft", "lo", ["lookup"]),
    ],
)
def test_values_are_completed(option: str, typed: str, offers: list[str], tmp_path: Path) -> None:
    words = f"edgespec chat {option} {typed}"
    variables = {"COMP_WORDS": words, "COMP_CWORD": "3", "_EDGESPEC_COMPLETE": "complete_bash"}
    program = "import sys; from edgespec.cli.main import app; app(prog_name='edgespec')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, **variables},
    )
    assert done.stdout.split() == offers


def test_the_policies_that_are_completed_are_those_there_are() -> None:
    from edgespec.speculation.policies import NAMES

    assert NAMES == TREES


@pytest.mark.parametrize(
    ("tokens_per_second", "gain", "said"),
    [
        (2.06, 2.6, "about 2.1 tokens/s, 2.6 times as much"),
        (31.0, 1.5, "about 31 tokens/s, 1.5 times as much"),
        (9.0, 1.05, "It will gain little"),
    ],
)
def test_what_a_made_drafter_gains(tokens_per_second: float, gain: float, said: str) -> None:
    assert said in gain_in_words(tokens_per_second, gain)


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
    [
        ("4096000", 4096000),
        ("12B", 12),
        ("12GiB", 12 * 2**30),
        ("800MB", 800 * 10**6),
        ("1.5g", 3 * 2**29),
        (" 2 kib ", 2048),
    ],
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
        ("generate -p Hi --temperature -1", "--temperature must be from 0 to 100, not -1."),
        (
            "generate -p Hi --temp 5x",
            "--temperature must be a number, not '5x'.\nSee 'edgespec generate --help'.",
        ),
        ("generate -p Hi -t 5x", "--threads must be from 1 to 1024, not '5x'."),
        ("generate -p Hi --context 8_192", "--context must be from 16 to 10000000, not '8_192'."),
        (
            "generate -p Hi --top-k 5x",
            "--top-k must be an integer, not '5x'.\nSee 'edgespec generate --help'.",
        ),
        ("generate -p Hi --max-tokens -2", "--max-tokens must be 0 or more, not -2.\n-1 means no limit."),
        (
            "generate -p Hi --top-k \udcff",
            "--top-k must be an integer, not '\\udcff'.\nSee 'edgespec generate --help'.",
        ),
        ("plan --model=", "--model must be a non-empty string, not ''."),
        ("generate -p Hi --stop=", "--stop must be a non-empty string, not ''."),
        (
            "generate -p Hi --think deeply",
            "--think must be auto, on, off, low, medium, high or a maximum number of tokens, not 'deeply'.",
        ),
        (
            "generate --input x --score --logprobs 21",
            "--logprobs must be an integer from 0 to 20, not 21.",
        ),
        (
            "generate -p Hi --memory 12XB",
            "--memory must be a size such as 12GiB, 800MB or 4000000000, not '12XB'.",
        ),
        ("generate -p Hi --memory 0", "--memory must be a size above 0 and below 8 EiB, not 0."),
        ("generate -p Hi --tree-budget -2", "--tree-budget must be from 1 to 4096 or auto, not '-2'."),
        ("generate -p Hi --input x", "Both --prompt and --input were given.\nGive one of them."),
        ("generate -p Hi --raw --system x", "--system cannot be used with --raw.\nLeave one of them out."),
        (
            "generate --input no.jsonl",
            "no.jsonl cannot be read: No such file or directory.\nGive a file to --input.",
        ),
        (
            "generate --memry 1GiB",
            "No such option: --memry (Possible options: --memory, --ray, --verify)\n"
            "See 'edgespec generate --help'.",
        ),
        ("config --get", "No such option: --get\nSee 'edgespec config --help'."),
        ("generate -p Hi --memory 12", "--memory must have a unit: 12GiB, 12MiB or, for bytes, 12B."),
        ("generat", "No such command 'generat'. Did you mean 'generate'?\nSee 'edgespec --help'."),
        ("models remov x", "No such command 'remov'.\nSee 'edgespec models --help'."),
        (
            "serve --port 0 --alias a=b",
            "--alias a=b names a model, and only one is served.\nWrite --alias a.",
        ),
        ("chat --memory 12", "--memory must have a unit: 12GiB, 12MiB or, for bytes, 12B."),
    ],
)
def test_usage_errors(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert capsys.readouterr() == ("", f"Error: {message}\n")


def test_a_name_with_a_line_break_is_shown_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "show", "./no\nsuch.gguf"]) != 0
    assert "no such.gguf " in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", ["--threads 0", "--context 3", "--tree-budget 5000", "--offload cloud", "--pack x"]
)
def test_absurd_values_are_refused_by_name(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    flag, value = flags.split()
    assert err.startswith(f"Error: {flag} must be ")
    assert err.replace("'", "").endswith(f", not {value}.\n")


@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        ("--draft none --tree-budget 8", "--draft none", "--tree-budget"),
        ("--draft none --tree sequoia", "--draft none", "--tree"),
        ("--draft none --draft-from .", "--draft none", "--draft-from"),
        ("--drafter lookup --draft mtp", "--drafter lookup", "--draft mtp"),
        ("--workers a:1 --offload mmap", "--offload mmap", "--workers"),
        ("--quiet --verbose", "--quiet", "--verbose"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(
    flags: str, first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-p", "Hi", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"Error: {first} and {second} exclude each other.\nLeave out ")


def test_a_flag_prevails_over_a_variable_that_contradicts_it(
    engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_TREE_BUDGET", "8")
    monkeypatch.setenv("EDGESPEC_QUIET", "1")
    assert main(["generate", "-p", "Hi", "--draft", "none", "--verbose"]) == 0
    assert engine.loaded_with["draft"] == "none"
    assert "tree_budget" not in engine.loaded_with
    monkeypatch.setenv("EDGESPEC_DRAFT", "none")
    capsys.readouterr()
    assert main(["generate", "-p", "Hi"]) == 2
    assert "--draft none and --tree-budget exclude each other." in capsys.readouterr().err


def test_an_error_as_json_has_the_shape_of_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", "--json", "--top-p", "3"]) == 2
    out, err = capsys.readouterr()
    (record,) = records(out)
    assert record.keys() == (Generation().to_json("Hi") | NO_ORIGIN).keys()
    assert (record["prompt"], record["finish_reason"]) == ("Hi", "error")
    assert record["error"] == "--top-p must be above 0 and at most 1, not 3."
    assert err == "Error: --top-p must be above 0 and at most 1, not 3.\n"


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
    assert capsys.readouterr().err.startswith("Error: Not enough memory.\n")


def test_a_closed_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", "-p", "Hi"]) == 1
    err = capsys.readouterr().err
    assert err == "Error: Standard output is closed.\nLeave it open, or use --output FILE.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", "--output", "/dev/full"]) == 1
    said = "Error: /dev/full cannot be written: No space left on device.\nFree some space on that disk.\n"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_path_that_is_no_model_is_refused_before_a_prompt_is_waited_for(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes"
    notes.write_text("Hello")
    assert main([command, str(notes)]) == 1
    assert f"Error: {notes} is not a GGUF file: it is a text file." in capsys.readouterr().err


def test_completion_is_shown_for_the_shell_that_is_named() -> None:
    program = [sys.executable, "-m", "edgespec", "--show-completion", "zsh"]
    shown = subprocess.run(program, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("#compdef edgespec")
