"""Requests as people's programs send them, over HTTP: each is answered, and what has no effect is named."""

from __future__ import annotations

import http.client
import inspect
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.commands.serve import serve
from edgespec.serving.anthropic.client_tools import client_tool
from edgespec.serving.request_log import RequestLogEntry
from edgespec.serving.response_sender import WARNINGS
from tests.serving import CHAT, RESPONSE, TEXT, Running, load, serving
from tests.templated import now_speaking
from tests.unit import templates
from tests.waiting import PATIENCE_S, wait_until

MESSAGES, OLLAMA, GENERATE = "/v1/messages", "/api/chat", "/api/generate"
HI: Any = [{"role": "user", "content": "Hi"}]
LOG: list[RequestLogEntry] = []
# Answers that are short enough to be read whole.
SHORT: dict[str, Any] = {
    CHAT: {"messages": HI, "max_tokens": 2, "think": False},
    TEXT: {"prompt": "Hi", "max_tokens": 2},
    RESPONSE: {"input": "Hi", "max_output_tokens": 2, "think": False},
    MESSAGES: {"messages": HI, "max_tokens": 2, "think": False},
    OLLAMA: {"messages": HI, "stream": False, "options": {"num_predict": 2}, "think": False},
    GENERATE: {"prompt": "Hi", "stream": False, "options": {"num_predict": 2}, "think": False},
}


@pytest.fixture(scope="module")
def server(short_path: Path) -> Iterator[Running]:
    settings: dict[str, Any] = {"aliases": ("claude-*",), "on_request": LOG.append}
    with serving(lambda: now_speaking(load(short_path, 2048), templates.QWEN), **settings) as server:
        yield server


def asked(server: Running, path: str, **more: Any) -> Any:
    """The answer to a request that has to be answered."""
    status, answer = server.post(path, SHORT[path] | more)
    assert status == 200, answer
    return answer


