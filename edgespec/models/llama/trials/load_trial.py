"""The child's part of vetting a model file: load it without its weights, and tokenize some texts.

Run by `processes.trial` for `runtime.vetting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import EdgeSpecError
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.heads import is_head
from edgespec.models.llama.heads.context import HeadContext
from edgespec.models.llama.runtime.backend import start_backend
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model

_TEXTS = (
    "Hello, world! It's 3.14 o'clock.\n\n  def f(x):\n\treturn x + 1  \n",
    "Ünïcödé 日本語 ไทย ❤️ \u00a0\u200b <|im_start|><s>[INST] <0x41>",
    " ",
    "    a\r\n\r\n1234567 ...",
)

start_backend()


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Do what loading the model at "path", for a head beside the one at "beside", and reading a prompt do.

    Returns:
        The "error" with which llama.cpp refused the file, or nothing.
    """
    try:
        with _planned(Path(request["path"])) as model:
            vocabulary = model.vocabulary
            for text in _TEXTS:
                for control in (False, True):
                    vocabulary.tokenize(text, control=control, bos=True)
            for token in range(vocabulary.n_tokens):
                vocabulary.piece(token, control=True)
            if "beside" in request:
                _open_head(model, Path(request["beside"]))
            elif not is_head(read_header(Path(request["path"]))):  # which needs its target for a context
                _open(model).close()
    except EdgeSpecError as error:
        return {"error": error.what}
    return {}


def _planned(path: Path) -> Model:
    return Model(path, memory_map=False, repack=False, allocate=False, vetted=False)


def _open(model: Model) -> Context:
    return Context(model, n_cells=256, n_rows=64, n_outputs=64, n_sequences=1, n_threads=1)


def _open_head(model: Model, target: Path) -> None:
    """Set up a head beside its target, whose matrices it may borrow."""
    with _planned(target) as large:
        HeadContext(model, _open(large), n_cells=256, n_sequences=1, n_threads=1).close()
