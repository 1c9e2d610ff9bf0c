"""Requests of the Ollama API, translated to requests for a chat or a completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.api.contents import Content, content_of, data_address, image_part, text_part
from edgespec.api.values import boolean, shown, wrong
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError

# Options and their names in a request for a chat; other options tune Ollama's own engine.
_OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
    "repeat_penalty": "repeat_penalty",
    "repeat_last_n": "penalty_window",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")
_PICTURES = ("width", "height", "steps")
# Fields that mean something here, and those that tune Ollama's own engine.
_FIELDS = (
    *("model", "messages", "prompt", "system", "suffix", "template", "context", "raw", "images", "tools"),
    *("options", "stream", "think", "format", "logprobs", "top_logprobs", "keep_alive"),
    *_PICTURES,
)
_ENGINE_OPTIONS = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap", "use_mlock"),
    *("low_vram", "f16_kv", "vocab_only", "num_keep", "logits_all", "embedding_only"),
)


def chat_as_chat(body: object, warnings: Warnings) -> dict[str, Any]:
    """The request for a chat that a request to `/api/chat` stands for.

    Raises:
        UsageError: a field has another form, or is not supported here.
    """
    fields = _checked(body)
    chat = _settings(fields, warnings)
    chat["messages"] = _messages(fields.get("messages"), warnings)
    tools = fields.get("tools")
    if tools is not None:
        chat["tools"] = tools
    return chat


def generate_as_chat(body: object, warnings: Warnings) -> tuple[dict[str, Any], bool]:
    """The request for a chat that a request to `/api/generate` stands for.

    Returns:
        The request, and whether it is raw: then it is one for a completion.

    Raises:
        UsageError: a field has another form, or is not supported here.
    """
    fields = _checked(body)
    for name in ("template", "context"):
        if fields.get(name) not in (None, "", []):
            warnings.ignored(
                name, "The model's own chat template is used, and nothing is kept between prompts."
            )
    prompt, system = fields.get("prompt"), fields.get("system")
    if not isinstance(prompt, str):
        raise wrong("prompt", prompt, "a string")
    settings = _settings(fields, warnings)
    suffix = fields.get("suffix")
    if boolean(fields, "raw") or suffix not in (None, ""):
        if _images(fields):
            raise UsageError(
                "Images are shown in conversations only, not in raw prompts or before a suffix.",
                'Leave out "raw" and "suffix", or the images.',
            )
        return settings | {"prompt": prompt, "suffix": suffix}, True
    if not isinstance(system, str | None):
        raise wrong("system", system, "a string")
    messages = [{"role": "system", "content": system}] if system else []
    asked = {"role": "user", "content": _content(fields, prompt, warnings)}
    return settings | {"messages": [*messages, asked]}, False


def only_loads(body: object, name: str) -> bool:
    """Tell whether a request only wants the model to be loaded, which it is: it has no prompt.

    Args:
        name: the field of the prompt.
    """
    return isinstance(body, dict) and body.get(name) in (None, "", [])


def _checked(body: object) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise UsageError("The body is not a JSON object.")
    return body


def _images(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The images of a message or request, which are in Base64."""
    images = about.get("images")
    if not isinstance(images, list | None):
        raise wrong("images", images, "a list")
    return [image_part(data_address(image)) for image in images or []]


def _content(about: Mapping[str, Any], said: object, warnings: Warnings) -> Content:
    """The content of a message or request: its images, and what is said of them."""
    images, text = _images(about), content_of(said, warnings)
    if not images:
        return text
    return [*images, *([text_part(text)] if isinstance(text, str) else text)]


def _settings(body: Mapping[str, Any], warnings: Warnings) -> dict[str, Any]:
    options = body.get("options") or {}
    if not isinstance(options, dict):
        raise wrong("options", options, "an object")
    chat: dict[str, Any] = {
        ours: options[name] for name, ours in _OPTIONS.items() if options.get(name) is not None
    }
    for name in options:
        if name not in _OPTIONS and name not in _ENGINE_OPTIONS:
            warnings.ignored(f"options.{name}")
    if chat.get("penalty_window") == 0:  # which turns penalties off, where it is all tokens elsewhere
        chat = {name: value for name, value in chat.items() if name not in (*_PENALTIES, "penalty_window")}
    if chat.get("max_tokens") == 0:
        del chat["max_tokens"]
    chat["model"] = body.get("model")
    chat["stream"] = boolean(body, "stream", default=True)
    if body.get("think") is not None:
        chat["think"] = body["think"]
    form = body.get("format")
    if form == "json":
        chat["response_format"] = {"type": "json_object"}
    elif form not in (None, ""):
        if not isinstance(form, dict):
            raise wrong("format", form, '"json" or a JSON schema')
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form}}
    for name in ("logprobs", "top_logprobs"):
        if body.get(name):
            warnings.ignored(name, "Use /v1/chat/completions for log-probabilities.")
    for name in _PICTURES:
        if body.get(name):
            warnings.ignored(name, "Answers are text.")
    return chat | {name: value for name, value in body.items() if name not in _FIELDS}


def _messages(value: object, warnings: Warnings) -> list[dict[str, Any]]:
    """The messages, with ids for calls and results: this API has none, but keeps them in order."""
    if not isinstance(value, list):
        raise wrong("messages", value, "a list")
    messages: list[dict[str, Any]] = []
    waiting: list[str] = []  # ids of calls whose results have not come yet
    for message in value:
        if not isinstance(message, dict):
            raise UsageError(f"A message must be an object, not {shown(message)}.")
        content = _content(message, message.get("content"), warnings)
        told: dict[str, Any] = {"role": message.get("role"), "content": content}
        if message.get("thinking"):
            told["reasoning_content"] = message["thinking"]
        calls = message.get("tool_calls")
        if calls:
            told["tool_calls"] = _calls(calls, len(messages))
            waiting = [call["id"] for call in told["tool_calls"]]
        if told["role"] == "tool":
            name = message.get("tool_name") or message.get("name")
            told |= {"name": name} if name else {}
            if waiting:
                told["tool_call_id"] = waiting.pop(0)
        messages.append(told)
    return messages


def _calls(value: object, place: int) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise wrong("tool_calls", value, "a list")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        calls.append({"id": f"call_{place}_{index}", "type": "function", "function": function})
    return calls
