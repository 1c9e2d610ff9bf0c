"""Images that are read together with the text around them: which tokens of a sequence one pass takes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.engine.embedded_images import tokens_with_images
from edgespec.engine.sequence import TextSequence
from edgespec.errors import ModelFileError
from edgespec.images.rows import ImageRows, PlacedImage
from edgespec.llama.runtime.batch import TokenRows
from edgespec.llama.runtime.model import Model
from tests.links import needs_links

TEXT = [1, 2, 3]


def pictured(*causal: bool) -> TextSequence:
    """Three tokens of text, and four rows of an image and three tokens for each of these."""
    tokens, images = [*TEXT], []
    for seed, sees_back in enumerate(causal):
        values = np.random.default_rng(seed).standard_normal((4, 2)).astype(np.float32)
        images.append(PlacedImage(len(tokens), ImageRows(values, sees_back)))
        tokens += [*images[-1].rows.ids, *TEXT]
    return TextSequence(tokens, images=tuple(images))


@pytest.mark.parametrize(
    ("causal", "end", "most", "together"),
    [
        ((), 3, 99, 0),
        ((True,), 10, 99, 10),
        ((True,), 7, 99, 7),
        ((True,), 9, 8, 8),
        ((True,), 10, 6, 10),  # two passes, as the image does not end in the first
        ((True, True), 17, 4, 8),
        ((True,), 3, 99, 0),
        ((True, True), 17, 99, 17),
        ((True, True), 17, 12, 10),  # not a part of an image
        ((True, False), 17, 99, 10),
        ((False, True), 17, 99, 0),
    ],
)
def test_whole_images_and_the_text_around_them_share_passes(
    causal: tuple[bool, ...], end: int, most: int, together: int
) -> None:
    assert tokens_with_images(pictured(*causal), end, most) == together


def test_rows_of_tokens_are_those_of_the_table(smol_path: Path) -> None:
    reader = gguf.GGUFReader(smol_path)
    (table,) = (tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    with Model(smol_path, allocate=False, repack=False) as model:
        rows = TokenRows.of(model)
        assert rows is not None
        found = rows.read([7, 0, 7])
    expected = gguf.dequantize(table.data[[7, 0, 7]], table.tensor_type)
    assert np.array_equal(found, expected)


@needs_links
def test_rows_of_tokens_are_not_read_from_a_file_that_took_the_place_of_the_models(
    smol_path: Path, tmp_path: Path
) -> None:
    path, another = tmp_path / "model.gguf", tmp_path / "another.gguf"
    path.symlink_to(smol_path)
    with Model(path, allocate=False, repack=False) as model:
        rows = TokenRows.of(model)
        assert rows is not None
        rows.read([7])
        another.write_bytes(b"\0" * 99)
        path.unlink()
        path.symlink_to(another)
        with pytest.raises(ModelFileError, match="was changed"):
            rows.read([7])


def test_models_that_use_more_of_a_token_have_no_rows(gemma_path: Path) -> None:
    with Model(gemma_path, allocate=False, repack=False) as model:
        assert TokenRows.of(model) is None
