"""Model files over which llama.cpp ends the process: refused by their header, or by the death of a child."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import edgespec
from edgespec.cli.main import main
from edgespec.drafting.pair_check import examine_pair
from edgespec.errors import ModelFileError
from edgespec.files.user_folders import cache_folder
from edgespec.llama.dry_run import AllocationStore, Shape
from edgespec.llama.runtime import vetting
from edgespec.llama.runtime.backend import LogLines
from edgespec.llama.runtime.model import Model
from edgespec.llama.runtime.vetting import reading_order, require_survived
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from tests.fuzz.headers import STRING, UINT32, Entry, Header, small_model, tiny_model

CHILD = "edgespec.llama.runtime.vetting.attempt_in_child"
REMEMBERED = "edgespec.llama.runtime.vetting._survived"


def written(header: Header, folder: Path) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(header.to_bytes())
    return path


def of_architecture(header: Header, name: str) -> Header:
    """The model, labelled with another architecture."""
    changed = header.copy()
    for i, entry in enumerate(changed.entries):
        if entry.key.startswith(b"llama."):
            key = name.encode() + entry.key.removeprefix(b"llama")
            changed.entries[i] = Entry(key, entry.type_id, entry.value, entry.element)
    changed.change("general.architecture", name.encode())
    return changed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokenizer.ggml.model": b"none"}, "it has no vocabulary"),
        ({"tokenizer.ggml.model": b"no_vocab"}, "it has no vocabulary"),
        ({"tokenizer.ggml.pre": b"whitespace"}, "its vocabulary is of kind 'gpt2'"),
        ({"expert_group_count": 32}, "it claims 32 groups of 0 experts"),
        (
            {"expert_count": 4, "expert_used_count": 2, "expert_group_count": 4},
            "it claims 4 groups of 4 experts",
        ),
        (
            {"expert_count": 4, "expert_used_count": 2, "expert_group_count": 3},
            "it claims 4 experts in 3 groups",
        ),
        (
            {"expert_count": 4, "expert_used_count": 2, "expert_group_count": 2},
            "that 0 of 2 groups of experts",
        ),
        ({"rope.dimension_count": 0}, "rope.dimension_count is 0"),
        ({"rope.dimension_count": 31}, "rope.dimension_count is 31"),
        ({"rope.dimension_count": 2**32 - 2}, "rope.dimension_count is 4294967294"),
        ({"architecture": b"smallthinker"}, "its architecture is smallthinker, and it has no experts"),
    ],
)
def test_settings_that_end_the_process_are_refused(
    smol_path: Path, tmp_path: Path, change: dict[str, bytes | int], why: str
) -> None:
    header = small_model(smol_path)
    for key, value in change.items():
        if key == "architecture":
            header = of_architecture(header, str(value, "ascii") if isinstance(value, bytes) else "")
        elif isinstance(value, bytes):
            header.change(key, value)
        else:
            name = f"llama.{key}".encode()
            header.entries = [entry for entry in header.entries if entry.key != name]
            header.entries.append(Entry(name, UINT32, value))
    with pytest.raises(ModelFileError) as caught:
        read_header(written(header, tmp_path))
    assert why in caught.value.what


def test_a_file_that_ends_a_child_is_refused_and_remembered(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A header over which llama.cpp really aborts, as if the checks did not know it yet.
    monkeypatch.setattr("edgespec.models.gguf.header.find_fault", lambda _metadata, _tensors: "")
    path = written(of_architecture(small_model(smol_path), "smallthinker"), tmp_path)
    with monkeypatch.context() as tried:
        for found in (r"\.", r", as a trial found on \d{4}-\d\d-\d\d at \d\d:\d\d\."):
            with pytest.raises(ModelFileError) as caught:
                edgespec.load(path)
            assert re.fullmatch(
                re.escape(f"llama.cpp fails to load {path} (abort)") + found, caught.value.what
            )
            assert "another conversion" in caught.value.hint
            tried.setattr(CHILD, _no_child)
    assert caught.value.hint.endswith("To try it again: edgespec config --forget")
    if (verdicts := cache_folder() / "vetted").is_symlink():
        verdicts.unlink()  # other tests' verdicts
    with pytest.raises(ModelFileError):
        edgespec.load(path)
    assert main(["config", "--forget", "--yes"]) == 0
    with pytest.raises(ModelFileError) as caught:
        edgespec.load(path)
    assert "trial" not in caught.value.what


def test_a_file_is_tried_once(smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(smol_path)
    model.entries.append(
        Entry(b"general.description", STRING, str(tmp_path).encode())
    )  # no header seen before
    path = written(model, tmp_path)
    require_survived(path)
    monkeypatch.setattr(CHILD, _no_child)
    require_survived(path)  # by this process
    monkeypatch.setattr(REMEMBERED, {})
    require_survived(path)  # by an earlier one
    model.entries.append(Entry(b"llama.another_one", UINT32, 1))
    with pytest.raises(AssertionError, match="a child"):
        require_survived(written(model, tmp_path))


def test_the_order_in_which_a_pass_reads_is_seen_while_vetting(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(smol_path)
    model.entries.append(Entry(b"general.description", STRING, f"{tmp_path} order".encode()))
    path = written(model, tmp_path)
    headers = ModelFiles.of(read_header(path)).headers
    assert reading_order(headers) == ()
    require_survived(path)
    order = reading_order(headers)
    matrices = [t.name for t in headers[0].tensors if len(t.shape) == 2 and t.name.startswith("blk.")]
    assert sorted(name for name in order if name in matrices) == sorted(matrices)
    kinds = [name.split(".")[2] for name in order if name.startswith("blk.0.") and name in matrices]
    assert sorted(kinds[:3]) == ["attn_k", "attn_q", "attn_v"]
    assert kinds[3] == "attn_output"
    assert kinds[-1] == "ffn_down"
    monkeypatch.setattr(vetting, "_orders", {})
    assert reading_order(headers) == order  # as another process sees it


# Familiar settings with values over which llama.cpp aborts, and no check of the header knows them.
ABORTS: list[tuple[str, int, bytes | int]] = [("rope.scaling.type", STRING, b"silu")]


@pytest.mark.parametrize(("key", "kind", "value"), ABORTS)
def test_no_way_to_a_model_ends_this_process(
    smol_path: Path, tmp_path: Path, key: str, kind: int, value: bytes | int
) -> None:
    model = small_model(smol_path)
    model.entries.append(Entry(f"llama.{key}".encode(), kind, value))
    path = written(model, tmp_path)
    header = read_header(path)
    expected = re.escape(f"llama.cpp fails to load {path} (abort)")
    ways: list[Callable[[], object]] = [
        lambda: edgespec.load(path),
        lambda: edgespec.load(smol_path, draft=path),
        lambda: examine_pair(str(smol_path), str(path), measure_agreement=False),
        lambda: AllocationStore(tmp_path).get(header, [Shape(256, 64, 64, 1)]),
        lambda: Model(path, vocabulary_only=True),
    ]
    for way in ways:
        with pytest.raises(ModelFileError, match=expected):
            way()


def test_a_model_over_which_only_computing_aborts_is_refused(smol_path: Path, tmp_path: Path) -> None:
    # A hybrid whose first layer with attention was cut off: llama.cpp plans its memory, and aborts in use.
    path = written(tiny_model("qwen3next", smol_path, tmp_path), tmp_path)
    Model(path, allocate=False, repack=False, vetted=False).close()
    with pytest.raises(ModelFileError, match="abort"):
        Model(path)


def test_a_file_that_changes_is_tried_again(smol_path: Path, tmp_path: Path) -> None:
    model = small_model(smol_path)
    path = written(model, tmp_path)
    require_survived(path)
    model.entries.append(Entry(b"llama.rope.scaling.type", STRING, b"silu"))
    with pytest.raises(ModelFileError, match="abort"):
        require_survived(written(model, tmp_path))


def _no_child(*_args: object, **_options: object) -> None:
    raise AssertionError("a child process was started")


def test_names_from_a_file_are_not_taken_for_a_lack_of_memory(smol_path: Path, tmp_path: Path) -> None:
    name = "failed to allocate"
    path = written(of_architecture(small_model(smol_path), name), tmp_path)
    path = path.rename(tmp_path / f"{name}: insufficient memory.gguf")
    with pytest.raises(ModelFileError, match=f"unknown model architecture: '{name}'"):
        Model(path)


@pytest.mark.parametrize(
    "line",
    [
        "alloc_tensor_range: failed to allocate CPU buffer of size 1099511627776",
        "llama_model_load: error loading model: unable to allocate CPU buffer",
        "llama_model_load: error loading model: mmap failed: Cannot allocate memory",
        "ggml_aligned_malloc: insufficient memory (attempted to allocate 1048576.00 MB)",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9 MiB on device 0: cudaMalloc failed: "
        "out of memory",
        "llama_model_load: error loading model: std::bad_alloc",
    ],
)
def test_a_lack_of_memory_is_recognized(line: str) -> None:
    assert LogLines(["a warning before", line]).memory_ran_out
