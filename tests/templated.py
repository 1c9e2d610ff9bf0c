"""Models with another chat template: by their file, and while they are loaded."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec.engine.engine import Engine
from edgespec.text.encoding import Encoder
from edgespec.text.template import ChatTemplate

_KEY = b"tokenizer.chat_template"
_TEXT = 8  # a GGUF value that is a string
_ALIGNMENT = 32


@contextmanager
def speaking(engine: Engine, template: str) -> Iterator[Engine]:
    """The engine, as if its model had another chat template."""
    before = engine.encoder
    vocabulary = engine.target.model.vocabulary
    with ChatTemplate(template, "<|im_start|>", "<|im_end|>") as chat:
        engine.encoder = Encoder(vocabulary, chat, engine.context)
        try:
            yield engine
        finally:
            engine.encoder = before


def now_speaking(engine: Engine, template: str) -> Engine:
    """The engine with another chat template, for as long as it is open."""
    engine.encoder.close()
    vocabulary = engine.target.model.vocabulary
    engine.encoder = Encoder(vocabulary, ChatTemplate(template, "", "<|im_end|>"), engine.context)
    return engine


def with_template(model: Path, template: str, path: Path) -> Path:
    """A copy of a model with another chat template.

    A comment at its end fills it up, so that the tensors behind the header stay aligned.
    """
    data = model.read_bytes()
    at = data.index(_KEY) + len(_KEY)
    kind, size = struct.unpack_from("<IQ", data, at)
    assert kind == _TEXT
    text = template.encode() + b"{#"
    text += b" " * (-(len(text) + 2 - size) % _ALIGNMENT) + b"#}"
    start = at + struct.calcsize("<IQ")
    path.write_bytes(data[:at] + struct.pack("<IQ", _TEXT, len(text)) + text + data[start + size :])
    return path