def streamed(server: Running, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of an answer that is streamed."""
    with server.connect() as client:
        client.send(path, body | {"stream": True})
        stream = http.client.HTTPResponse(client.socket)
        stream.begin()
        lines = stream.read().decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def schema_of(argument: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": argument}, "required": ["a"], **more}


def tool(name: str = "f", parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def taking(argument: Any) -> dict[str, Any]:
    """A tool with an argument of this schema."""
    return tool(parameters=schema_of(argument))


def call(arguments: Any, identifier: str = "c1", name: str = "f") -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def called(arguments: Any) -> list[dict[str, Any]]:
    """A conversation with a call."""
    result = {"role": "tool", "tool_call_id": "c1", "content": None}
    return [*HI, {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}, result, *HI]


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}


def returned(*content: Any) -> list[dict[str, Any]]:
    result = {"type": "tool_result", "tool_use_id": "t", "content": list(content)}
    return [*HI, USED, {"role": "user", "content": [result]}]


SYSTEMS = [{"role": "system", "content": "A"}, *HI, {"role": "system", "content": "B"}, *HI]
NO = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"messages": [*HI, {"role": "assistant", "content": None}, *HI]}),
        (CHAT, {"messages": called("null")}),
        (CHAT, {"messages": called("")}),
        (CHAT, {"messages": SYSTEMS}),
        (CHAT, {"messages": [*HI, *HI]}),
        (CHAT, {"messages": [{"role": "user", "content": []}]}),
        (CHAT, {"messages": [*HI, NO, *HI]}),
        (CHAT, {"max_tokens": -1, "stop": ["\n", " "], "temperature": 0}),
        (CHAT, {"max_tokens": 2.0, "top_k": -1, "n": 1.0}),
        (CHAT, {"logit_bias": {"5": -100}, "top_logprobs": 2}),
        (CHAT, {"tools": [tool("f" * 200)]}),
        (CHAT, {"response_format": {"type": "json_object"}, "tools": [tool()]}),
        (CHAT, {"model": "model:latest"}),
        (TEXT, {"prompt": ["Tea", "Coffee"], "logprobs": 0}),
        (MESSAGES, {"messages": SYSTEMS[1:]}),
        (MESSAGES, {"messages": returned({"type": "tool_reference", "tool_name": "g"})}),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}),
        (RESPONSE, {"input": [*HI, {"type": "custom_tool_call", "call_id": "a", "name": "p", "input": "x"},
                              {"type": "custom_tool_call_output", "call_id": "a", "output": "ok"}, *HI]}),
    ],
)  # fmt: skip
def test_what_clients_send_is_answered_without_a_warning(server: Running, path: str, more: Any) -> None:
    assert "warnings" not in asked(server, path, **more)


ENDLESS = {"type": "object", "anyOf": [{"$ref": "#"}] * 12, "not": {"required": ["zz"]}}


@pytest.mark.parametrize("more", [{"json_schema": ENDLESS}, {"tools": [tool(parameters=ENDLESS)]}])
def test_a_reference_that_never_ends_is_refused_by_name(server: Running, more: Any) -> None:
    status, answer = posted(server, CHAT, json.dumps(SHORT[CHAT] | more).encode(), {})
    assert status == 400
    assert "The reference '#' leads back to itself" in answer.decode()


@pytest.mark.parametrize(
    ("path", "more", "warning"),
    [
        (CHAT, {"model": "gpt-9"}, "The model 'gpt-9' is not served here; 'model' answers."),
        (CHAT, {"temprature": 1}, "Ignored unknown field 'temprature'. Did you mean 'temperature'?"),
        (CHAT, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a"),
        (CHAT, {"messages": called('{"a": "one, tw')}, "Completed the JSON of a call of 'f'"),
        (CHAT, {"messages": called("[1]")}, "are not a JSON object"),
        (CHAT, {"messages": [IMAGE]}, "An image"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "type 'hologram'"),
        (CHAT, {"tools": [tool(), tool(parameters=schema_of({}))]}, "second tool that is named 'f'"),
        (CHAT, {"tools": [taking({"oneOf": [{}, {}]})]}, "Parts of the schema of the tool f are not"),
        (CHAT, {"tools": [taking({"pattern": r"\ba"})]}, "Parts of the schema of the tool f are not"),
        (CHAT, {"tools": [taking({"type": "odd"})]}, "The schema of the tool f is not enforced"),
        (CHAT, {"tools": [tool(parameters={"type": "array"})]}, "the parameters of the tool f"),
        (CHAT, {"tools": [{"type": "web_search"}, tool()]}, "type 'web_search'"),
        (CHAT, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"json_schema": schema_of({"not": {}})}, "Parts of the schema of the answer are not"),
        (CHAT, {"audio": {"voice": "x", "format": "wav"}}, "'audio'"),
        (CHAT, {"logit_bias": {"99999999": 1}}, "logit_bias"),
        (TEXT, {"best_of": 3}, "'best_of'"),
        (TEXT, {"tools": [tool()]}, "'tools'"),
        (MESSAGES, {"messages": returned(PDF)}, "A document"),
        (MESSAGES, {"messages": [{"role": "user", "content": [PICTURE]}]}, "An image"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        (MESSAGES, {"mcp_servers": [{"url": "x"}]}, "'mcp_servers'"),
        (MESSAGES, {"metadata": {}, "odd": 1}, "'odd'"),
        (RESPONSE, {"input": [*HI, {"type": "web_search_call", "id": "w"}, *HI]}, "web_search_call"),
        (RESPONSE, {"n": 2}, "'n'"),
        (RESPONSE, {"include": ["file_search_call.results"]}, "include"),
        (RESPONSE, {"background": True}, "'background'"),
        (OLLAMA, {"messages": [{"role": "user", "content": "x", "images": ["AA"]}]}, "An image"),
        (OLLAMA, {"options": {"num_predict": 2, "mirostat": 1}}, "options.mirostat"),
        (OLLAMA, {"logprobs": True}, "'logprobs'"),
        (GENERATE, {"template": "x"}, "'template'"),
        (GENERATE, {"odd": 1}, "'odd'"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_named_in_the_answer_and_the_log(
    server: Running, path: str, more: Any, warning: str
) -> None:
    answer = asked(server, path, **more)
    assert any(warning in told for told in answer["warnings"]), answer["warnings"]
    wait_until(lambda: LOG[-1].warnings == tuple(answer["warnings"]))
    assert warning in str(LOG[-1])


def test_half_a_character_does_no_harm(server: Running) -> None:
    body = json.dumps(SHORT[CHAT])[:-1] + r', "model": "claude-\ud83d", "\ud83d": 1}'
    status, answer = server.post(CHAT, body.encode())
    assert (status, answer["model"]) == (200, "claude-\ufffd")


def test_many_users_at_once_are_all_answered(short_path: Path) -> None:
    waiting = inspect.signature(serve).parameters["queue"].default
    with serving(lambda: load(short_path), waiting=waiting, parallel=4) as server:
        with ThreadPoolExecutor(30) as users:
            texts = list(users.map(lambda _: server.text(), range(30)))
        assert len(set(texts)) == 1
        assert server.figures()["turned_away"] == 0


def test_warnings_are_a_header_too(server: Running) -> None:
    for stream in (False, True):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        body = json.dumps(SHORT[CHAT] | {"möglich": 1, "stream": stream})
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert json.loads(response.headers[WARNINGS]) == ["Ignored unknown field 'möglich'."]
        response.read()
        connection.close()


def posted(server: Running, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    status, answer = response.status, response.read()
    connection.close()
    return status, answer


@pytest.mark.parametrize("path", list(SHORT))
@pytest.mark.parametrize("kind", ["", "application/x-www-form-urlencoded", "text/plain"])
def test_a_body_may_be_of_any_type(server: Running, path: str, kind: str) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(SHORT[path]).encode()
    assert posted(server, path, body, {"Content-Type": kind} if kind else {})[0] == 200


SEPARATORS = "a\u2028b\u2029c\x85d"


@pytest.mark.parametrize("path", [CHAT, RESPONSE, MESSAGES, OLLAMA])
def test_no_line_of_a_stream_holds_what_ends_a_line(server: Running, path: str) -> None:
    """Python's splitlines ends lines at characters that JSON permits in strings."""
    form: dict[str, Any] = {"grammar": f'root ::= "{SEPARATORS}"', "stream": True}
    if path == OLLAMA:
        form = {"format": {"const": SEPARATORS}, "stream": True, "options": {"num_predict": 40}}
    if path == MESSAGES:
        form = {"output_format": {"type": "json_schema", "schema": {"const": SEPARATORS}}, "stream": True}
    longer = {"max_output_tokens" if path == RESPONSE else "max_tokens": 40} if path != OLLAMA else {}
    body = json.dumps(SHORT[path] | form | longer).encode()
    status, answer = posted(server, path, body, {"Content-Type": "application/json"})
    assert status == 200
    lines = [line for line in answer.decode().splitlines() if line.startswith(("data: {", "{"))]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert not {"\u2028", "\u2029", "\x85"} & set(answer.decode())
    said = "".join(_said(event) for event in events)
    assert said == (
        SEPARATORS if path in (CHAT, RESPONSE) else json.dumps(SEPARATORS, ensure_ascii=False)
    ) or (path not in (CHAT, RESPONSE) and json.loads(said) == SEPARATORS)


def _said(event: Any) -> str:
    if "choices" in event:
        return event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
    if "message" in event and isinstance(event["message"], dict) and "done" in event:
        return str(event["message"]["content"])
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    return str(event.get("delta", {}).get("text", "")) if event.get("type") == "content_block_delta" else ""


def test_a_line_that_changes_with_every_session_is_left_out(server: Running) -> None:
    rules = {"type": "text", "text": "Answer in one word. " * 20}
    read = []
    for session in ("first", "second"):
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; session={session};"}
        usage = asked(server, MESSAGES, system=[line, rules])["usage"]
        read.append(usage["input_tokens"])
    assert read[1] <= 4 < read[0]


def test_the_schema_of_a_json_object_holds(server: Running) -> None:
    schema = {"type": "object", "properties": {"team": {"enum": ["red"]}}, "required": ["team"]}
    form = {"type": "json_object", "schema": schema}
    answer = asked(server, CHAT, response_format=form, max_tokens=60)
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"team": "red"}


