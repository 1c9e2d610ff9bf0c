"""Images in prompts, as far as no model is needed: files, parts of messages, ids, and seams in texts."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from edgespec.errors import ModelFileError, TemplateError, UsageError
from edgespec.images.file import (
    MAX_BYTES,
    MAX_PIXELS,
    MAX_SIDE,
    check_image,
    check_size,
    is_image,
    media_type,
    read_image,
)
from edgespec.images.parts import Image, WithPlaceholders, has_images, image_of
from edgespec.images.projector import another_model, find_projector, go_together
from edgespec.images.rows import ImageRows, placed_images
from edgespec.llama.projector import DamagedImage, ImageTooLarge, decode
from edgespec.speculation.growth import Frontier
from edgespec.speculation.sources.text import TextSource
from edgespec.speculation.spliced import SplicedText, behind_seams
from tests.links import put
from tests.program import run_here
from tests.tiny_images import exif, png, png_of, write_projector

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
LIMITS = {"max_side": MAX_SIDE, "max_pixels": MAX_PIXELS}


def saved(form: str, picture: PIL.Image.Image | None = None, **options: Any) -> bytes:
    """A file of a format with a picture, or with one of 30 x 20 random pixels."""
    file = io.BytesIO()
    (picture or PIL.Image.open(io.BytesIO(png(30, 20)))).save(file, form, **options)
    return file.getvalue()


GIF, BMP = saved("GIF"), saved("BMP")


# Files.


@pytest.mark.parametrize("form", FORMATS)
def test_formats_are_known_by_their_first_bytes(form: str, tmp_path: Path) -> None:
    data = saved(form)
    assert media_type(data) == f"image/{form.lower()}"
    path = tmp_path / "it"
    path.write_bytes(data)
    assert is_image(path)
    assert read_image(path) == data


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"RIFF    WAVEfmt ", "is not an image that can be read"),
        (b"P6 1 1 255 abc", "is not an image that can be read"),
        (b"BM is how this text begins", "is not an image that can be read"),
        (bytes(MAX_BYTES + 1), "has more than 32 MiB"),
    ],
)
def test_other_files_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_image(data, "it")


def test_nothing_but_the_first_bytes_is_looked_at_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a stranger's file says, the process that serves others takes no time over it."""

    class Unread(bytes):
        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            assert len(found) < 32
            return found

        def _refused(self, *arguments: Any) -> Any:
            raise AssertionError("searched")

        __iter__ = find = index = count = split = _refused

    check_image(Unread(b"\xff\xd8\xff" + b"\xff" * 100_000), "it")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.png"):
        with pytest.raises(UsageError, match=path.name):
            read_image(path)


# Pixels.


