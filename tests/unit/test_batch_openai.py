"""Batches in OpenAI's format: requests in, responses out, and what a second run keeps."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from edgespec.cli.main import main
from edgespec.generation.config import GenerationConfig
from tests.unit.talking import ANSWER, TalkingEngine, records, write_lines

Run = Callable[..., tuple[int, str]]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]


def request(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    if url == CHAT and "messages" not in body:
        body["messages"] = HELLO
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "gpt-4o-mini"} | body}


def outline(result: dict[str, Any]) -> tuple[Any, ...]:
    """The id of a result, its status, and its texts or its error."""
    response = result["response"]
    assert result["error"] is None
    if response["status_code"] != 200:
        return result["custom_id"], response["status_code"], response["body"]["error"]["message"]
    choices = response["body"]["choices"]
    return (
        result["custom_id"],
        200,
        [c["message"]["content"] if "message" in c else c["text"] for c in choices],
    )


def test_requests_and_lines_of_our_own_in_one_file(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str], smol_path: Path
) -> None:
    prompts = write_lines(
        tmp_path / "in.jsonl",
        request("a", temperature=0.5, max_completion_tokens=9, stop="x", user="someone"),
        {"id": "b", "prompt": "Hm?"},
        request("c", TEXT, prompt="Once", max_tokens=4),
    )
    assert main(["generate", "--input", str(prompts), "--top-k", "3", "--system", "Be brief."]) == 0
    out, err = capsys.readouterr()
    assert err == "3 answered.\n"
    brief = {"role": "system", "content": "Be brief."}
    assert engine.asked == [
        ([brief, *HELLO], GenerationConfig(top_k=3, temperature=0.5, max_tokens=9, stop=("x",)), False),
        ([brief, {"role": "user", "content": "Hm?"}], GenerationConfig(top_k=3), False),
        ("Once", GenerationConfig(top_k=3, max_tokens=4), True),
    ]
    chat, own, text = records(out)
    assert own["text"] == ANSWER
    assert list(chat) == ["id", "custom_id", "response", "error", "edgespec"]
    assert chat["id"].startswith("batch_req_")
    assert chat["custom_id"] == "a"
    assert chat["response"]["status_code"] == 200
    assert chat["error"] is None
    completion = ChatCompletion.model_validate(chat["response"]["body"], strict=True)
    assert completion.choices[0].message.content == ANSWER
    assert completion.choices[0].finish_reason == "stop"
    assert completion.model == smol_path.stem
    assert completion.usage is not None
    assert completion.usage.total_tokens == 6
    assert Completion.model_validate(text["response"]["body"], strict=True).choices[0].text == ANSWER
    assert chat["edgespec"]["settings"] == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "stop": ["x"],
        "endpoint": CHAT,
    }
    assert chat["edgespec"]["fingerprint"].keys() == {"model", "prompt", "settings"}


URL = f'"url" must be {CHAT} or {TEXT}, not'
BAD_REQUESTS = {
    "url": (request("bad") | {"url": "/v1/embeddings"}, f'{URL} "/v1/embeddings".'),
    "no url": ({"custom_id": "bad", "method": "POST", "body": {}}, f"{URL} null."),
    "method": (request("bad") | {"method": "GET"}, '"method" must be "POST", not "GET".'),
    "body": (request("bad") | {"body": [1]}, "The body is not a JSON object."),
    "stream": (request("bad", stream=True), "A batch cannot stream its answers. Leave out 'stream'."),
    "messages": (request("bad", messages=[]), "messages must be a non-empty list."),
    "tools": (request("bad", tools=[{}]), "A tool has no valid name. It must have 1 to 256 letters"),
    "n": (request("bad", n=129), "n must be an integer from 1 to 128, not 129."),
    "top_p": (request("bad", top_p=7), "top_p must be above 0 and at most 1, not 7."),
    "long": (request("bad", TEXT, prompt="too long"), "The prompt has 9 tokens. Shorten it."),
    "tokens": (request("bad", TEXT, prompt=[1, 99]), "There is no token 99. Tokens are 0 to 9."),
    "twice": (request("good"), "Duplicate id 'good' (first on line 1)."),
}


def test_what_has_no_effect_is_named_in_the_result(run: Run, answers: Path) -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert run([request("a", messages=begun, odd=1), request("b")])[0] == 0
    first, second = records(answers.read_text())
    assert outline(first) == ("a", 200, [ANSWER])
    assert first["response"]["body"]["warnings"] == ["Ignored unknown field 'odd'."]
    assert "warnings" not in second["response"]["body"]


@pytest.mark.parametrize(("bad", "reason"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_told_and_the_others_are_answered(
    bad: dict[str, Any], reason: str, run: Run, answers: Path, engine: TalkingEngine
) -> None:
    engine.vocabulary_size = 10
    lines = [request("good"), bad, request("last", TEXT, prompt=[1, 2])]
    for told in ("2 answered, 1 failed.", "0 answered, 2 already done, 1 failed."):
        code, err = run(lines)
        assert code == 1
        assert err.startswith(f"line 2: {reason}")
        assert err.endswith(f"\n{told}\n")
        good, failed, last = records(answers.read_text())
        assert outline(good) == ("good", 200, [ANSWER])
        assert outline(last) == ("last", 200, [ANSWER])
        identifier, status, message = outline(failed)
        assert (identifier, status) == (bad["custom_id"], 400)
        assert message.startswith(reason)
        error = failed["response"]["body"]["error"]
        code = "context_length_exceeded" if "9 tokens" in reason else None
        assert error == {"message": message, "type": "invalid_request_error", "param": None, "code": code}


def test_a_custom_id_that_is_no_text_fails_in_our_own_format(run: Run, answers: Path) -> None:
    assert run([request("a") | {"custom_id": 5}, request("b")])[0] == 1
    failed, answered = records(answers.read_text())
    assert (failed["id"], failed["error"]) == (1, 'line 1: "custom_id" must be a string, not 5.')
    assert outline(answered) == ("b", 200, [ANSWER])


def test_all_answers_to_a_request_are_in_one_response(run: Run, answers: Path, engine: TalkingEngine) -> None:
    lines = [request("a", n=3, seed=5), request("b", seed=-1)]
    assert run(lines, "--n", "2", "--temperature", "0.5") == (0, "2 answered.\n")
    assert [config.seed for _, config, _ in engine.asked] == [5, 6, 7, None, None]
    first, second = records(answers.read_text())
    assert outline(first) == ("a", 200, [ANSWER] * 3)
    assert outline(second) == ("b", 200, [ANSWER] * 2)
    body = ChatCompletion.model_validate(first["response"]["body"], strict=True)
    assert [choice.index for choice in body.choices] == [0, 1, 2]
    assert body.usage is not None
    assert (body.usage.prompt_tokens, body.usage.completion_tokens) == (3, 9)


def test_one_answer_that_fails_fails_its_request(run: Run, answers: Path, engine: TalkingEngine) -> None:
    assert run([request("a", TEXT, prompt="too long", n=3), request("b")])[0] == 1
    assert [prompt for prompt, _, _ in engine.asked] == ["too long", HELLO]
    assert [outline(r)[:2] for r in records(answers.read_text())] == [("a", 400), ("b", 200)]


def test_a_second_run_does_what_is_missing_in_the_order_of_the_input(
    run: Run, answers: Path, engine: TalkingEngine
) -> None:
    lines = [request(i, TEXT, prompt=f"Q{i}") for i in "abcd"]
    assert run(lines[2:]) == (0, "2 answered.\n")
    kept = records(answers.read_text())
    failed = kept[0] | {"custom_id": "b"}
    failed["response"] = {"status_code": 400, "request_id": "r", "body": {"error": {"message": "full"}}}
    with answers.open("a") as file:
        file.write(json.dumps(failed) + '\n{"id": "batch_req_7", "custom_id": "a", "resp')
    assert run(lines) == (0, "2 answered, 2 already done.\n")
    assert [prompt for prompt, _, _ in engine.asked] == ["Qa", "Qb"]
    results = records(answers.read_text())
    assert [outline(r) for r in results] == [(i, 200, [ANSWER]) for i in "abcd"]
    assert results[2:] == kept


def test_a_request_that_was_interrupted_is_answered_by_the_next_run(
    run: Run, answers: Path, engine: TalkingEngine
) -> None:
    lines = [request("a"), request("b", n=2), request("c")]

    def interrupt(word: int) -> None:
        if len(engine.asked) == 3 and word == 1:
            signal.raise_signal(signal.SIGINT)

    engine.on_word = interrupt
    assert run(lines) == (130, "Interrupted at line 2. 1 answered. The same command continues there.\n")
    assert [outline(r) for r in records(answers.read_text())] == [("a", 200, [ANSWER])]
    engine.on_word = lambda _: None
    assert run(lines) == (0, "2 answered, 1 already done.\n")
    assert [outline(r)[0] for r in records(answers.read_text())] == ["a", "b", "c"]


def test_an_interruption_is_told_on_standard_output(
    engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str], answers: Path, run: Run
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", request("a"))
    engine.on_word = lambda _: signal.raise_signal(signal.SIGINT)
    assert main(["generate", "--input", str(prompts)]) == 130
    out = capsys.readouterr().out
    (result,) = records(out)
    assert (result["custom_id"], result["response"]) == ("a", None)
    assert result["error"] == {
        "code": "batch_cancelled",
        "message": "Interrupted before this request was answered.",
    }
    engine.on_word = lambda _: None
    answers.write_text(out)
    assert run([request("a")]) == (0, "1 answered.\n")
    assert [outline(r) for r in records(answers.read_text())] == [("a", 200, [ANSWER])]


@pytest.mark.parametrize(
    ("line", "flags", "difference"),
    [
        (request("a", temperature=0.7), [], "temperature was 0.0 and is now 0.7"),
        (request("a"), ["--max-tokens", "9"], "max_tokens was none and is now 9"),
        (request("a", n=2), [], "n was 1 and is now 2"),
        (
            request("a", messages=[{"role": "user", "content": "Ho"}]),
            [],
            "the prompt or the system prompt differs",
        ),
        ({"id": "a", "messages": HELLO}, [], f"endpoint was {CHAT} and is now none"),
    ],
    ids=["temperature", "command", "n", "prompt", "format"],
)
def test_a_run_with_something_else_is_refused_before_a_model_is_loaded(
    line: Any, flags: list[str], difference: str, run: Run, answers: Path, engine: TalkingEngine
) -> None:
    assert run([request("a")])[0] == 0
    before = answers.read_bytes()
    code, err = run([line], *flags)
    assert (code, engine.loaded_with, answers.read_bytes()) == (2, {}, before)
    assert f"made with different settings, at line 1: {difference}.\n" in err
    assert run([line], *flags, "--overwrite") == (0, "1 answered.\n")
    assert len(records(answers.read_text())) == 1
    assert run([line], *flags) == (0, "0 answered, 1 already done.\n")


def test_another_name_of_the_model_changes_nothing(run: Run, answers: Path) -> None:
    assert run([request("a")])[0] == 0
    assert run([request("a", model="gpt-5")]) == (0, "0 answered, 1 already done.\n")


def test_ids_are_those_of_every_run(run: Run, answers: Path) -> None:
    lines = [request("a"), request("b"), request("b"), request("c", n=0)]
    found = []
    for _ in range(2):
        answers.unlink(missing_ok=True)
        assert run(lines)[0] == 1
        results = records(answers.read_text())
        ids = [(r["id"], r["response"]["request_id"], r["response"]["body"].get("id")) for r in results]
        assert len({i for i, _, _ in ids}) == 4
        found.append(ids)
    assert found[0] == found[1]


def test_results_of_other_programs_are_gone_on_with(run: Run, answers: Path) -> None:
    body = {"choices": [{"message": {"content": "Green."}}]}
    from_openai = {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "1", "body": body},
        "error": None,
    }
    expired = {
        "id": "batch_req_2",
        "custom_id": "b",
        "response": None,
        "error": {"code": "batch_expired", "message": "It took too long."},
    }
    from_vllm = {
        "id": "vllm-3",
        "custom_id": "c",
        "response": {"status_code": 400, "request_id": "3", "body": None},
        "error": "Request must not be sent in stream mode",
    }
    write_lines(answers, from_openai, expired, from_vllm)
    code, err = run([request(i) for i in "abc"])
    assert (code, err.splitlines()[-1]) == (0, "2 answered, 1 already done.")
    assert [outline(r)[2] for r in records(answers.read_text())] == [["Green."], [ANSWER], [ANSWER]]


@pytest.mark.parametrize(
    "content",
    [
        request("a"),
        {"id": "x", "custom_id": 5, "response": None, "error": None},
        {"id": "x", "custom_id": "a", "response": None, "error": None},
        {"id": "x", "custom_id": "a", "response": "fine", "error": None},
        {"id": "x", "custom_id": "a", "response": None, "error": "e", "edgespec": 3},
    ],
    ids=["input", "number", "empty", "text", "edgespec"],
)
def test_a_file_of_something_else_is_left_alone(
    content: dict[str, Any], run: Run, answers: Path, engine: TalkingEngine
) -> None:
    before = write_lines(answers, content).read_bytes()
    code, err = run([request("a")])
    assert (code, engine.loaded_with, answers.read_bytes()) == (1, {}, before)
    assert err.startswith(f"Error: Line 1 of {answers} is not a result.\n")