def test_an_answer_is_a_call_or_has_the_form(server: Running) -> None:
    schema = {"type": "object", "properties": {"team": {"enum": ["red"]}}, "required": ["team"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    settings: dict[str, Any] = {"response_format": form, "tools": [tool(parameters=schema)], "max_tokens": 80}
    message = asked(server, CHAT, **settings)["choices"][0]["message"]
    said = message.get("tool_calls", [{}])[0].get("function", {}).get("arguments") or message["content"]
    assert json.loads(said) == {"team": "red"}
    named = asked(server, CHAT, tool_choice={"type": "function", "function": {"name": "f"}}, **settings)
    assert named["choices"][0]["finish_reason"] == "tool_calls"
    assert "the format of the answer" in named["warnings"][0]
    listed = {"mode": "required", "tools": [{"type": "function", "name": "f"}]}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    tools = [{"type": "function", "name": name, "parameters": schema} for name in ("f", "g")]
    allowed = asked(
        server,
        RESPONSE,
        tool_choice={"type": "allowed_tools", **listed},
        tools=tools,
        text=text,
        max_output_tokens=80,
        parallel_tool_calls=False,
    )
    assert [item.get("name") for item in allowed["output"]] == ["f"]


def test_no_text_follows_a_call_that_is_required(server: Running) -> None:
    tools = [taking({"enum": ["red"]})]
    for seed in range(3):
        sampled = {"temperature": 1.0, "seed": seed, "max_tokens": 60}
        answer = asked(server, CHAT, tools=tools, tool_choice="required", **sampled)["choices"][0]
        assert not answer["message"].get("content")
        assert answer["message"]["tool_calls"]


def test_a_tool_that_takes_a_text_gets_a_text(server: Running) -> None:
    settings = {"tool_choice": "required", "parallel_tool_calls": False, "logit_bias": {}}
    about = {"name": "p", "description": "Patches.", "format": {"type": "text"}}
    tools = [{"type": "custom", "custom": about}]
    message = asked(server, CHAT, tools=tools, max_tokens=200, **settings)["choices"][0]["message"]
    (made,) = message["tool_calls"]
    assert (made["type"], made["custom"]["name"], type(made["custom"]["input"])) == ("custom", "p", str)
    told = [*HI, message, {"role": "tool", "tool_call_id": made["id"], "content": "ok"}]
    assert "warnings" not in asked(server, CHAT, tools=tools, messages=told)
    tools = [{"type": "custom", **about}]
    answer = asked(server, RESPONSE, tools=tools, max_output_tokens=200, **settings)
    assert [item["type"] for item in answer["output"]] == ["custom_tool_call"]
    assert answer["output"][0]["input"] == made["custom"]["input"]


def test_a_response_continues_an_earlier_one(server: Running) -> None:
    first = asked(server, RESPONSE, input="One", instructions="Be brief.")
    second = asked(server, RESPONSE, input="Two", previous_response_id=first["id"])
    said = first["output"][0]["content"][0]["text"]
    whole = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "Two"},
    ]
    assert second["usage"]["input_tokens"] == asked(server, RESPONSE, input=whole)["usage"]["input_tokens"]
    unkept = asked(server, RESPONSE, input="One", store=False)
    for missing in ("resp_0", unkept["id"]):
        status, answer = server.post(RESPONSE, SHORT[RESPONSE] | {"previous_response_id": missing})
        assert (status, answer["error"]["code"]) == (404, "previous_response_not_found")


