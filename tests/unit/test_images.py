"""Images in prompts, as far as no model is needed: files, parts of messages, ids, and seams in texts."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import ModelFileError, TemplateError, UsageError
from edgespec.images.file import MOST_BYTES, check_image, read_image
from edgespec.images.parts import Image, WithPlaceholders, has_images
from edgespec.images.projector import find_projector
from edgespec.images.rows import ImageRows, placed_images
from edgespec.speculation.growth import Frontier
from edgespec.speculation.sources.text import TextSource
from edgespec.speculation.spliced import SplicedText, behind_seams
from tests.program import run_here
from tests.tiny_images import png, write_projector

JPEG = b"\xff\xd8\xff\xe0\0\x04ab\xff\xff\xc0\0\x11\x08" + struct.pack(">HH", 20, 30) + b"\x03"
GIF = b"GIF89a" + struct.pack("<HH", 30, 20)
BMP = b"BM" + bytes(12) + struct.pack("<Iii", 40, 30, -20)


# Files.


@pytest.mark.parametrize("data", [png(30, 20), JPEG, GIF, BMP], ids=["png", "jpeg", "gif", "bmp"])
def test_formats_are_known_by_their_first_bytes(data: bytes) -> None:
    check_image(data, "it")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not an image that can be read"),
        (b"RIFF    WEBPVP8 ", "is not an image that can be read"),
        (b"P6 1 1 255 abc", "is not an image that can be read"),
        (JPEG[:12], "is a damaged image"),
        (b"\xff\xd8\xff" + b"\xff" * 100, "is a damaged image"),
        (png()[:20], "is a damaged image"),
        (b"GIF89a" + struct.pack("<HH", 0, 20), "claims 0 x 20 pixels"),
        (b"GIF89a" + struct.pack("<HH", 60_000, 20), "claims 60000 x 20 pixels"),
        (b"BM" + bytes(12) + struct.pack("<Iii", 40, 30_000, -30_000), "claims 30000 x 30000 pixels"),
        (bytes(MOST_BYTES + 1), "has more than 32 MiB"),
    ],
)
def test_other_files_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_image(data, "it")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.png"):
        with pytest.raises(UsageError, match=path.name):
            read_image(path)


# Parts of messages.


def message(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


def test_images_pass_through_a_template_as_numbers() -> None:
    told = message({"type": "image", "data": GIF, "name": "a"}, {"type": "text", "text": "What?"})
    told += message({"type": "image", "data": BMP})
    assert has_images(told)
    numbered = WithPlaceholders(told)
    first, second = (text["content"] for text in numbered.messages)
    assert first[:40].isdigit()
    assert first[40:] == "What?"
    assert numbered.split(f"<{first}>{second}") == ["<", Image(GIF, "a"), "What?>", Image(BMP, "The image")]
    for shown in (first, second + first, first + second + second):
        with pytest.raises(TemplateError):
            numbered.require_all(shown, lambda: TemplateError("no"))
    numbered.require_all(first + second, lambda: TemplateError("no"))


def test_messages_without_images_stay_as_they_are() -> None:
    assert not has_images([{"role": "user", "content": "text"}, *message({"type": "text", "text": "text"})])


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "sound"}, "neither a text nor an image"),
        ({"type": "text"}, "neither a text nor an image"),
        ({"type": "image"}, 'neither "path" nor "data"'),
        ({"type": "image", "data": "text"}, "must be bytes"),
        ("text", "neither a text nor an image"),
    ],
)
def test_other_parts_are_refused(part: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        WithPlaceholders(message({"type": "image", "data": GIF}, part))


# Ids.


def rows(seed: int, count: int = 5, *, causal: bool = True) -> ImageRows:
    return ImageRows(np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32), causal)


def test_ids_are_those_of_no_token_and_differ_where_rows_do() -> None:
    some = [rows(1), rows(2), rows(1, causal=False), rows(1, count=6)]
    ids = [each.ids for each in some]
    assert all(-(2**31) <= number < -1 for found in ids for number in found)
    assert len(set(ids)) == len(some)
    assert not set(ids[0]) & set(ids[1])
    assert rows(1).ids == ids[0]


def test_images_are_found_among_tokens() -> None:
    first, second = rows(1), rows(2)
    known = {first.ids[0]: first, second.ids[0]: second}
    placed = list(placed_images([7, *first.ids, *second.ids, 8, *first.ids], known))
    assert [(image.start, image.end, image.rows) for image in placed] == [
        (1, 6, first),
        (6, 11, second),
        (12, 17, first),
    ]
    for wrong in ([*first.ids[:3], 8], [*rows(3).ids]):
        with pytest.raises(KeyError):
            list(placed_images(wrong, known))


# Seams.


def test_a_spliced_text_knows_where_images_were() -> None:
    text = SplicedText([1, -5, -6, 2, 3, -7, 4])
    assert text == [1, 2, 3, 4]
    assert text.seams == (1, 3)
    assert list(behind_seams(text)) == [4]
    assert list(behind_seams([1, 2])) == [1, 2]


def proposed(source: TextSource, sequence: Sequence[int]) -> set[int]:
    root = Frontier(*(np.array([value], dtype=np.int32) for value in (0, -1, sequence[-1], 0)))
    (found,) = source.propose(sequence, 4).below(root)
    return set(found)


def test_nothing_is_matched_across_an_image() -> None:
    source = TextSource()
    assert proposed(source, [1, 2, 3, 9, 1, 2]) == {3}
    assert proposed(source, SplicedText([1, 2, -5, 3, 9, 1, 2])) == set()
    assert proposed(source, SplicedText([1, 2, 3, -5, 9, 1, 2])) == {3}
    grown = SplicedText([1, 2, -5, 3, 9, 1, 2])
    grown += [3, 9]
    assert proposed(source, grown) == {1}
    assert proposed(source, [1, 2, 3, 9, 1, 2]) == {3}  # the same text without an image


# Projectors.


def test_a_projector_is_found_beside_the_model(smol_path: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(smol_path)
    with pytest.raises(UsageError, match="no projector beside it"):
        find_projector(model, None)
    (tmp_path / "mmproj-partial.gguf").write_bytes(b"GGUF")
    first = write_projector(tmp_path / "mmproj-a.gguf", "idefics3")
    assert find_projector(model, None).path == first
    second = write_projector(tmp_path / "mmproj-b.gguf", "gemma3")
    with pytest.raises(UsageError, match=r"mmproj-a\.gguf, mmproj-b\.gguf"):
        find_projector(model, None)
    assert find_projector(model, second).path == second
    with pytest.raises(ModelFileError, match="is not a projector"):
        find_projector(model, model)


# The command line.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--image", "missing.png", "-p", "What?"], "There is no image file missing.png"),
        (["--image", "it.png", "--input", "it.jsonl"], "works with a single prompt only"),
        (["--image", "it.png", "-p", "What?", "--raw"], "cannot be used with --raw"),
    ],
)
def test_generate_says_what_is_wrong_with_images(arguments: list[str], said: str) -> None:
    done = run_here("generate", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
