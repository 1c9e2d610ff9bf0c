"""The real program with the default model: what a person, a pipe and a script see."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from edgespec.generation.result import Generation
from tests.desk import STORY, Desk
from tests.gate import Gate
from tests.program import run_here
from tests.tiers import slow_except
from tests.unit.talking import records
from tests.waiting import PATIENCE_S

PROGRAM = [sys.executable, "-m", "edgespec"]
ROOT = Path(__file__).resolve().parents[2]
SKY = "Why is the sky blue?"
Reply = Callable[..., str]

pytestmark = pytest.mark.usefixtures("at_a_desk")


def outline(value: Any) -> Any:
    """The names in a record, without their values."""
    return {name: outline(v) for name, v in value.items()} if isinstance(value, dict) else None


def test_generate_prints_the_answer_only(reply: Reply) -> None:
    command = [*PROGRAM, "generate", "-p", SKY, "--max-tokens", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, reply(SKY, 6) + "\n", "")


def test_json_is_one_object_of_the_promised_shape(reply: Reply) -> None:
    done = run_here("generate", "-p", SKY, "--max-tokens", "6", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (record,) = records(done.stdout)
    assert outline(record) == outline(Generation().to_json(SKY)) | {
        "model": None,
        "settings": {"max_tokens": None},
        "fingerprint": {"model": None, "prompt": None, "settings": None},
    }
    assert record["text"] == reply(SKY, 6)
    assert record["finish_reason"] == "length"
    assert record["usage"]["completion_tokens"] == len(record["tokens"]) == 6
    assert record["memory"]["peak_rss_bytes"] > 50_000_000


def test_the_prompt_may_come_from_a_pipe(reply: Reply) -> None:
    piped = run_here("generate", "--max-tokens", "4", "--json", text=SKY + "\n")
    assert records(piped.stdout)[0]["prompt"] == SKY
    assert records(piped.stdout)[0]["text"] == reply(SKY, 4)


def test_raw_continues_with_the_text(reply: Reply) -> None:
    done = run_here("generate", "--raw", "-p", "The capital of France is", "--max-tokens", "2")
    assert done.stdout == reply("The capital of France is", 2, raw=True) + "\n"


def test_verbose_statistics_go_to_stderr(reply: Reply) -> None:
    done = run_here("generate", "-p", SKY, "--max-tokens", "3", "--verbose")
    assert done.stdout == reply(SKY, 3) + "\n"
    assert re.search(r"^3 tokens, \d+(\.\d+)?/s", done.stderr, re.MULTILINE)
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("command", "stderr"),
    slow_except(
        [(f"chat <<<'{SKY}'", "2>&-")],
        itertools.product((f"generate -p '{SKY}'", f"chat <<<'{SKY}'"), ("2>/dev/full", "2>&-")),
    ),
)
def test_an_answer_is_whole_where_standard_error_cannot_be_written(
    command: str, stderr: str, reply: Reply
) -> None:
    if "full" in stderr and not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    if sys.platform == "win32":
        pytest.skip("there is no bash")
    options = "--verbose --sampling greedy --max-tokens 20"  # so that much is said there

    shell = ["bash", "-c", f"exec {' '.join(PROGRAM)} {command} {options} {stderr}"]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, reply(SKY, 20) + "\n")


def test_a_full_context_is_told() -> None:
    done = run_here("generate", "--raw", "-p", "one two three four", "--context", "16")
    assert done.returncode == 0
    assert done.stderr == "The context of 16 tokens is full. --context sets a larger one.\n"


def test_jsonl_with_bad_lines_continues_where_it_stopped(tmp_path: Path, reply: Reply) -> None:
    prompts, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": "sky", "prompt": SKY}, {"id": "long", "prompt": "x " * 600}, {"prompt": SKY}]
    prompts.write_text("\n".join([json.dumps(line) for line in lines] + ["not JSON", ""]))
    arguments = ["generate", "--input", str(prompts), "--output", str(answers), "--max-tokens", "3"]
    done = run_here(*arguments, "--context", "512")
    assert (done.returncode, done.stdout) == (1, "")
    *reasons, summary = done.stderr.splitlines()
    reasons.sort()  # a line that cannot be read is refused while others are answered
    assert re.fullmatch(r"line 2: The prompt has \d+ tokens, but the context holds 512\..*", reasons[0])
    assert reasons[1:] == ["line 4: Invalid JSON at column 1: Expecting value."]
    assert summary == "2 answered, 2 failed."
    first = records(answers.read_text())
    assert [(r["id"], r["text"]) for r in first] == [
        ("sky", reply(SKY, 3)),
        ("long", ""),
        (3, reply(SKY, 3)),
        (4, ""),
    ]
    assert [r["finish_reason"] for r in first] == ["length", "error", "length", "error"]

    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with answers.open("a") as file:
        file.write('{"id": "half')
    done = run_here(*arguments, "--context", "2048")
    assert (done.returncode, done.stderr) == (0, "1 answered, 2 already done.\n")
    again = records(answers.read_text())
    assert [r["id"] for r in again] == [4, "sky", "long", 3]  # results of other lines come first
    assert again[2]["finish_reason"] == "length"
    assert [again[1], again[3], again[0]] == [first[0], first[2], first[3]]


def test_an_output_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    output = tmp_path / "none" / "out.jsonl"
    done = run_here("generate", "no-such-model.gguf", "-p", SKY, "--output", str(output))
    assert (done.returncode, done.stdout) == (1, "")
    what = f"Error: {output} cannot be written: there is no folder {output.parent}."
    assert done.stderr == f"{what}\nCreate it first.\n"


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.close()
    command = [*gate.program, "generate", "-p", SKY, "--draft", "none", "--max-tokens", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.read(1)
        program.stdout.close()
        gate.open()
        assert program.stderr.read() == b""
        assert program.wait(PATIENCE_S) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_signal_keeps_the_answer_so_far(
    number: signal.Signals, code: int, reply: Reply, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    gate.close()
    command = [*gate.program, "generate", "-p", SKY, "--draft", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as program:
        assert program.stdout is not None
        begun = program.stdout.read(1)
        gate.wait()
        program.send_signal(number)
        rest, err = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == code
    text = (begun + rest).decode()
    assert text.startswith(reply(SKY, 1))
    assert text.endswith("\n")
    assert err.decode() == "Interrupted: the answer ends early.\n"


def test_chat_from_a_pipe_answers_one_question() -> None:
    asked = f"/bye is no command here.\n\n{SKY}"
    done = run_here("chat", "--max-tokens", "3", "--json", "--session", "piped", text=f"{asked}\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert [r["prompt"] for r in records(done.stdout)] == [asked]
    chat = ("chat", "--max-tokens", "3", "--json", "--session", "piped")
    done = run_here(*chat, "Briefly:", text="And at night?\n")
    assert [r["prompt"] for r in records(done.stdout)] == ["And at night?\n\nBriefly:"]
    assert done.stderr.startswith("Resumed 1 turn")


def test_a_conversation_keeps_its_system_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def prompt_after(*options: str) -> str:
        chat = ("chat", "--max-tokens", "2", "--session", "mine", "--draft", "none", "--context", "512")
        done = run_here(*chat, *options, text="Hi\n")
        assert done.returncode == 0, done.stderr
        messages = json.loads(run_here("sessions", "show", "mine", "--json").stdout)["messages"]
        return str(messages[0]["content"])

    assert prompt_after() == "Hi"
    monkeypatch.setenv("EDGESPEC_SYSTEM", "Be brief.")
    assert prompt_after() == "Be brief."
    monkeypatch.setenv("EDGESPEC_SYSTEM", "Be long.")
    assert prompt_after() == "Be brief."
    assert prompt_after("--system", "Be kind.") == "Be kind."


def test_text_from_a_pipe_goes_before_the_prompt() -> None:
    done = run_here("generate", "Summarize:", "--max-tokens", "3", "--json", text="Buy milk.\n")
    assert [r["prompt"] for r in records(done.stdout)] == ["Buy milk.\n\nSummarize:"]


def test_slots_for_a_model_in_memory_are_ignored_with_a_word() -> None:
    done = run_here("generate", "-p", "Hi", "--slots", "4", "--max-tokens", "2")
    assert (done.returncode, done.stderr) == (0, "Ignored --slots: no layers are streamed.\n")


def test_lines_that_nothing_can_be_done_with_end_nothing_else(tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    schema = '{"items": ' * 974 + "{}" + "}" * 974
    bad = [
        '{"prompt": "a", "temperature": 1' + "0" * 400 + "}",
        '{"prompt": "a", "json_schema": ' + schema + "}",
        '{"prompt": "a", "json_schema": {"type": 7}}',
        '{"prompt": "a", "grammar": "root ::= ("}',
        '{"prompt": "a", "seed": 1.5}',
        '{"prompt": "a", "stop": "\\ud800"}',
        "[" * 100_000,
    ]
    huge = {"max_tokens": 2, "top_k": 10**400, "penalty_window": 10**400, "repeat_penalty": 1.1}
    good = json.dumps({"prompt": SKY, "temperature": 1, "seed": 1, **huge})
    prompts.write_text("\n".join([*bad, good]))
    done = run_here("generate", "--input", str(prompts))
    assert done.returncode == 1
    assert "bug" not in done.stderr
    results = [r["finish_reason"] for r in records(done.stdout)]
    assert results == ["error"] * len(bad) + ["length"]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def desk(gate: Gate) -> Iterator[Desk]:
    with contextlib.closing(Desk("chat", "--max-tokens", "100", program=gate.program)) as desk:
        yield desk


def test_chat_at_a_terminal(desk: Desk, gate: Gate, reply: Reply) -> None:
    desk.ask("Hi", until=" tokens, ")
    assert reply("Hi", 8) in desk.shown

    desk.wait_for(">>>")
    gate.close()
    desk.type(STORY + "\r")
    gate.wait()
    desk.type("\x03")
    desk.wait_for("Stopped; the partial answer is kept.")

    desk.ask("Hi", until=" tokens, ")

    desk.wait_for(">>>")
    desk.type("half a thought\x03")
    desk.wait_for("Ctrl-D or /bye leaves.")
    assert desk.leave_by("\x04") == 0


@pytest.mark.slow
def test_slash_commands_at_a_terminal(desk: Desk) -> None:
    desk.ask("/hlep", until="There is no command /hlep. Did you mean /help?")
    desk.wait_for(">>>")
    desk.type('"""Hi\r')
    desk.wait_for("...")
    desk.type('there"""\r')
    desk.wait_for(" tokens, ")
    desk.ask("/stats", until="limited by")
    assert desk.leave_by("/bye\r") == 0


