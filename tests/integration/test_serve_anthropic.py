"""The Messages API over HTTP, with the real Anthropic client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.integration.test_serve_api import thinking
from tests.serving import Running, serving

MESSAGES = "/v1/messages"
SKY: Any = [{"role": "user", "content": "Why is the sky blue?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
OFF: Any = {"type": "disabled"}


@pytest.fixture(scope="module")
def server(smol_path: Path) -> Iterator[Running]:
    with serving(lambda: thinking(smol_path), aliases=("claude-*",), parallel=4) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with server.anthropic() as client:
        yield client


def ask(client: anthropic.Anthropic, messages: Any = SKY, **more: Any) -> Any:
    create: Any = client.messages.create
    return create(**{"model": "model", "messages": messages, "max_tokens": 12, "thinking": OFF} | more)


def read(answer: Any) -> int:
    """All tokens of the prompt, cached or not."""
    return int(answer.usage.input_tokens + answer.usage.cache_read_input_tokens)


def test_an_answer_is_the_same_whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "model")
    assert whole.stop_reason == "max_tokens"
    (block,) = whole.content
    assert block.text
    assert whole.usage.output_tokens == 12
    with client.messages.stream(model="model", messages=SKY, max_tokens=12, thinking=OFF) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert final.content[0].text == text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    assert read(final) == read(whole)


def test_events_come_in_the_order_of_the_api(client: anthropic.Anthropic) -> None:
    kinds = [event.type for event in ask(client, stream=True)]
    assert [kind for kind in kinds if kind != "ping"][:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


def prompt_tokens(message: anthropic.types.Message) -> int:
    """All tokens of the prompt, those that were known already included."""
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_system_prompt_may_be_text_or_blocks(client: anthropic.Anthropic) -> None:
    text = "You are a sailor.\n\nYou are brief."
    blocks = [
        {"type": "text", "text": "You are a sailor.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "You are brief."},
    ]
    plain, by_text, by_blocks = (ask(client, **more) for more in ({}, {"system": text}, {"system": blocks}))
    assert by_text.content == by_blocks.content
    assert prompt_tokens(plain) < prompt_tokens(by_text) == prompt_tokens(by_blocks)


def test_tokens_are_counted_as_they_are_read(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "model", "messages": SKY, "system": "Be brief.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(**asked, thinking=OFF)
    answer = ask(client, system="Be brief.", tools=[WEATHER], max_tokens=1)
    assert counted.input_tokens == prompt_tokens(answer)


def test_thoughts_are_blocks_that_may_come_back(client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    more: Any = {"max_tokens": 30, "extra_body": {"think": 10}}
    thought, said = ask(client, thinking=thinking, **more).content
    assert (thought.type, said.type) == ("thinking", "text")
    assert thought.thinking
    assert thought.signature
    with client.messages.stream(model="model", messages=SKY, thinking=thinking, **more) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert "signature_delta" not in kinds  # the client turns it into an event of its own
    assert [block.to_dict() for block in final.content] == [thought.to_dict(), said.to_dict()]
    told = [*SKY, {"role": "assistant", "content": [thought, said]}, {"role": "user", "content": "Why?"}]
    assert ask(client, told, max_tokens=2).usage.output_tokens


def test_a_tool_loop_ends_with_an_answer(client: anthropic.Anthropic) -> None:
    settings: dict[str, Any] = {
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "max_tokens": 60,
    }
    answer = ask(client, **settings)
    assert answer.stop_reason == "tool_use"
    (call,) = answer.content
    assert call.type == "tool_use"
    assert set(call.input) == {"city"}
    with client.messages.stream(model="model", messages=SKY, thinking=OFF, **settings) as stream:
        deltas = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(deltas) > 2
    assert json.loads("".join(deltas)) == call.input
    assert final.content[0].input == call.input  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Snow"}]}
    told = [
        *SKY,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    after = ask(client, told, tools=[WEATHER])
    assert read(after) > read(answer)
    told[-1] = {
        "role": "user",
        "content": [{**result, "is_error": True}, {"type": "text", "text": "And now?"}],
    }
    failed = ask(client, told, tools=[WEATHER])
    assert read(failed) > read(after)  # it says that this is an error


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named(client: anthropic.Anthropic, stream: bool) -> None:
    said = ask(client).content[0].text
    stop = said.split()[2]
    answer = ask(client, stop_sequences=["never said", stop], stream=stream)
    if stream:
        (last,) = [event for event in answer if event.type == "message_delta"]
        assert (last.delta.stop_reason, last.delta.stop_sequence) == ("stop_sequence", stop)
    else:
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
        assert stop not in answer.content[0].text


def test_a_schema_is_followed(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["blue", "red"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask(client, output_config=form, max_tokens=40)
    assert json.loads(answer.content[0].text)["colour"] in ("blue", "red")


def test_the_model_answers_to_patterns(client: anthropic.Anthropic) -> None:
    assert ask(client, model="claude-sonnet-9").model == "claude-sonnet-9"
    assert ask(client, model="gpt-9").warnings == ["The model 'gpt-9' is not served here; 'model' answers."]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "robot"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "budget_tokens"),
        ({"thinking": {"type": "adaptive"}, "output_config": [7]}, "output_config"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": 7}, "stop"),
        ({"system": 7}, "system"),
    ],
)
def test_a_wrong_request_is_refused_in_the_form_of_the_api(
    client: anthropic.Anthropic, server: Running, changes: dict[str, Any], told: str
) -> None:
    asked = {"model": "model", "messages": SKY, "max_tokens": 4} | changes
    status, body = server.post(MESSAGES, asked)
    assert status == 400
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert told in body["error"]["message"]


def test_a_prompt_that_is_too_long_is_refused_with_numbers(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long.*1024") as refused:
        ask(client, [{"role": "user", "content": "word " * 2000}])
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index, call-overload]


def test_an_answer_that_fills_the_context_says_so(client: anthropic.Anthropic) -> None:
    answer = ask(client, [{"role": "user", "content": "word " * 985}], max_tokens=4096)
    assert answer.stop_reason in ("model_context_window_exceeded", "end_turn")


def test_images_in_results_do_not_end_a_conversation(client: anthropic.Anthropic) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [picture]}
    told = [*SKY, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert ask(client, told, tools=[WEATHER], max_tokens=2).content is not None


def test_the_key_may_come_in_either_header(smol_path: Path) -> None:
    with serving(lambda: thinking(smol_path), api_key="secret") as server:
        url = f"http://127.0.0.1:{server.port}"
        for auth in ({"api_key": "secret"}, {"auth_token": "secret"}):
            with anthropic.Anthropic(base_url=url, max_retries=0, **auth) as client:  # type: ignore[arg-type]
                assert ask(client, max_tokens=1).usage.output_tokens == 1
        with (
            anthropic.Anthropic(base_url=url, max_retries=0, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            ask(client)
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index, call-overload]
