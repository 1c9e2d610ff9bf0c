"""Tokens read of a conversation's next turn, whichever client sends it and whatever it changes."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import ollama
import pytest

from edgespec.engine.engine import Engine
from edgespec.files.checked import CheckedFiles
from edgespec.files.user_folders import cache_folder
from edgespec.llama.cache.states import BLOCK
from tests.integration.test_serve_api import TEMPLATE
from tests.serving import CHAT, Running, load, serving, started
from tests.templated import now_speaking
from tests.tiers import slow_except
from tests.waiting import wait_until

Change = Callable[[dict[str, Any]], None]
ASKED: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
NAME = "get_weather"
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "number"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": NAME, "description": "The weather in a city.", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
SYSTEM = "You are a sailor who knows the weather. " * 30
BUDGET = 8  # tokens of a thought
# Shows the thoughts of earlier answers, as templates do within a chain of calls.
SHOWS = TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' + (message",
    "{{- '<|im_start|>assistant\\n' }}{%- if message.reasoning_content %}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}{{- (message",
)


def showing_thoughts(path: Path) -> Engine:
    assert SHOWS != TEMPLATE
    return now_speaking(load(path, 1024), SHOWS)


@pytest.fixture(scope="module")
def server(smol_path: Path) -> Iterator[Running]:
    with serving(lambda: showing_thoughts(smol_path), parallel=2) as server:
        yield server


def cached_so_far(server: Running) -> int:
    return int(server.figures()["edgespec_cached_prompt_tokens_total"])


def keep(message: dict[str, Any]) -> None:
    """Change nothing."""


def asked(server: Running, messages: Any, **more: Any) -> Any:
    """A whole answer, or all pieces of a streamed one."""
    settings = {"model": "model", "messages": messages, "extra_body": {"think": False}, **more}
    with server.openai() as client:
        create: Any = client.chat.completions.create
        answer = create(**settings)
        return list(answer) if settings.get("stream") else answer


def written(answer: Any) -> int:
    """Tokens of the prompt and the answer."""
    return int(answer.usage.prompt_tokens + answer.usage.completion_tokens)


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def reorder(message: dict[str, Any]) -> None:
    function = message["tool_calls"][0]["function"]
    values = json.loads(function["arguments"])
    assert len(values) == 2
    function["arguments"] = json.dumps(dict(reversed(values.items())), separators=(",", ":"))


def numbers_as_javascript_has_them(message: dict[str, Any]) -> None:
    function = message["tool_calls"][0]["function"]
    values = json.loads(function["arguments"])
    function["arguments"] = json.dumps({**values, "days": float(values["days"])})


def no_thought(message: dict[str, Any]) -> None:
    assert message.pop("reasoning_content")


def space_around(message: dict[str, Any]) -> None:
    message["content"] = f"\r\n  {message.get('content') or ''} \n"
    if "reasoning_content" in message:
        message["reasoning_content"] = f" {message['reasoning_content']}\n"


@pytest.mark.parametrize(
    "change",
    slow_except([reorder], [keep, reorder, numbers_as_javascript_has_them, no_thought, space_around]),
)
def test_openai_calls_are_read_as_they_were_written(server: Running, change: Change) -> None:
    """The model writes calls on several lines, its template shows them on one, and clients change them."""
    more: Any = {"tools": [TOOL], "max_tokens": 120, "extra_body": {"think": BUDGET}}
    first = asked(server, ASKED, tool_choice="required", parallel_tool_calls=False, **more)
    message = first.choices[0].message.model_dump(exclude_none=True)
    change(message)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Snow"}
    second = asked(server, [*ASKED, message, result], **{**more, "max_tokens": 1})
    assert cached(second) >= written(first)  # earlier tests may have asked the same


def test_a_call_that_a_client_has_edited_is_read_as_it_sends_it(server: Running) -> None:
    more: Any = {"tools": [TOOL], "max_tokens": 120}
    first = asked(server, ASKED, tool_choice="required", **more)
    message = first.choices[0].message.model_dump(exclude_none=True)
    message["tool_calls"][0]["function"]["arguments"] = json.dumps({"city": "Bergen", "days": 77})
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Snow"}
    second = asked(server, [*ASKED, message, result], **{**more, "max_tokens": 1})
    assert first.usage.prompt_tokens <= cached(second) + BLOCK
    assert cached(second) < written(first)


@pytest.mark.parametrize("change", [keep, space_around])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_texts_are_read_as_they_were_written(server: Running, change: Change, stream: bool) -> None:
    asks = [{"role": "user", "content": "Tell me about the sea."}]
    if stream:
        parts = list(asked(server, asks, max_tokens=10, stream=True, stream_options={"include_usage": True}))
        first = parts[-1]
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    else:
        first = asked(server, asks, max_tokens=10)
        text = first.choices[0].message.content
    message = {"role": "assistant", "content": text}
    change(message)
    second = asked(server, [*asks, message, {"role": "user", "content": "Why?"}], max_tokens=1)
    assert cached(second) >= written(first) - 1  # of an answer that is cut off, the last token was not read


def test_responses_are_read_as_they_were_written(server: Running) -> None:
    more: Any = {"model": "model", "tools": [{"type": "function", **FUNCTION}], "extra_body": {"think": 8}}
    alone: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    with server.openai() as client:
        create: Any = client.responses.create
        first = create(input=ASKED, max_output_tokens=120, **alone, **more)
    call = next(item for item in first.output if item.type == "function_call")
    values = dict(reversed(json.loads(call.arguments).items()))
    told = [
        *ASKED,  # without the thought
        {**call.model_dump(exclude_none=True), "arguments": json.dumps(values)},
        {"type": "function_call_output", "call_id": call.call_id, "output": "Snow"},
    ]
    with server.openai() as client:
        create = client.responses.create
        second = create(input=told, max_output_tokens=1, **more)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens


def reorder_input(message: dict[str, Any]) -> None:
    (call,) = [block for block in message["content"] if block["type"] == "tool_use"]
    assert len(call["input"]) == 2
    call["input"] = dict(reversed(call["input"].items()))


def drop_thinking(message: dict[str, Any]) -> None:
    before = len(message["content"])
    message["content"] = [block for block in message["content"] if block["type"] != "thinking"]
    assert len(message["content"]) < before


def empty_text(message: dict[str, Any]) -> None:
    message["content"].insert(1, {"type": "text", "text": " \n"})


@pytest.mark.parametrize(
    ("change", "stream"),
    slow_except(
        [(drop_thinking, False), (reorder_input, True)],
        itertools.product((keep, reorder_input, drop_thinking, empty_text), (False, True)),
    ),
)
def test_anthropic_messages_are_read_as_they_were_written(
    server: Running, change: Change, stream: bool
) -> None:
    with server.anthropic() as client:
        more: Any = {
            "model": "model",
            "tools": [{"name": NAME, "description": "The weather in a city.", "input_schema": SCHEMA}],
            "extra_body": {"think": BUDGET},
        }
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        if stream:
            with client.messages.stream(messages=ASKED, max_tokens=120, tool_choice=choice, **more) as events:
                first: Any = events.get_final_message()
        else:
            first = client.messages.create(messages=ASKED, max_tokens=120, tool_choice=choice, **more)
        message: Any = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
        change(message)
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "Snow"}
        told = [*ASKED, message, {"role": "user", "content": [result]}]
        second: Any = client.messages.create(messages=told, max_tokens=1, **more)
        counted = client.messages.count_tokens(messages=told, **more)
    usage = first.usage
    assert second.usage.cache_read_input_tokens >= (
        usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
    )
    assert counted.input_tokens == second.usage.input_tokens + second.usage.cache_read_input_tokens


def reorder_arguments(message: dict[str, Any]) -> None:
    function = message["tool_calls"][0]["function"]
    assert len(function["arguments"]) == 2
    function["arguments"] = dict(reversed(function["arguments"].items()))


def drop_ollama_thinking(message: dict[str, Any]) -> None:
    assert message.pop("thinking")


def ollama_space(message: dict[str, Any]) -> None:
    message["content"] = "\n"
    message["thinking"] += "\n\n"


@pytest.mark.parametrize(
    "change", slow_except([ollama_space], [keep, reorder_arguments, drop_ollama_thinking, ollama_space])
)
def test_ollama_messages_are_read_as_they_were_written(server: Running, change: Change) -> None:
    tool = ollama.Tool.model_validate(TOOL).model_dump(exclude_none=True)  # what the client sends of it
    more: Any = {"model": "model", "tools": [tool], "think": True}
    asks = [{"role": "user", "content": f"What is the weather in Oslo, {change.__name__}?"}]
    # The API has no way to require a call or to bound a thought, so another one gets the answer.
    body = {"model": "model", "messages": asks, "tools": [tool], "tool_choice": "required", "think": BUDGET}
    status, first = server.post(CHAT, {**body, "max_tokens": 120, "parallel_tool_calls": False})
    assert status == 200, first
    said = first["choices"][0]["message"]
    function = said["tool_calls"][0]["function"]
    call = {"function": {"name": NAME, "arguments": json.loads(function["arguments"])}}
    message: Any = {
        "role": "assistant",
        "content": said["content"] or "",
        "thinking": said["reasoning_content"],
        "tool_calls": [call],
    }
    change(message)
    told = [*asks, message, {"role": "tool", "tool_name": NAME, "content": "Snow"}]
    before = cached_so_far(server)
    with server.ollama() as client:
        client.chat(messages=told, options={"num_predict": 1}, **more)
    assert cached_so_far(server) - before >= first["usage"]["total_tokens"]


def test_ollama_texts_are_read_as_they_were_written(server: Running) -> None:
    more: Any = {"model": "model", "think": False, "options": {"num_predict": 12}}
    asks = [{"role": "user", "content": "Tell me about ships."}]
    with server.ollama() as client:
        first = client.chat(messages=asks, **more)
        message = {"role": "assistant", "content": f"{first.message.content} \n"}
        before = cached_so_far(server)
        client.chat(messages=[*asks, message, {"role": "user", "content": "Why?"}], **more)
    assert first.prompt_eval_count is not None
    assert first.eval_count is not None
    assert cached_so_far(server) - before >= first.prompt_eval_count + first.eval_count - 1


@pytest.mark.parametrize("think", [False, BUDGET])
def test_a_cut_answer_continues_as_if_it_had_not_been_cut(server: Running, think: bool | int) -> None:
    """The model reads its own tokens, its thought included, whatever the client sends back of them."""
    story = [{"role": "user", "content": f"Tell me a long story ({think})."}]

    def said(messages: Any, *, limit: int, **more: Any) -> Any:
        return asked(server, messages, max_tokens=limit, extra_body={"think": think, **more})

    text = said(story, limit=30).choices[0].message.content
    begun = said(story, limit=20)
    cut = begun.choices[0].message.content
    rest = said([*story, {"role": "assistant", "content": cut}], limit=10, continue_final_message=True)
    assert rest.usage.prompt_tokens == written(begun)
    assert cut + rest.choices[0].message.content == text
    following = said([*story, {"role": "assistant", "content": text}, *story], limit=1)
    if think is False:  # otherwise the template leaves the thought out
        assert cached(following) >= written(rest) - 1


def test_what_somebody_else_began_is_continued_too(server: Running) -> None:
    sky = [{"role": "user", "content": "Why is the sky blue?"}]
    begun = [*sky, {"role": "assistant", "content": "Because of the"}]
    settings: Any = {"max_tokens": 6, "extra_body": {"think": False, "continue_final_message": True}}
    answer = asked(server, begun, **settings)
    other = asked(server, begun, max_tokens=6, extra_body={"continue_final_message": False})
    assert answer.usage.prompt_tokens < other.usage.prompt_tokens, "no further answer is begun"
    assert answer.choices[0].message.content
    pieces = asked(server, begun, stream=True, **settings)
    assert (
        "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer.choices[0].message.content
    )


@pytest.mark.parametrize(
    ("messages", "more", "reason"),
    [
        (ASKED, {}, "There is no answer to continue."),
        ([*ASKED, {"role": "assistant", "content": ""}], {}, "There is no answer to continue."),
        ([{"role": "assistant", "content": "Hi"}], {}, "There is no answer to continue."),
    ],
)
def test_what_cannot_be_continued_is_refused(server: Running, messages: Any, more: Any, reason: str) -> None:
    status, answer = server.post(CHAT, {"messages": messages, "continue_final_message": True, **more})
    assert status == 400
    assert answer["error"]["message"].startswith(reason)


def test_the_next_turn_of_two_conversations_in_turn_is_all_that_is_read(
    smol_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written by the thread of the event loop, which has all streams to serve."""
    writers: set[str] = set()
    write = CheckedFiles.write

    def noted(files: CheckedFiles, name: str, content: bytes | memoryview) -> None:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            writers.add("event loop")
        writers.add(Path(name).suffix)
        write(files, name, content)

    monkeypatch.setattr(CheckedFiles, "write", noted)
    talks = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Tell me about {what}."}]
        for what in ("ships", "harbours")
    ]
    ends = [0, 0]
    with serving(lambda: load(smol_path, 1024, prompt_cache=True), parallel=2) as server:
        for turn in range(3):
            for which, talk in enumerate(talks):
                answer = asked(server, copy.deepcopy(talk), max_tokens=6)
                if turn:
                    assert cached(answer) >= ends[which] - 1
                elif which:
                    assert cached(answer) > 250, "the system prompt is shared"
                ends[which] = written(answer)
                said = answer.choices[0].message.content
                talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    assert writers == {".answer", ".kv"}


