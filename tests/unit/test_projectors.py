"""Projectors: which file belongs to a model, and what its header says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.config import Config
from edgespec.errors import ModelFileError
from edgespec.images.facts import ProjectorFacts
from edgespec.images.projector import find_projector
from edgespec.models.gguf.header import read_header
from edgespec.models.hub.projectors import choose_projector, is_projector, projector_beside, projectors_around
from edgespec.planning.files import reserved_projector
from edgespec.planning.report.sight import (
    image_notes,
)
from tests.links import put
from tests.tiny_images import write_projector

MODEL = "gemma-3-4b-it-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("paths", "chosen"),
    [
        ([], None),
        (["README.md", "mmproj.txt"], None),
        (["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        (["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        (["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-Q8_0.gguf"], "mmproj-Q8_0.gguf"),
        (["mmproj-F32.gguf", "mmproj-BF16.gguf"], "mmproj-BF16.gguf"),
        (
            ["mmproj-gemma-3-4b-it-f16.gguf", "mmproj-gemma-3-27b-it-f16.gguf"],
            "mmproj-gemma-3-4b-it-f16.gguf",
        ),
        (["gemma-3-4b-it-mmproj-f16.gguf", MODEL], "gemma-3-4b-it-mmproj-f16.gguf"),
        (["mmproj-a.gguf", "mmproj-b.gguf"], None),
        (["other/mmproj-F16.gguf"], None),
    ],
)
def test_a_projector_is_chosen_by_its_name(paths: list[str], chosen: str | None) -> None:
    assert choose_projector(paths, MODEL) == chosen


def test_projectors_lie_beside_a_model_or_above_it() -> None:
    model = f"Q4_K_M/{MODEL}"
    assert choose_projector(["mmproj-F16.gguf", "Q8_0/mmproj-F16.gguf"], model) == "mmproj-F16.gguf"
    assert choose_projector(["mmproj-F16.gguf", "Q4_K_M/mmproj-F16.gguf"], model) == "Q4_K_M/mmproj-F16.gguf"


def test_a_model_is_no_projector() -> None:
    assert is_projector("a/mmproj-F16.gguf")
    assert not is_projector("mmprojector.gguf.part")
    assert not is_projector(MODEL)


def test_folders_above_belong_to_a_model_in_the_hubs_cache_alone(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--acme--Seer" / "snapshots" / ("0" * 40)
    for folder in (snapshot / "Q4_0", tmp_path / "mine" / "Q4_0"):
        folder.mkdir(parents=True)
        (folder.parent / "mmproj-F16.gguf").touch()
    assert projector_beside(snapshot / "Q4_0" / "a.gguf") == snapshot / "mmproj-F16.gguf"
    assert projectors_around(tmp_path / "mine" / "Q4_0" / "a.gguf") == []
    (tmp_path / "mmproj-elsewhere.gguf").touch()
    assert projectors_around(snapshot / "a.gguf") == [snapshot / "mmproj-F16.gguf"]


def test_one_of_several_conversions_is_used(smol_path: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    put(smol_path, model)
    for label in ("F32", "f16", "BF16"):
        write_projector(tmp_path / f"mmproj-model-{label}.gguf", "idefics3")
    assert find_projector(model, None).path.name == "mmproj-model-f16.gguf"


@pytest.mark.parametrize(
    ("family", "longest", "tokens"),
    [("gemma3", 0, 16), ("idefics3", 64, 80), ("idefics3", 0, None)],  # 80: 2 x 2 parts and the whole, of 16
)
def test_tokens_of_a_picture_follow_from_the_header(
    family: str, longest: int, tokens: int | None, tmp_path: Path
) -> None:
    path = write_projector(tmp_path / "mmproj-model.gguf", family, longest_edge=longest)
    facts = ProjectorFacts.of(read_header(path))
    assert (facts.name, facts.n_bytes, facts.kind) == (path.name, path.stat().st_size, family)
    assert facts.tokens == tokens
    assert facts.reading_bytes > facts.n_bytes


def facts_of(projector: Path) -> ProjectorFacts:
    return ProjectorFacts.of(read_header(projector))


def test_memory_is_reserved_only_where_images_are_read_for_sure(smol_path: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    put(smol_path, model)
    images = Config.of(images=True).model
    assert reserved_projector(model, images) is None, "it has no projector"
    own = write_projector(tmp_path / "mmproj-a.gguf", "idefics3")
    assert reserved_projector(model, Config().model) is None
    assert reserved_projector(model, images) == facts_of(own)
    other = write_projector(tmp_path / "named.gguf", "idefics3")
    assert reserved_projector(model, Config.of(mmproj=str(other)).model) == facts_of(other)
    with pytest.raises(ModelFileError, match="is not a projector"):
        reserved_projector(model, Config.of(mmproj=str(model)).model)


def test_more_patches_take_larger_buffers(tmp_path: Path) -> None:
    scaled, dynamic = (
        facts_of(write_projector(tmp_path / f"{family}.gguf", family)) for family in ("gemma3", "qwen2vl")
    )
    assert scaled.tokens
    assert dynamic.tokens
    assert dynamic.buffers == scaled.buffers * dynamic.tokens // scaled.tokens, "as many patches a token"


@pytest.mark.parametrize("wrong", ["wide", -5, [1, 2], None])
def test_sizes_that_are_none_count_for_nothing(wrong: object, tmp_path: Path) -> None:
    header = read_header(write_projector(tmp_path / "mmproj.gguf", "gemma3"))
    named = ("embedding_length", "feed_forward_length", "projection_dim", "block_count")
    sizes = {f"clip.vision.{name}": wrong for name in named}
    facts = ProjectorFacts.of(replace(header, metadata={**header.metadata, **sizes}))
    assert facts.tokens == facts_of(header.path).tokens
    assert facts.buffers == 0


def test_tokens_of_a_picture_grow_with_its_parts(tmp_path: Path) -> None:
    whole, divided = (
        facts_of(write_projector(tmp_path / f"{side}.gguf", "idefics3", longest_edge=side))
        for side in (32, 64)
    )
    assert (whole.tokens, divided.tokens) == (32, 80)  # two parts, and five


def test_what_is_in_the_way_of_images_is_noted() -> None:
    facts = ProjectorFacts("mmproj.gguf", 1 << 30, "gemma3", 256)
    assert not list(image_notes(facts, 257, 2 << 30))
    crowded, starved = image_notes(facts, 256, 1 << 30)
    assert "takes 256 tokens, and the context holds 256: raise" in crowded
    assert "beside everything else, and 1.0 GiB are left: lower" in starved
    (starved,) = image_notes(replace(facts, tokens=None), 16, -5)
    assert "0 B are left" in starved
    assert not list(image_notes(facts, 257, None)), "the memory limit includes it"