@pytest.mark.parametrize("form", FORMATS)
def test_whole_pictures_are_decoded_and_no_parts(form: str) -> None:
    data = saved(form)
    assert decode(data + b"more", **LIMITS).shape == (20, 30, 3)
    for length in (20, len(data) // 2):
        with pytest.raises(DamagedImage):
            decode(data[:length], **LIMITS)


def test_lossless_pictures_keep_their_bits() -> None:
    picture = PIL.Image.open(io.BytesIO(png(30, 20)))
    expected = np.asarray(picture)
    for data in (saved("PNG"), saved("BMP"), saved("WEBP", lossless=True)):
        assert np.array_equal(decode(data, **LIMITS), expected)
    grey = np.arange(600, dtype=np.uint16).reshape(20, 30) * 100
    found = decode(saved("PNG", PIL.Image.fromarray(grey)), **LIMITS)
    assert np.array_equal(found, np.stack([grey >> 8] * 3, axis=2)), "16 bits"
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK"):
        form = "JPEG" if mode == "CMYK" else "PNG"
        assert decode(saved(form, picture.convert(mode)), **LIMITS).shape == (20, 30, 3)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of damaged EXIF
def test_photographs_are_turned_upright() -> None:
    picture = PIL.Image.open(io.BytesIO(png(30, 20)))
    turns = [
        None,
        "FLIP_LEFT_RIGHT",
        "ROTATE_180",
        "FLIP_TOP_BOTTOM",
        "TRANSPOSE",
        "ROTATE_270",
        "TRANSVERSE",
    ]
    turns.append("ROTATE_90")
    for orientation, turn in enumerate(turns, 1):
        upright = picture if turn is None else picture.transpose(PIL.Image.Transpose[turn])
        assert np.array_equal(decode(png(30, 20, orientation=orientation), **LIMITS), np.asarray(upright))
    for orientation in (0, 9):
        assert np.array_equal(decode(png(30, 20, orientation=orientation), **LIMITS), np.asarray(picture))
    for order in "<>":
        assert decode(saved("JPEG", exif=b"Exif\0\0" + exif(6, order)), **LIMITS).shape == (30, 20, 3)
    damaged = b"Exif\0\0" + exif(6).replace(b"II*\0\x08", b"II*\0\xff")
    assert decode(saved("JPEG", exif=damaged), **LIMITS).shape == (20, 30, 3)


def test_pictures_with_too_many_pixels_are_not_decoded() -> None:
    huge = png_of((b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)), (b"IEND", b""))
    for limits in ({}, {"max_side": 29}, {"max_pixels": 599}):
        with pytest.raises(ImageTooLarge) as error:
            decode(png(30, 20) if limits else huge, **LIMITS | limits)
        assert error.value.size == ((30, 20) if limits else (30_000, 30_000))
    with pytest.raises(UsageError, match="it has 30000 x 30000 pixels; up to 64 million are read"):
        check_size(30_000, 30_000, "it")
    with pytest.raises(DamagedImage):
        decode(b"GIF89a" + bytes(30), **LIMITS)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of damaged EXIF
