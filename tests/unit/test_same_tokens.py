"""Files with the same vocabulary: found without loading them, and loaded without a second copy of it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import BackendError
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.vocabulary import another_vocabulary, same_tokens
from tests.tiny import finish, write_tiny

_TOKENS = ["a", "bc", "é", "d" * 20]


def _written(path: Path, tokens: list[str] | None, *, model: str = "gpt2", beside: str = "") -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(beside)
    writer.add_tokenizer_model(model)
    if tokens is not None:
        writer.add_token_list(tokens)
    writer.add_tensor("x.weight", np.ones((4, 64), dtype=np.float32))
    finish(writer)
    return path


@pytest.mark.parametrize(
    ("tokens", "model", "same"),
    [
        (_TOKENS, "gpt2", True),
        (_TOKENS, "bert", False),
        ([*_TOKENS, "padding"], "gpt2", False),
        (["b", *_TOKENS[1:]], "gpt2", False),
        ([*_TOKENS[1:], "a"], "gpt2", False),
        (["ab", "c", *_TOKENS[2:]], "gpt2", False),
        (None, "gpt2", False),
    ],
)
def test_the_same_tokens(tmp_path: Path, tokens: list[str] | None, model: str, same: bool) -> None:
    one = read_header(_written(tmp_path / "one.gguf", _TOKENS))
    other = read_header(_written(tmp_path / "other.gguf", tokens, model=model, beside="of another length"))
    assert same_tokens(one, other) == same_tokens(other, one) == same


@pytest.mark.parametrize(
    ("model", "tokens", "another"),
    [("gpt2", _TOKENS, False), ("gpt2", [*_TOKENS, "padding"], False), ("bert", _TOKENS, True)],
)
def test_another_vocabulary(tmp_path: Path, model: str, tokens: list[str], another: bool) -> None:
    one = read_header(_written(tmp_path / "one.gguf", _TOKENS))
    other = read_header(_written(tmp_path / "other.gguf", tokens, model=model))
    assert another_vocabulary(one, other) == another


def test_a_file_that_is_gone_does_not_compare(tmp_path: Path) -> None:
    headers = [read_header(_written(tmp_path / f"{n}.gguf", _TOKENS)) for n in range(2)]
    headers[0].path.unlink()
    assert not same_tokens(*headers)


def _logits(path: Path, *, token_texts: bool) -> NDArray[np.float32]:
    with Model(path, token_texts=token_texts) as model:
        for call in (
            lambda: model.vocabulary.tokenize("a", control=False),
            lambda: model.vocabulary.piece(65),
        ):
            with nullcontext() if token_texts else pytest.raises(BackendError, match="without the texts"):
                call()
        assert model.vocabulary.n_tokens == read_header(path).n_vocab
        context = Context(model, n_cells=64, n_rows=8, n_outputs=8, n_sequences=1, n_threads=1)
        context.decode(TokenBatch.run(np.arange(5, dtype=np.int32) + 40, 0, 1, "all"))
        logits = context.logits().copy()
        context.close()
    return logits


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "gemma2"])
def test_a_model_without_texts_computes_the_same(architecture: str, smol_path: Path, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", architecture, smol_path)
    assert np.array_equal(_logits(path, token_texts=True), _logits(path, token_texts=False))


def test_real_weights_compute_the_same(smol_path: Path) -> None:
    assert np.array_equal(_logits(smol_path, token_texts=True), _logits(smol_path, token_texts=False))
