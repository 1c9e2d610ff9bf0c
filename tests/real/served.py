"""Checks of the server: tools, and many clients at once."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.real.pair import Pair, require
from tests.serving import CHAT, Running, started

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_WEATHER = {"name": "get_weather", "description": "The current weather in a city", "parameters": _CITY}
_TIME = {"name": "get_time", "description": "The current local time in a city", "parameters": _CITY}
_TOOLS = [{"type": "function", "function": tool} for tool in (_WEATHER, _TIME)]
_CLIENTS = 8


def tools(pair: Pair) -> str:
    """Two tools: the model's own choice, a call that is required, two calls, and the whole loop."""
    with started(*pair.arguments) as (server, _):
        own = _call(server, "What is the weather in Oslo right now?", tool_choice="auto")
        _require_city(own, "get_weather", "Oslo")
        forced = _call(server, "Hello!", tool_choice="required")
        require(len(_calls(forced)) >= 1, f"no call: {forced}")
        both = _call(
            server, "What is the weather in Paris, and what time is it there?", tool_choice="required"
        )
        for call in _calls(both):
            require(set(json.loads(call["function"]["arguments"])) == {"city"}, call)
        streamed = _streamed(server, "What is the weather in Oslo right now?")
        require(
            streamed == own["choices"][0]["message"]["tool_calls"][0]["function"], f"streamed: {streamed}"
        )
        final = _loop(server, own)
    return f"calls: {_named(own)}; {_named(forced)}; {_named(both)}; then {final!r}"


def clients(pair: Pair) -> str:
    """Eight clients at once get what each gets alone."""
    prompts = [f"Count from {n} to {n + 5}, separated by commas." for n in range(_CLIENTS)]
    with started(*pair.arguments) as (server, _):

        def ask(prompt: str) -> str:
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 24}
            status, answer = server.post(CHAT, body)
            require(status == 200, f"{status}: {answer}")
            return str(answer["choices"][0]["message"]["content"])

        with ThreadPoolExecutor(_CLIENTS) as pool:
            together = list(pool.map(ask, prompts))
        alone = [ask(prompt) for prompt in prompts]
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    require(same == _CLIENTS, f"{same} of {_CLIENTS} answers are those that clients get alone")
    return f"{same} of {_CLIENTS} answers are those that clients get alone"


def _call(server: Running, prompt: str, **more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return _answer(server, {"messages": messages, "tools": _TOOLS, "max_tokens": 120, **more})


def _answer(server: Running, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = server.post(CHAT, body)
    require(status == 200, f"{status}: {answer}")
    assert isinstance(answer, dict)
    return answer


def _calls(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return answer["choices"][0]["message"].get("tool_calls") or []


def _named(answer: dict[str, Any]) -> str:
    return ", ".join(f"{call['function']['name']} {call['function']['arguments']}" for call in _calls(answer))


def _require_city(answer: dict[str, Any], name: str, city: str) -> None:
    calls = _calls(answer)
    require(bool(calls), f"no call was recognized in {answer['choices'][0]['message']}")
    function = calls[0]["function"]
    require(function["name"] == name and city in json.loads(function["arguments"])["city"], calls)
    require(answer["choices"][0]["finish_reason"] == "tool_calls", answer)


def _streamed(server: Running, prompt: str) -> dict[str, str]:
    """The first call of a streamed answer, put together from its pieces."""
    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "tools": _TOOLS, "max_tokens": 120, "stream": True}
    function = {"name": "", "arguments": ""}
    with server.connect() as client:
        client.send(CHAT, body)
        answer = http.client.HTTPResponse(client.socket)
        answer.begin()
        lines = answer.read().decode()
    for line in lines.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            for call in choice["delta"].get("tool_calls") or []:
                if call["index"] == 0:
                    for key in function:
                        function[key] += call["function"].get(key) or ""
    return function


def _loop(server: Running, first: dict[str, Any]) -> str:
    """The result of a tool goes back, and the model answers with it."""
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": _calls(first)[0]["id"], "content": "17 degrees and heavy rain"}
    question = {"role": "user", "content": "What is the weather in Oslo right now?"}
    body = {"messages": [question, message, result], "tools": _TOOLS, "max_tokens": 60, "tool_choice": "none"}
    text = str(_answer(server, body)["choices"][0]["message"]["content"])
    require("17" in text or "rain" in text.lower(), f"the tool's result is not in {text!r}")
    return text
