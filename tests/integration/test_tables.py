"""Embeddings that are only looked up stay in the file of a streamed model, and of its drafter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine, GenerationConfig
from edgespec.drafters.model import ModelDrafter
from edgespec.errors import ModelFileError
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.tables import WeightsBesideTables
from tests.conftest import made_once
from tests.least_memory import load_in_least_memory
from tests.rewritten import write_untied
from tests.tamper import time_put_back

PROMPT = "Write a short story about a fox and a crow who share a house."
GREEDY = GenerationConfig(max_tokens=10)
USUAL: dict[str, Any] = {"draft": "none", "context": 512, "threads": 1}


@pytest.fixture(scope="module")
def untied_path(short_path: Path) -> Path:
    return made_once("smol-short-8192-untied.gguf", lambda path: write_untied(short_path, path))


@pytest.fixture
def model(untied_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(untied_path, tmp_path / "model.gguf"))


def streamed(model: Path, **options: Any) -> Engine:
    return load_in_least_memory(model, **{**USUAL, **options})


def tokens(engine: Engine) -> list[int]:
    engine.target.rewind(0)
    return engine.generate(PROMPT, GREEDY, raw=True).tokens


def test_the_text_is_that_of_the_tied_model(short_path: Path, untied_path: Path) -> None:
    (table,) = ModelFiles.of(read_header(untied_path)).tables
    assert table.name == "token_embd.weight"
    with streamed(short_path) as engine:
        expected, tied_bytes = tokens(engine), engine.memory.resident_bytes
    with streamed(untied_path) as engine:
        assert tokens(engine) == expected
        assert engine.memory.resident_bytes < tied_bytes + table.n_bytes // 2


def test_a_drafter_beside_a_streamed_target_leaves_its_table_too(short_path: Path, untied_path: Path) -> None:
    with streamed(short_path, draft=str(short_path), tree_budget=8) as engine:
        expected = tokens(engine)
    with streamed(short_path, draft=str(untied_path), tree_budget=8) as engine:
        assert isinstance(engine.drafter, ModelDrafter)
        assert isinstance(engine.drafter._model.weights, WeightsBesideTables)
        assert tokens(engine) == expected
        assert engine.generate(PROMPT, GREEDY, raw=True).tokens_per_pass > 1.5  # it reads the right rows


def test_a_file_that_is_moved_or_removed_is_read_as_before(model: Path) -> None:
    with streamed(model) as engine:
        expected = tokens(engine)
        moved = model.rename(model.with_name("moved.gguf"))
        assert tokens(engine) == expected
        moved.unlink()
        assert tokens(engine) == expected


def test_a_table_that_is_written_to_gives_no_more_tokens(model: Path) -> None:
    with streamed(model) as engine:
        tokens(engine)
        (table,) = ModelFiles.of(read_header(model)).tables
        with time_put_back(model), model.open("r+b") as file:
            file.seek(table.offset + table.n_bytes // 2)
            file.write(bytes(1 << 10))
        with pytest.raises(ModelFileError, match="was changed while the model was in use"):
            tokens(engine)
