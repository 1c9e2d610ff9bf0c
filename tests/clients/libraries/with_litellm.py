"""litellm through all three APIs: python with_litellm.py URL QUESTION; prints what came, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm  # type: ignore[import-not-found]
from pydantic import BaseModel, Field

URL, QUESTION = sys.argv[1:]
HELLO = [{"role": "user", "content": "Hello"}]
READ = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}


class Score(BaseModel):
    """A form that a model of any size can fill in."""

    points: int = Field(ge=0, le=9)


def tried(provider: str, base: str) -> dict[str, Any]:
    """What each kind of call gives through one of the APIs."""
    settings = {"model": f"{provider}/scripted", "api_base": base, "api_key": "none", "max_retries": 0}
    said = litellm.completion(messages=HELLO, **settings).choices[0].message.content
    parts = litellm.completion(messages=HELLO, stream=True, **settings)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    message = litellm.completion(messages=asked, tools=[READ], **settings).choices[0].message
    (call,) = message.tool_calls
    with open(json.loads(call.function.arguments)["path"]) as file:  # noqa: PTH123
        result = {"role": "tool", "tool_call_id": call.id, "name": "read_file", "content": file.read()}
    told = litellm.completion(messages=[*asked, message, result], tools=[READ], **settings)
    form = litellm.completion(messages=HELLO, response_format=Score, **settings).choices[0].message.content
    return {
        "said": said,
        "streamed": streamed,
        "called": call.function.name,
        "told": told.choices[0].message.content,
        "points": Score.model_validate_json(form).points,
    }


print(
    json.dumps(
        {
            "openai": tried("openai", f"{URL}/v1"),
            "anthropic": tried("anthropic", URL),
            "ollama_chat": tried("ollama_chat", URL),
        }
    )
)