def test_whatever_a_file_is_it_becomes_pixels_or_is_refused() -> None:
    draw = random.Random(7)
    files = [saved(form) for form in FORMATS]
    files += [png(30, 20, orientation=6), saved("JPEG", progressive=True), saved("JPEG", exif=exif(6))]
    outcomes: set[str] = set()
    for _ in range(1500):
        data = bytearray(draw.choice(files))
        for _ in range(draw.choice((1, 3, 20))):
            at = draw.randrange(len(data))
            data[at : at + draw.choice((0, 1, 9))] = draw.randbytes(draw.choice((0, 1, 9)))
        try:
            assert decode(bytes(data), max_side=4096, max_pixels=1 << 20).shape[2] == 3
            outcomes.add("decoded")
        except (DamagedImage, ImageTooLarge) as error:
            outcomes.add(type(error).__name__)
    assert outcomes == {"decoded", "DamagedImage", "ImageTooLarge"}


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
        ({"type": "image"}, 'neither "path" nor "data" nor "image"'),
        ({"type": "image", "image": 7}, "An image must be"),
        ({"type": "image", "data": "text"}, "must be bytes"),
        ("text", "neither a text nor an image"),
    ],
)
def test_other_parts_are_refused(part: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        WithPlaceholders(message({"type": "image", "data": GIF}, part))


def test_images_of_pillow_are_turned_and_shown() -> None:
    pillow = PIL.Image
    lying = pillow.open(io.BytesIO(png(30, 20, orientation=6)))
    shown = pillow.open(io.BytesIO(image_of(lying).data))
    assert shown.size == (20, 30)
    upright = pillow.open(io.BytesIO(png(30, 20))).transpose(pillow.Transpose.ROTATE_270)
    assert shown.tobytes() == upright.tobytes()
    grey = PIL.Image.fromarray(np.full((20, 30), 0x1234, dtype=np.uint16))
    assert (decode(image_of(grey).data, **LIMITS) == 0x12).all()
    for mode in ("L", "P", "CMYK", "I", "F"):
        assert image_of(pillow.new(mode, (30, 20))).data
    with pytest.raises(UsageError, match="has 30000 x 30000 pixels"):
        image_of(pillow.new("1", (30_000, 30_000)))
    with pytest.raises(UsageError, match="The image cannot be read: "):
        image_of(pillow.open(io.BytesIO(png()[:-60])))


def test_files_that_change_while_a_batch_runs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(png())
    part = {"type": "image", "path": str(path), "sha256": image_of(path).sha256}
    assert WithPlaceholders(message(part)).messages
    path.write_bytes(png(seed=2))
    with pytest.raises(UsageError, match=r"cat\.png has changed since the lines were read"):
        WithPlaceholders(message(part))


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
    put(smol_path, model)
    with pytest.raises(UsageError, match="no projector beside it"):
        find_projector(model, None)
    (tmp_path / "mmproj-partial.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"mmproj-partial\.gguf") as refused:
        find_projector(model, None)
    assert "no projector" not in str(refused.value)
    first = write_projector(tmp_path / "mmproj-a.gguf", "idefics3")
    assert find_projector(model, None).path == first
    second = write_projector(tmp_path / "mmproj-b.gguf", "idefics3")
    with pytest.raises(UsageError, match=r"mmproj-a\.gguf, mmproj-b\.gguf"):
        find_projector(model, None)
    assert find_projector(model, second).path == second
    with pytest.raises(ModelFileError, match="is not a projector"):
        find_projector(model, model)


def test_a_projector_of_another_family_is_refused(smol_path: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    put(smol_path, model)
    said = r"mmproj-b\.gguf.* is a projector of the type gemma3, which no llama model has"
    other = write_projector(tmp_path / "mmproj-b.gguf", "gemma3")
    with pytest.raises(UsageError, match=said):
        find_projector(model, None)
    with pytest.raises(ModelFileError, match=said):
        find_projector(model, other)
    own = write_projector(tmp_path / "mmproj-a.gguf", "idefics3")
    assert find_projector(model, None).path == own


def test_projectors_that_go_with_any_model_are_not_refused() -> None:
    assert go_together("qwen3vl_merger", "qwen35")
    assert not go_together("qwen2vl_merger", "qwen35")
    assert not go_together("qwen3vl_merger", "llama")
    assert not go_together("idefics3", "gemma3")
    for kind in ("idefics3", "mlp", "of a later version"):
        assert go_together(kind, "llama")
    assert go_together("mlp", "gemma3")


@pytest.mark.parametrize(
    ("projector", "target", "stated"),
    [
        ({"basename": "SmolVLM2"}, {"basename": "llava-1.5"}, "SmolVLM2"),
        ({"basename": "SmolVLM2"}, {"basename": "smolvlm2-2.2B-Instruct"}, ""),
        (
            {"basename": "SmolVLM2"},
            {"basename": "Painter", "base_model.0.name": "SmolVLM2 2.2B Instruct"},
            "",
        ),
        ({"basename": "SmolVLM2"}, {"basename": "Painter", "base_model.0.name": "Llama 3"}, "SmolVLM2"),
        ({"basename": "Eyes", "base_model.0.name": "SmolVLM2"}, {"basename": "SmolVLM2"}, ""),
        ({"basename": "SmolVLM2"}, {"name": "llava-1.5"}, ""),
        ({"name": "clip-vit-large"}, {"basename": "llava-1.5"}, ""),
        ({"basename": "-"}, {"basename": "llava-1.5"}, ""),
        ({"basename": 7}, {"basename": "llava-1.5"}, ""),
    ],
)
def test_files_name_their_models(
    projector: dict[str, object], target: dict[str, object], stated: str
) -> None:
    theirs, ours = ({f"general.{key}": name for key, name in names.items()} for names in (projector, target))
    assert another_model(theirs, "idefics3", ours) == stated
    assert another_model(theirs, "gemma3", ours) == "", "its type decides"


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