OPTIONS = ("--name", "model", "--draft", "none", "--context", "1024", "--threads", "1", "--exact")


def prompts() -> list[Path]:
    folder = cache_folder() / "prompts"
    return [path for path in folder.glob("*") if not path.name.startswith(".")]


@pytest.mark.slow
def test_a_server_that_was_killed_reads_the_next_turn_only(smol_path: Path) -> None:
    """States and answers are on disk as soon as the server is idle; nothing has to be closed for that."""
    talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Tell me about ships."}]
    options = (smol_path, *OPTIONS)
    with started(*options) as (server, program):
        first = asked(server, talk, max_tokens=6)
        # All whole blocks, and the rest behind them.
        count = written(first) // BLOCK + 1
        wait_until(lambda: len([path for path in prompts() if path.suffix == ".kv"]) >= count)
        assert [path.suffix for path in prompts()].count(".answer") == 1
        program.kill()
        program.wait()
    said = first.choices[0].message.content
    talk += [{"role": "assistant", "content": said + "\n"}, {"role": "user", "content": "And then?"}]
    with started(*options) as (server, _):
        second = asked(server, talk, max_tokens=6)
        assert cached(second) >= written(first) - 1
    with started(*options, "--no-prompt-cache") as (server, _):
        assert cached(asked(server, talk, max_tokens=6)) == 0


@pytest.mark.slow
def test_the_folder_stays_within_its_limit(smol_path: Path) -> None:
    limit = 8 << 20
    options = (smol_path, *OPTIONS)
    with started(*options, "--prompt-cache-size", "8MiB") as (server, program):
        for what in ("ships", "harbours", "storms"):
            asked(server, [{"role": "user", "content": f"{what} " * 300}], max_tokens=2)
        program.terminate()
        program.wait()
    sizes = [path.stat().st_size for path in prompts()]
    assert sizes
    assert sum(sizes) <= limit


def test_tokens_are_counted_while_no_place_is_free(smol_path: Path) -> None:
    with serving(lambda: load(smol_path, 1024), waiting=0, parallel=1) as server, server.connect() as busy:
        busy.send(CHAT, {"messages": ASKED, "stream": True})
        assert busy.socket.recv(1)  # the answer has begun
        with server.anthropic() as client:
            more: Any = {"model": "model", "messages": ASKED}
            assert client.messages.count_tokens(**more).input_tokens > 0
            with pytest.raises(anthropic.RateLimitError):
                client.messages.create(max_tokens=1, **more)