def test_there_is_a_choice_for_each_prompt(server: Running) -> None:
    answer = asked(server, TEXT, prompt=["Tea is", "Coffee is"], n=2, logprobs=0, max_tokens=3)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    alone = [asked(server, TEXT, prompt=prompt, max_tokens=3) for prompt in ("Tea is", "Coffee is")]
    assert [choices[n]["text"] for n in (0, 2)] == [one["choices"][0]["text"] for one in alone]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    for choice in choices:
        assert len(choice["logprobs"]["token_logprobs"]) == 3
        assert all(logprob <= 0 for logprob in choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, OLLAMA])
def test_an_answer_continues_the_assistants_last_message(server: Running, path: str) -> None:
    longer = {"options": {"num_predict": 4}} if path == OLLAMA else {"max_tokens": 4}
    plain, whole = asked(server, path), asked(server, path, **longer)
    begun = [*HI, {"role": "assistant", "content": _text(plain)}]
    assert "warnings" not in (more := asked(server, path, messages=begun))
    assert _text(plain) + _text(more) == _text(whole)
    assert _read(more) == _read(plain) + 2


def _text(answer: Any) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    if "message" in answer:
        return str(answer["message"]["content"])
    return str(answer["content"][0]["text"])


def _read(answer: Any) -> int:
    usage = answer.get("usage", {})
    if "cache_read_input_tokens" in usage:
        return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
    return int(usage.get("prompt_tokens") or answer["prompt_eval_count"])


