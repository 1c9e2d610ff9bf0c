"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in the forms of llama.cpp's server and of vLLM's.

A text is `content` for the one and `prompt` for the other; a response has the fields of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgespec.api.completion_request import check_size, check_tokens
from edgespec.api.endpoint import Event
from edgespec.api.fields import Fields, read_fields
from edgespec.api.images import RequestImages
from edgespec.api.limits import Limits
from edgespec.api.messages import ChatMessages, read_messages
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine


class TokenizeBody(Fields):
    content: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    # By default vLLM's server adds such tokens to a prompt, and llama.cpp's does not to a content.
    add_special: bool = False
    add_special_tokens: bool = True
    parse_special: bool = True
    with_pieces: bool = False
    return_token_strs: bool = False


class DetokenizeBody(Fields):
    tokens: list[int]


def tokenized(body: object, engine: Engine, limits: Limits) -> Event:
    """The tokens of a text, or of chat messages; ids below zero stand for the rows of images."""
    vocabulary, warnings = engine.target.model.vocabulary, Warnings()
    fields = read_fields(body, TokenizeBody, warnings)
    if fields.messages is not None:
        images = RequestImages(limits, warnings, lambda: engine.sees_images)
        messages: Any = images.read(read_messages(fields.messages, warnings))
        check_size(messages, context=engine.context, n_vocab=vocabulary.n_tokens, limits=limits)
        tokens = engine.encoder.encode(messages)
    else:
        text = fields.prompt if fields.content is None else fields.content
        if text is None:
            raise UsageError('Missing "content", "prompt" or "messages".')
        check_size(text, context=engine.context, n_vocab=vocabulary.n_tokens, limits=limits)
        special = fields.add_special_tokens if fields.content is None else fields.add_special
        tokens = vocabulary.tokenize(text, control=fields.parse_special, bos=special)
    spelled = [vocabulary.piece(token, control=True) if token >= 0 else b"" for token in tokens]
    if fields.with_pieces:
        return {
            "tokens": [{"id": token, "piece": _piece(s)} for token, s in zip(tokens, spelled, strict=True)]
        }
    strings = [s.decode("utf-8", "replace") for s in spelled] if fields.return_token_strs else None
    return {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": engine.context,
        "token_strs": strings,
    }


def detokenized(body: object, engine: Engine, limits: Limits) -> Event:
    """The text of tokens."""
    tokens = read_fields(body, DetokenizeBody, Warnings()).tokens
    vocabulary = engine.target.model.vocabulary
    check_tokens(tokens, vocabulary.n_tokens)
    text = vocabulary.spelled(tokens)
    return {"content": text, "prompt": text}


def tokenizer_info(_body: object, engine: Engine, _limits: Limits) -> Event:
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
