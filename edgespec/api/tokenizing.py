"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in the forms of llama.cpp's server and of vLLM's.

A text is `content` for the one and `prompt` for the other; a response has the fields of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgespec.api.completion_request import check_size, check_tokens
from edgespec.api.endpoint import DirectEndpoint, Event
from edgespec.api.images import RequestImages
from edgespec.api.limits import Limits
from edgespec.api.messages import read_messages
from edgespec.api.values import boolean, wrong
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine


class TokenizerEndpoint(DirectEndpoint):
    """An endpoint that turns text into tokens or back.

    Args:
        reply: makes the answer of a request.
    """

    def __init__(self, reply: Callable[[dict[str, Any], Engine, Limits], Event]) -> None:
        self._reply = reply

    def reply(self, body: object, engine: Engine, limits: Limits) -> Event:
        if not isinstance(body, dict):
            raise UsageError("The body is not a JSON object.")
        return self._reply(body, engine, limits)


def tokenized(body: dict[str, Any], engine: Engine, limits: Limits) -> Event:
    """The tokens of a text, or of chat messages; ids below zero stand for the rows of images.

    Raises:
        UsageError: there is no text, or a field has another type.
        ContextLengthError: the text is far longer than the context.
        TemplateError: the chat template does not take the messages.
    """
    vocabulary = engine.target.model.vocabulary
    if body.get("messages") is not None:
        warnings = Warnings()
        images = RequestImages(limits, warnings, lambda: engine.sees_images)
        messages: Any = read_messages(body["messages"], limits, warnings, images)
        check_size(messages, context=engine.context, n_vocab=vocabulary.n_tokens, limits=limits)
        tokens = engine.encoder.encode(messages)
    else:
        as_llama = body.get("content") is not None
        name = "content" if as_llama else "prompt"
        text = body.get(name)
        if not isinstance(text, str):
            raise wrong(name, text, "a string")
        check_size(text, context=engine.context, n_vocab=vocabulary.n_tokens, limits=limits)
        # By default vLLM's server adds such tokens, and llama.cpp's does not.
        special = boolean(body, "add_special" if as_llama else "add_special_tokens", not as_llama)
        parse = boolean(body, "parse_special", True)
        tokens = vocabulary.tokenize(text, control=parse, bos=special)
    spelled = [vocabulary.piece(token, control=True) if token >= 0 else b"" for token in tokens]
    if boolean(body, "with_pieces"):
        return {
            "tokens": [{"id": token, "piece": _piece(s)} for token, s in zip(tokens, spelled, strict=True)]
        }
    strings = [s.decode("utf-8", "replace") for s in spelled] if boolean(body, "return_token_strs") else None
    return {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": engine.context,
        "token_strs": strings,
    }


def detokenized(body: dict[str, Any], engine: Engine, limits: Limits) -> Event:
    """The text of tokens.

    Raises:
        UsageError: there are none, or the model does not have one of them.
    """
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise wrong("tokens", tokens, "a list of integers")
    vocabulary = engine.target.model.vocabulary
    check_tokens(tokens, vocabulary.n_tokens)
    text = vocabulary.spelled(tokens)
    return {"content": text, "prompt": text}


def tokenizer_info(_body: dict[str, Any], engine: Engine, _limits: Limits) -> Event:
    """The facts about the tokenizer that clients look for."""
    model = engine.target.model
    vocabulary = model.vocabulary

    def named(token: int) -> str | None:
        return vocabulary.text(token).decode("utf-8", "replace") if token >= 0 else None

    return {
        "tokenizer_class": "GGUF",
        "vocab_size": vocabulary.n_tokens,
        "model_max_length": engine.context,
        "add_bos_token": vocabulary.adds_bos,
        "bos_token": named(vocabulary.bos),
        "eos_token": named(vocabulary.eos),
        "pad_token": None,
        "chat_template": model.chat_template,
    }


def _piece(spelling: bytes) -> str | list[int]:
    """A token as llama.cpp's server gives it: text, or bytes that are no text alone."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return list(spelling)