def test_a_token_that_is_biased_away_does_not_come(server: Running) -> None:
    plain = asked(server, TEXT, logprobs=1, max_tokens=6)["choices"][0]["logprobs"]
    likeliest = plain["tokens"][0]
    status, answer = server.post("/v1/completions", {"prompt": [1], "max_tokens": 1})
    assert status == 200, answer
    bias = {str(token): -100 for token in range(3, 8000)}
    biased = asked(server, TEXT, logit_bias=bias, logprobs=1, max_tokens=6)["choices"][0]["logprobs"]
    assert likeliest not in biased["tokens"]


@pytest.mark.parametrize(
    "form",
    [
        {"guided_choice": ["tea (hot)", "coffee"]},
        {"structured_outputs": {"choice": ["tea (hot)", "coffee"]}},
        {"guided_regex": r"tea \(hot\)|coffee"},
        {"regex": r"tea \(hot\)|coffee"},
        {"ebnf": 'root ::= "tea (hot)" | "coffee"'},
        {"guided_grammar": 'root ::= "tea (hot)" | "coffee"'},
        {"guided_json": {"enum": ["tea (hot)", "coffee"]}},
        {"json_schema": '{"enum": ["tea (hot)", "coffee"]}'},
    ],
    ids=lambda form: next(iter(form)),
)
def test_forms_have_the_names_of_other_servers(server: Running, form: dict[str, Any]) -> None:
    answer = asked(server, CHAT, **form, n_predict=20, max_tokens=None)
    assert _text(answer).strip('"') in ("tea (hot)", "coffee")
    assert "warnings" not in answer


def test_an_answer_ends_when_it_may(server: Running) -> None:
    def ended(**more: Any) -> tuple[int, str]:
        answer = asked(server, CHAT, **{"max_tokens": 12, "logprobs": True, "top_logprobs": 0} | more)
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    one, two = (_text(asked(server, CHAT, max_tokens=n)) for n in (1, 2))
    stop = server.post("/tokenize", {"content": two.removeprefix(one)})[1]["tokens"][0]
    assert ended(stop_token_ids=[stop]) == (1, "stop")
    assert ended(stop_token_ids=[stop], min_tokens=5)[0] >= 5
    assert ended(ignore_eos=True, temperature=2, seed=3) == (12, "length")


