"""Texts of any form and length: tokenized like any other, or refused, and never the end of the process."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import ContextLengthError
from edgespec.llama.runtime.model import Model
from edgespec.llama.tokenizer.vocabulary import MAX_CHARS, Vocabulary, on_deep_stack, split
from edgespec.text.encoding import Encoder
from tests.fuzz.headers import small_model
from tests.tiny import ARCHITECTURES, write_tiny

# One name for each way of llama.cpp's to split texts into words.
PRE_TOKENIZERS = [
    *("default", "afmoe", "bailingmoe", "bloom", "chameleon", "chatglm-bpe", "command-r", "dbrx"),
    *("deepseek-coder", "deepseek-llm", "deepseek-v3", "exaone", "exaone-moe", "falcon", "gemma4", "gpt-2"),
    *(
        "gpt-4o",
        "gpt3-finnish",
        "granite-embed-multi-97m",
        "hunyuan",
        "hunyuan-dense",
        "hy_v4",
        "jais",
        "jais-2",
    ),
    *(
        "joyai-llm",
        "kimi-k2",
        "laguna",
        "llama-bpe",
        "minicpm5",
        "minimax-m2",
        "poro-chat",
        "qwen2",
        "qwen35",
    ),
    *(
        "refact",
        "sarvam-moe",
        "seed-coder",
        "smollm",
        "spark2_5",
        "stablelm2",
        "superbpe",
        "tekken",
        "tiny_aya",
    ),
    *("trillion", "ufakzeka", "viking", "youtu"),
]
RUNS = ["a", "é", "中", " ", "!", "7", "\n", "/\n", "a ", "ab1", "\t "]

# In a process of its own: where a run is not bounded, tokenizing it ends that process.
HOSTILE = """
import sys
from pathlib import Path
from edgespec.llama.runtime.model import Model
names, folder, length, natural = sys.argv[1].split(), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
for name in names:
    with Model(folder / f"{name}.gguf", vocabulary_only=True) as model:
        vocabulary = model.vocabulary
        for run in sys.argv[5:]:
            vocabulary.tokenize((run * length)[:length] + "a", control=False)
        whole = vocabulary._tokenize(natural, False, False)
        print(name, vocabulary.tokenize(natural, control=False) == whole, len(whole), flush=True)
"""


@pytest.fixture(scope="module")
def vocabulary(smol_path: Path) -> Iterator[Vocabulary]:
    with Model(smol_path, vocabulary_only=True) as model:
        yield model.vocabulary


def natural_text() -> str:
    """Prose, code and Japanese of several pieces, without runs of many characters."""
    root = Path(__file__).parents[2]
    prose = (root / "docs" / "architecture.md").read_text()[: MAX_CHARS + 2000]
    code = (root / "edgespec" / "engine" / "engine.py").read_text()[: MAX_CHARS + 1000]
    paragraphs = "One more paragraph of plain words. It has two sentences, and then it ends.\n\n" * 80
    return prose + code + paragraphs + "日本語のテキスト、これは試験です。" * 300


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_long_runs_are_tokenized_whatever_splits_words(smol_path: Path, tmp_path: Path, part: int) -> None:
    names = PRE_TOKENIZERS[part::4]
    header = small_model(smol_path)
    for name in names:
        header.change("tokenizer.ggml.pre", name.encode())
        (tmp_path / f"{name}.gguf").write_bytes(header.to_bytes())
    arguments = [" ".join(names), str(tmp_path), "40000", natural_text(), *RUNS]
    done = subprocess.run([sys.executable, "-c", HOSTILE, *arguments], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, lines
    for name, line in zip(names, lines, strict=True):
        assert line.startswith(f"{name} True "), line
        assert int(line.split()[2]) > 1000


def test_ids_of_no_token_have_no_piece(vocabulary: Vocabulary) -> None:
    """Rows of images have ids below zero; llama.cpp would end the process."""
    for number in (-5, vocabulary.n_tokens):
        with pytest.raises(IndexError):
            vocabulary.piece(number)


def test_a_megabyte_in_one_run(vocabulary: Vocabulary) -> None:
    tokens = vocabulary.tokenize("x" * 1_000_000, control=False)
    assert b"".join(map(vocabulary.piece, tokens)) == b"x" * 1_000_000


@given(st.text(st.sampled_from("aé中 \n\t!,.7'<|im_end|>"), max_size=60), st.integers(1, 400))
def test_pieces_are_the_text(part: str, times: int) -> None:
    text = part * times
    pieces = list(split(text))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= MAX_CHARS for piece in pieces)


def test_where_texts_are_cut() -> None:
    lines = "some words here\n" * 1000
    assert all(piece.endswith("e\n") for piece in split(lines))
    words = "words " * 2000
    assert all(piece.endswith("s") for piece in list(split(words))[:-1])
    assert {len(piece) for piece in list(split("x" * 10_000))[:-1]} == {MAX_CHARS}
    assert max(map(len, split("a" + " " * 5000 + "b"))) <= 1025


def test_control_tokens_are_not_cut_apart(vocabulary: Vocabulary) -> None:
    for shift in range(12):
        text = "x" * (MAX_CHARS - shift) + "<|im_end|>" + "y" * MAX_CHARS
        tokens = vocabulary.tokenize(text, control=True)
        assert [token for token in tokens if vocabulary.is_control(token)], shift


def test_begin_of_text_stands_once_in_front(gemma_path: Path) -> None:
    with Model(gemma_path, vocabulary_only=True) as model:
        tokens = model.vocabulary.tokenize("word " * 5000, control=False, bos=True)
        assert tokens[0] == model.vocabulary.bos
        assert model.vocabulary.bos not in tokens[1:]


def test_what_is_far_longer_than_the_context_is_refused_before_it_takes_memory(
    vocabulary: Vocabulary,
) -> None:
    encoder = Encoder(vocabulary, None, context=4096)
    text = "word " * (60 << 18)
    tracemalloc.start()
    with pytest.raises(
        ContextLengthError, match=r"The prompt has 78,643,200 characters; 4,096 tokens hold at most "
    ):
        encoder.encode(text)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 64 << 20


def test_tokens_are_counted_no_further_than_they_matter(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    tokenize = Vocabulary._tokenize
    monkeypatch.setattr(Vocabulary, "_tokenize", lambda self, *args: calls.append(1) or tokenize(self, *args))
    with pytest.raises(ContextLengthError, match=r"The prompt has more than 512 tokens"):
        Encoder(vocabulary, None, context=128).encode("a b c d " * 1000)
    assert len(calls) == 1


def test_what_fails_on_a_deep_stack_fails_here(vocabulary: Vocabulary) -> None:
    def fail() -> None:
        raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        on_deep_stack(fail)
    assert on_deep_stack(lambda: 3) == 3


def test_a_prompt_for_the_middle_of_a_text_has_the_models_marks(
    smol_path: Path, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    def keys(writer: gguf.GGUFWriter) -> None:
        for token, part in enumerate(("pre", "suf", "mid"), 11):
            writer.add_uint32(f"tokenizer.ggml.fim_{part}_token_id", token)

    kind = replace(ARCHITECTURES["llama"], keys=keys)
    with Model(write_tiny(tmp_path / "tiny.gguf", "llama", smol_path, kind=kind)) as model:
        before = model.vocabulary.tokenize("a b", control=False)
        after = model.vocabulary.tokenize("c", control=False)
        assert model.vocabulary.filled_in(before, "c") == [11, *before, 12, *after, 13]
    assert vocabulary.filled_in([5], "c") is None