def test_requests_in_openais_format_get_the_text_that_the_prompt_gets_alone(
    tmp_path: Path, reply: Reply
) -> None:
    prompts, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    france = "The capital of France is"

    def request(custom_id: str, url: str, **body: Any) -> str:
        body |= {"model": "gpt-4o-mini", "max_tokens": 6}
        return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})

    chat = [{"role": "user", "content": SKY}]
    lines = [
        request("sky", "/v1/chat/completions", messages=chat),
        request("france", "/v1/completions", prompt=france),
        json.dumps({"id": "own", "prompt": SKY, "max_tokens": 6}),
        request("two", "/v1/chat/completions", messages=chat, n=2, temperature=0),
        request("tokens", "/v1/completions", prompt=[1, 10**6]),
        request("half", "/v1/completions", prompt="\ud800", n=2),
    ]
    prompts.write_text("\n".join(lines) + "\n")
    arguments = ["generate", "--exact", "--input", str(prompts), "--output", str(answers)]
    done = run_here(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("line 5: There is no token 1000000. Tokens are 0 to ")
    assert done.stderr.endswith("\n5 answered, 1 failed.\n")
    alone = run_here("generate", "--exact", "-p", SKY, "--max-tokens", "6").stdout.rstrip("\n")
    continued = run_here("generate", "--exact", "--raw", "-p", france, "--max-tokens", "6").stdout.rstrip(
        "\n"
    )
    sky, text, own, two, tokens, half = records(answers.read_text())
    body = ChatCompletion.model_validate(sky["response"]["body"], strict=True)
    assert body.choices[0].message.content == own["text"] == alone == reply(SKY, 6)
    assert body.choices[0].finish_reason == "length"
    assert body.usage is not None
    assert body.usage.completion_tokens == 6
    completion = Completion.model_validate(text["response"]["body"], strict=True)
    assert completion.choices[0].text == continued
    assert [choice["message"]["content"] for choice in two["response"]["body"]["choices"]] == [alone] * 2
    assert tokens["response"]["status_code"] == 400
    assert len(half["response"]["body"]["choices"]) == 2
    before = answers.read_bytes()
    assert run_here(*arguments).stderr.endswith("\n0 answered, 5 already done, 1 failed.\n")
    assert answers.read_bytes() == before


def test_text_in_a_locale_without_utf8(short_path: Path) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    asked = ["--system", "Du hörst zu.", "-p", "Grüß dich 漢", "--stop", "ß", "--json", "--max-tokens", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "edgespec", "generate", str(short_path), *asked],
        env=os.environ | locale,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == "Grüß dich 漢"


@pytest.mark.skipif(sys.platform == "win32", reason="arguments are always text there")
def test_a_prompt_that_is_not_utf8_is_refused_in_any_locale(short_path: Path) -> None:
    for locale in ({}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        done = subprocess.run(
            [sys.executable, "-m", "edgespec", "generate", str(short_path), "-p", b"Gr\xfc\xdf dich"],
            env=os.environ | locale,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.startswith(b"Error: The prompt is not valid UTF-8: byte 0xfc at offset 2.")
