"""`edgespec generate`: prompts, answers, signals and rules, with an engine that only talks."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.cli.batch.input_file import read_jobs
from edgespec.cli.interrupt import ENDING
from edgespec.cli.main import main
from edgespec.cli.prompt import whole_prompt
from edgespec.cli.screen.formatting import details, format_statistics
from edgespec.cli.screen.terminal import Terminal
from edgespec.generation.result import Generation
from tests.unit.talking import TalkingEngine, write_lines


def test_text_goes_to_stdout_and_nothing_else_does(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-p", "Hi"]) == 0
    assert capsys.readouterr() == ("Blue as ever.\n", "")


def test_a_thought_is_no_part_of_the_text(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.thought = ["Hm,", " sky."]
    assert main(["generate", "-p", "Hi", "--think", "200"]) == 0
    assert capsys.readouterr() == ("Blue as ever.\n", "")
    assert engine.asked[0][1].think == "200"
    assert main(["generate", "-p", "Hi", "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert out == "Blue as ever.\n"
    assert "Hm, sky.\n\n5 tokens (2 of thought)\n" in err
    assert "thought     2 of these tokens\n" in err
    assert main(["generate", "-p", "Hi", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["text"], record["reasoning_content"]) == ("Blue as ever.", "Hm, sky.")
    assert main(["generate", "-p", "Hi", "--think", "deeply"]) == 2
    capsys.readouterr()
    engine.can_think = False
    assert main(["generate", "-p", "Hi", "--think", "off"]) == 0
    told = "The model's chat template has no thinking mode, so --think has no effect.\n"
    assert capsys.readouterr().err == told
    assert main(["generate", "-p", "Hi"]) == 0
    assert capsys.readouterr().err == ""


def test_verbose_tells_on_stderr(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.full = True
    assert main(["generate", "-p", "Hi", "--verbose"]) == 0
    assert capsys.readouterr() == (
        "Blue as ever.\n",
        "talker, drafted by nobody\nIt only talks.\n"
        "3 tokens\n"
        "prompt      3 tokens in 0.00 s\n"
        "answer      3 tokens in 0.00 s; cut off by a full context\n"
        "speed-up    unknown: no recent pass without drafts was timed\n"
        "drafts      3 passes, 1.00 tokens each; 0 of 9 drafted tokens accepted\n"
        "time        0.00 s drafting, 0.00 s computing passes, 0.00 s waiting for the disk\n"
        "limited by  the disk: waiting for weights took longest\n"
        "memory      peak 0 B of 0 B\n"
        "mode        not bit-exact: near-ties may differ from the text without drafts\n"
        "The context of 4096 tokens is full. --context sets a larger one.\n",
    )


def test_what_is_done_otherwise_than_asked_is_said_without_being_asked(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.warnings = ("--memory is lowered from 9.0 GiB to 2.0 GiB: no more is available.",)
    assert main(["generate", "-p", "Hi"]) == 0
    assert capsys.readouterr() == ("Blue as ever.\n", engine.warnings[0] + "\n")


def test_a_prompt_from_stdin(engine: TalkingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüß\n\n".encode())))
    assert main(["generate", "--raw"]) == 0
    assert engine.asked[0][0] == "Grüß\n"
    assert engine.asked[0][2] is True


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "The prompt is empty"),
        (b"ab\n\xff", "The text on standard input is not valid UTF-8: byte 0xff at offset 3, on line 2"),
        ("Hi".encode("utf-16"), "The text on standard input is UTF-16, not UTF-8"),
    ],
)
def test_a_wrong_prompt_from_stdin(
    data: bytes, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["generate"]) == 2
    assert capsys.readouterr().err.startswith(f"Error: {what}.\n")


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals there")
def test_ctrl_c_while_a_pipe_is_waited_for_leaves_no_note_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin, os.fdopen(writer, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        ctrl_c = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))

        def wait() -> None:
            ctrl_c.start()
            whole_prompt(None, Terminal(), "")

        with pytest.raises(KeyboardInterrupt):
            wait()
        ctrl_c.join()
    notes = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(note.finished.is_set() for note in notes)


def test_a_system_prompt_makes_messages(engine: TalkingEngine) -> None:
    assert main(["generate", "-p", "Hi", "--system", "Be brief."]) == 0
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert engine.asked[0][0] == expected


def test_ctrl_c_while_the_prompt_is_read_claims_no_answer(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.on_word = lambda word: signal.raise_signal(signal.SIGINT) if word == 0 else None
    assert main(["generate", "-p", "Hi", "--verbose"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == "Interrupted: there is no answer yet."
    assert "tokens/s" not in err


@pytest.mark.parametrize(("number", "code"), [(number, 128 + number) for number in (signal.SIGINT, *ENDING)])
def test_a_signal_keeps_what_was_written(
    number: signal.Signals, code: int, engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.on_word = lambda word: signal.raise_signal(number) if word == 1 else None
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
        assert capsys.readouterr() == ("", "Interrupted.\n")
    assert engine.closed
    assert engine.asked == []


def test_the_rule_is_a_setting_of_each_answer(engine: TalkingEngine, tmp_path: Path) -> None:
    flags = ["--temperature", "0.8", "--verify", "recursive", "--quiet"]
    lines = write_lines(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b", "verify": "block"})
    assert main(["generate", "--input", str(lines), "--output", str(tmp_path / "out.jsonl"), *flags]) == 0
    assert [config.verify for _, config, _ in engine.asked] == ["recursive", "block"]


def test_a_rule_of_the_wrong_kind_on_a_line(
    engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    (job,) = read_jobs([b'{"prompt": "a", "verify": 3}'])
    assert job.error == "verify must be a string, not 3."


def test_lossy_output_is_labelled(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    told = "--verify lenience:factor=0.5 is lossy: the text may differ from the model's own.\n"
    flags = ["--temperature", "0.8", "--verify", "lenience"]
    for arguments in (["generate", "-p", "Hi"], ["generate", "-p", "Hi", "--quiet"]):
        assert main([*arguments, *flags]) == 0
        assert capsys.readouterr() == ("Blue as ever.\n", told)
    answer = Generation(verify="lenience:factor=0.5", lossy=True)
    assert format_statistics(answer).endswith(", lossy (lenience:factor=0.5)")
    assert details(answer)["mode"].startswith("lossy (lenience:factor=0.5)")
    assert answer.to_json("Hi")["speculation"]["lossy"] is True


def test_a_chat_says_that_it_is_lossy(
    engine: TalkingEngine,
    talking_session: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi")))
    assert main(["chat", "--verify", "topk-gap"]) == 0
    err = capsys.readouterr().err
    assert err == "--verify topk-gap:k=3,gap=1 is lossy: the text may differ from the model's own.\n"


def test_lossless_rules_say_nothing(engine: TalkingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--temperature", "0.8", "--verify", "recursive"], ["--verify", "typical"]):
        assert main(["generate", "-p", "Hi", *flags]) == 0  # at temperature 0 typical acceptance is greedy
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("flags", "code"), [([], 1), (["--answers", "2"], 1), (["--json"], 0)])
def test_a_thought_without_an_answer_is_told(
    flags: list[str], code: int, engine: TalkingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.thought, engine.words = ["Hm,", " sky."], []
    assert main(["generate", "-p", "Hi", *flags]) == code
    out, err = capsys.readouterr()
    assert "The model thought for 2 tokens and gave no answer. --think off" in err
    if flags == ["--json"]:
        record = json.loads(out)
        assert (record["text"], record["reasoning_content"], record["finish_reason"]) == (
            "",
            "Hm, sky.",
            "stop",
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--verify recursiv", "There is no verification rule 'recursiv'.\nDid you mean recursive?"),
        (
            "--verify greedy --temperature 1",
            "The rule 'greedy' takes the likeliest token, and temperature is 1.0.\nLeave out one of them.",
        ),
        (
            "--verify block --temperature 1 --exact",
            "With --verify block the text depends on the drafter, which --exact rules out.\n"
            "Leave out one of them.",
        ),
    ],
)
def test_rules_that_cannot_be_had(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "Hi", *flags.split()]) == 2
    assert capsys.readouterr() == ("", f"Error: {message}\n")


def test_files_go_before_the_prompt(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.md"
    first.write_text("one\n")
    second.write_text("```\ntwo\n```\n")
    assert main(["generate", "Sum up", "-f", str(first), "--file", str(second)]) == 0
    blocks = "a.txt:\n```\none\n```\n\nb.md:\n````\n```\ntwo\n```\n````\n\n"
    assert engine.asked[0][0] == f"{blocks}Sum up"
    assert main(["generate", "Sum up", "-f", str(tmp_path / "none.txt")]) == 2
    assert "none.txt cannot be read: " in capsys.readouterr().err
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "Hi"})
    assert main(["generate", "--input", str(prompts), "-f", str(first)]) == 2
    assert "--file works with a single prompt only." in capsys.readouterr().err


def test_a_system_prompt_from_a_file(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "system.txt"
    file.write_text("Be brief.\n")
    assert main(["generate", "-p", "Hi", "--system-file", str(file)]) == 0
    assert engine.asked[0][0][0] == {"role": "system", "content": "Be brief."}
    assert main(["generate", "-p", "Hi", "--system-file", str(file), "--system", "No."]) == 2
    assert "Both --system and --system-file were given." in capsys.readouterr().err
    assert main(["generate", "-p", "Hi", "--system-file", str(tmp_path / "none")]) == 2
    assert "none cannot be read: " in capsys.readouterr().err


def test_a_schema_may_stand_on_the_command_line(engine: TalkingEngine, tmp_path: Path) -> None:
    schema = '{"type": "integer"}'
    assert main(["generate", "-p", "Hi", "--json-schema", schema]) == 0
    (tmp_path / "schema.json").write_text(schema)
    assert main(["generate", "-p", "Hi", "--json-schema", str(tmp_path / "schema.json")]) == 0
    inline, from_file = (config.grammar for _, config, _ in engine.asked)
    assert inline == from_file
    assert inline is not None
    assert inline.text == schema