def removed(server: Running, path: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("DELETE", path)
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def test_kept_responses_are_read_referred_to_and_removed(server: Running) -> None:
    first = asked(server, RESPONSE, input="One")
    path = f"{RESPONSE}/{first['id']}"
    assert server.get(path) == (200, first)
    assert server.get(f"{path}/input_items?order=up")[0] == 400
    status, page = server.get(f"{path}/input_items?limit=5&order=asc")
    assert status == 200
    assert [item["content"][0]["text"] for item in page["data"]] == ["One"]
    message = first["output"][-1]
    written = [page["data"][0], message, {"role": "user", "content": "Two"}]
    referred = [*({"type": "item_reference", "id": item["id"]} for item in written[:2]), written[2]]
    tokens = [asked(server, RESPONSE, input=items)["usage"]["input_tokens"] for items in (written, referred)]
    assert tokens[0] == tokens[1]
    twice = [{"id": message["id"]}, {"id": message["id"]}, *HI]
    assert server.post(RESPONSE, SHORT[RESPONSE] | {"input": twice})[0] == 400
    assert removed(server, path)["deleted"] is True
    assert server.get(path)[0] == server.get(f"{path}/input_items")[0] == 404
    assert server.post(RESPONSE, SHORT[RESPONSE] | {"input": [{"id": "msg_0"}, *HI]})[0] == 404


def test_a_conversation_is_kept_continued_and_removed(server: Running) -> None:
    begun = {"items": [{"role": "user", "content": "My name is Ada."}], "metadata": {"a": "b"}}
    status, conversation = server.post("/v1/conversations", begun)
    assert status == 200
    path = f"/v1/conversations/{conversation['id']}"
    assert server.get(path) == (200, conversation)
    answer = asked(server, RESPONSE, input="One", conversation=conversation["id"], store=False)
    assert answer["conversation"] == {"id": conversation["id"]}
    sent = [*begun["items"], {"role": "user", "content": "One"}]
    alone = asked(server, RESPONSE, input=sent)
    assert answer["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
    items = server.get(f"{path}/items?order=asc")[1]["data"]
    assert [item["role"] for item in items if item["type"] == "message"] == ["user", "user", "assistant"]
    assert items[-1] == answer["output"][-1]
    status, added = server.post(f"{path}/items", {"items": [{"role": "user", "content": "Two"}]})
    assert status == 200
    (two,) = added["data"]
    assert server.get(f"{path}/items/{two['id']}") == (200, two)
    assert removed(server, f"{path}/items/{two['id']}")["id"] == conversation["id"]
    assert server.get(f"{path}/items/{two['id']}")[0] == 404
    assert server.post(path, {"metadata": {"c": "d"}})[1]["metadata"] == {"c": "d"}
    both = {"conversation": {"id": conversation["id"]}, "previous_response_id": alone["id"]}
    for wrong in (both, {"conversation": 7}, {"conversation": ""}):
        assert server.post(RESPONSE, SHORT[RESPONSE] | wrong)[0] == 400
    lists: list[Any] = [[{"role": "nobody"}], "text", [{}] * 101, [[]]]
    for wrong in ({"metadata": {"a": 1}}, *({"items": items} for items in lists)):
        assert server.post("/v1/conversations", wrong)[0] == 400, wrong
    thought = {"type": "reasoning", "summary": []}
    assert server.post("/v1/conversations", {"items": [thought]})[0] == 200
    assert server.post(f"{path}/items", {"items": [{"type": "item_reference", "id": "none"}]})[0] == 404
    assert removed(server, path)["deleted"] is True
    assert server.get(path)[0] == server.get(f"{path}/items")[0] == 404
    assert server.post(RESPONSE, SHORT[RESPONSE] | {"conversation": conversation["id"]})[0] == 404


def test_functions_are_called_as_before_there_were_tools(server: Running) -> None:
    function = {"name": "f", "parameters": schema_of({"enum": ["yes"]})}
    settings: dict[str, Any] = {
        "functions": [function],
        "function_call": {"name": "f"},
        "max_tokens": 80,
        "top_p": 0,
    }
    (choice,) = asked(server, CHAT, **settings)["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "f"
    assert json.loads(choice["message"]["function_call"]["arguments"]) == {"a": "yes"}
    events = streamed(server, CHAT, SHORT[CHAT] | settings)
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert json.loads("".join(call["arguments"] for call in calls)) == {"a": "yes"}
    result = {"role": "function", "name": "f", "content": "1"}
    asked(server, CHAT, functions=[function], messages=[*HI, choice["message"], result])


@pytest.mark.parametrize(
    ("kind", "name", "argument"),
    [
        ("bash_20250124", "bash", "command"),
        ("text_editor_20250124", "str_replace_editor", "undo_edit"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "insert_text"),
        ("memory_20250818", "memory", "rename"),
    ],
)
def test_tools_that_anthropics_clients_run_are_offered(
    server: Running, kind: str, name: str, argument: str
) -> None:
    definition = client_tool(kind, None)
    assert definition is not None
    assert argument in json.dumps(definition.parameters)
    choice = {"type": "tool", "name": name}
    answer = asked(server, MESSAGES, tools=[{"type": kind, "name": name}], tool_choice=choice, max_tokens=200)
    assert "warnings" not in answer
    assert answer["content"][-1]["name"] == name


def test_paths_of_llama_cpps_server(server: Running) -> None:
    path = "/completion"
    status, answer = server.post(path, {"prompt": "Tea is", "n_predict": 3})
    assert (status, answer["stop_type"], answer["tokens_predicted"]) == (200, "limit", 3)
    assert answer["content"] == asked(server, TEXT, prompt="Tea is", max_tokens=3)["choices"][0]["text"]
    assert answer["tokens_evaluated"] == answer["timings"]["prompt_n"] + answer["timings"]["cache_n"]
    events = streamed(server, path, {"prompt": "Tea is", "n_predict": 3})
    assert "".join(event["content"] for event in events) == answer["content"]
    assert [event["stop"] for event in events][-2:] == [False, True]
    assert server.post(path, {"prompt": ["a", "b"]})[0] == 400
    status, answer = server.post("/infill", {"input_prefix": "def f(", "input_suffix": ")", "n_predict": 3})
    assert (status, "fill in" in answer["error"]["message"]) == (400, True)
    assert HI[0]["content"] in server.post("/apply-template", {"messages": HI})[1]["prompt"]
    context = server.get("/props")[1]["default_generation_settings"]["n_ctx"]
    assert [slot["n_ctx"] for slot in server.get("/slots")[1]] == [context]
    assert server.get("/v1/models")[1]["data"][0]["context_length"] == context
    assert server.get("/v1/health")[0] == server.get("/version")[0] == 200
