"""Models with another chat template, for programs that load a model by its file."""

from __future__ import annotations

import struct
from pathlib import Path

_KEY = b"tokenizer.chat_template"
_TEXT = 8  # a GGUF value that is a string
_ALIGNMENT = 32


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
