"""GGUF headers: real ones read right, anything else refused with a message and nothing else."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.errors import ModelFileError
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import BLOCK_SIZES, ArrayInfo, GGUFHeader
from tests.tiers import examples
from tests.tiny import finish
from tests.unit.privileges import unprivileged

AGAIN = "Download the file again."
U32, U64, STRING, ARRAY = 4, 10, 8, 9
in_one_folder = settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    common = BLOCK_SIZES.keys() & theirs.keys()
    assert len(common) > 30
    assert {kind: BLOCK_SIZES[kind] for kind in common} == {kind: theirs[kind] for kind in common}


@pytest.mark.slow
def test_a_real_header_is_what_the_gguf_package_reads(smol_path: Path) -> None:
    header = read_header(smol_path)
    theirs = gguf.GGUFReader(smol_path)
    assert [(t.name, t.shape, t.type_id, t.offset, t.n_bytes) for t in header.tensors] == [
        (t.name, tuple(map(int, t.shape)), int(t.tensor_type), t.data_offset, t.n_bytes)
        for t in theirs.tensors
    ]
    assert (header.data_offset, header.alignment) == (theirs.data_offset, theirs.alignment)
    fields = {name: f for name, f in theirs.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for name, field in fields.items():
        ours = header.metadata[name]
        if isinstance(ours, ArrayInfo):
            assert (ours.element_type, ours.length) == (field.types[1].name.lower(), len(field.data))
        else:
            assert ours == field.contents()


def test_the_properties_of_smollm2(smol_path: Path) -> None:
    header = read_header(smol_path)
    assert (header.version, header.architecture) == (3, "llama")
    assert (header.block_count, header.context_length) == (30, 8192)
    assert header.doubt_about(8192) == ""
    assert "was trained for 8192 tokens, and the context holds 8193" in header.doubt_about(8193)
    assert header.metadata["tokenizer.ggml.tokens"] == ArrayInfo("string", 49152)
    assert header.file_bytes == smol_path.stat().st_size
    assert header.tensor_bytes == sum(tensor.n_bytes for tensor in header.tensors)
    assert header.tensor_bytes < header.file_bytes - header.data_offset + 1


def test_the_large_vocabulary_of_gemma(gemma_path: Path) -> None:
    header = read_header(gemma_path)
    assert (header.architecture, header.block_count, header.context_length) == ("gemma3", 18, 32768)
    assert header.metadata["tokenizer.ggml.tokens"] == ArrayInfo("string", 262144)
    last = header.tensors[-1]
    assert len(header.tensors) == 236
    assert 0 <= header.file_bytes - (last.offset + last.n_bytes) < header.alignment


def test_the_fingerprint_covers_the_header_alone(tmp_path: Path) -> None:
    first = read_header(write(tmp_path / "a.gguf", build(data=b"\0" * 64)))
    second = read_header(write(tmp_path / "b.gguf", build(data=b"\1" * 64)))
    other = read_header(write(tmp_path / "c.gguf", build([text("general.architecture", "b")])))
    assert len(first.fingerprint) == 32
    assert first.fingerprint == second.fingerprint != other.fingerprint


# --- paths ---------------------------------------------------------------------------------------


def test_a_missing_file_suggests_its_neighbours(tmp_path: Path) -> None:
    for name in ("model-q4_0.gguf", "model-q8_0.gguf", "notes.txt"):
        (tmp_path / name).touch()
    path = tmp_path / "model-q4.gguf"
    refused(path, f"{path} does not exist.", "Did you mean model-q4_0.gguf or model-q8_0.gguf?")
    (tmp_path / "model-q4.gguf-folder.gguf").mkdir()
    unrelated = tmp_path / "qwen3-8b.gguf"
    refused(
        unrelated,
        f"{unrelated} does not exist.",
        "GGUF files there: model-q4_0.gguf, model-q8_0.gguf.",
    )
    lost = tmp_path / "nowhere" / "model.gguf"
    refused(lost, f"{lost} does not exist.", "Check the path.")


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    refused(tmp_path, f"{tmp_path} is a folder, not a model file.", "Name a .gguf file.")
    (tmp_path / "a.gguf").touch()
    refused(tmp_path, f"{tmp_path} is a folder, not a model file.", "GGUF files in it: a.gguf.")


@pytest.mark.skipif(sys.platform == "win32", reason="no such permissions or pipes there")
def test_unreadable_files_and_pipes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", build())
    path.chmod(0)
    with unprivileged():
        refused(path, f"{path} cannot be read: Permission denied.", "Check the path and its permissions.")
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    refused(pipe, f"{pipe} is not a regular file.", "Name a .gguf file.")
    nul = Path("a\0b.gguf")
    with pytest.raises(ModelFileError, match=r"cannot be read: embedded null"):
        read_header(nul)


def test_an_empty_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", b"")
    refused(path, f"{path} is empty.", AGAIN)


CONVERT = "Convert it with llama.cpp's convert_hf_to_gguf.py, or name a GGUF file."


@pytest.mark.parametrize(
    ("head", "looks", "hint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
         "it is a Git LFS pointer, without the model itself", "Fetch the model: git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "it is a web page, so the download went wrong",
         "Download the model again."),
        (struct.pack("<Q", 90) + b'{"__metadata__":', "it looks like safetensors", CONVERT),
        (b"PK\x03\x04rest", "it is a zip archive, perhaps a PyTorch checkpoint", CONVERT),
        (b"tjgg\1\0\0\0", "it is in the older GGML format", "Get a GGUF conversion of the model."),
        (b"GG", "it is a text file", "Name a GGUF file."),
        ("Buy m\u00fc".encode()[:-1], "it is a text file", "Name a GGUF file."),
        (b"\x1b[2Jabc", "it begins with b'\\x1b[2J'", "Name a GGUF file."),
    ],
)  # fmt: skip
def test_other_files_are_named(tmp_path: Path, head: bytes, looks: str, hint: str) -> None:
    path = write(tmp_path / "a.gguf", head)
    refused(path, f"{path} is not a GGUF file: {looks}.", hint)


@pytest.mark.parametrize(
    ("version", "what", "hint"),
    [
        (struct.pack("<I", 1), "has GGUF version 1; versions 2 and 3 can be read",
         "Get a newer conversion of the model."),
        (struct.pack("<I", 4), "has GGUF version 4; versions 2 and 3 can be read",
         "Update EdgeSpec, or get another conversion of the model."),
        (struct.pack(">I", 3), "is a big-endian GGUF file", "Get the little-endian file."),
    ],
)  # fmt: skip
def test_versions(tmp_path: Path, version: bytes, what: str, hint: str) -> None:
    path = write(tmp_path / "a.gguf", b"GGUF" + version + build()[8:])
    refused(path, f"{path} {what}.", hint)


# --- damage --------------------------------------------------------------------------------------

ARCHITECTURE = b"\x14\0\0\0\0\0\0\0general.architecture\x08\0\0\0\x01\0\0\0\0\0\0\0a"


def text(key: str, value: str) -> bytes:
    return string(key) + struct.pack("<I", STRING) + string(value)


def string(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def u32(key: str, value: int) -> bytes:
    return string(key) + struct.pack("<II", U32, value)


def array(key: str, kind: int, length: int, rest: bytes = b"") -> bytes:
    return string(key) + struct.pack("<IIQ", ARRAY, kind, length) + rest


def tensor(name: str = "t", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}q", len(shape), *shape)
    return string(name) + dims + struct.pack("<IQ", kind, offset)


def build(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    counts: tuple[int, int] | None = None,
    data: bytes = b"\0" * 256,
) -> bytes:
    entries = [ARCHITECTURE] if entries is None else entries
    tensors = [tensor()] if tensors is None else tensors
    counts = counts or (len(tensors), len(entries))
    header = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(entries + tensors)
    return header + b"\0" * (-len(header) % 32) + data


HUGE = 2**63
CASES: dict[str, tuple[bytes, str]] = {
    "tensor count": (
        build(counts=(HUGE, 1)),
        f"it claims {HUGE:,} tensors; at most 524,288 are allowed",
    ),
    "entry count": (
        build(counts=(1, HUGE)),
        f"it claims {HUGE:,} metadata entries; at most 65,536 are allowed",
    ),
    "empty key": (build([ARCHITECTURE, u32("", 1)]), "metadata key 1 is empty"),
    "key not text": (
        build([string(b"\xff") + struct.pack("<II", U32, 1)]),
        "metadata key 0 is not UTF-8",
    ),
    "key twice": (build([ARCHITECTURE, ARCHITECTURE]),
                  "metadata key 'general.architecture' appears twice"),
    "value type": (
        build([ARCHITECTURE, string("k") + struct.pack("<II", 13, 1)]),
        "metadata 'k' has unknown value type 13",
    ),
    "element type": (
        build([ARCHITECTURE, array("k", 99, 0)]),
        "metadata 'k' is an array of unknown value type 99",
    ),
    "nested": (
        build([ARCHITECTURE, array("k", ARRAY, 1)]),
        "metadata 'k' is an array of arrays, which llama.cpp does not read",
    ),
    "no architecture": (build([u32("k", 1)]), "its metadata has no general.architecture"),
    "architecture a number": (
        build([u32("general.architecture", 1)]),
        "its metadata has no general.architecture",
    ),
    "alignment 0": (
        build([ARCHITECTURE, u32("general.alignment", 0)]),
        "general.alignment is 0, which is not a power of two",
    ),
    "alignment 48": (
        build([ARCHITECTURE, u32("general.alignment", 48)]),
        "general.alignment is 48, which is not a power of two",
    ),
    "alignment text": (
        build([ARCHITECTURE, text("general.alignment", "32")]),
        "general.alignment has value type 8 instead of uint32",
    ),
    "tensor twice": (build(tensors=[tensor(), tensor(offset=32)]), "tensor 't' appears twice"),
    "long name": (
        build(tensors=[tensor("n" * 64)]),
        f"tensor '{'n' * 64}' has a name longer than 63 bytes",
    ),
    "name with escapes": (
        build(tensors=[tensor("\x1b[2J", kind=99)]),
        r"tensor '\x1b[2J' has unknown type 99",
    ),
    "no dimension": (build(tensors=[tensor(shape=())]), "tensor 't' has 0 dimensions"),
    "dimensions": (build(tensors=[tensor(shape=(1,) * 5)]), "tensor 't' has 5 dimensions"),
    "zero": (
        build(tensors=[tensor(shape=(8, 0))]),
        "tensor 't' has the impossible shape [8, 0]",
    ),
    "negative": (
        build(tensors=[tensor(shape=(-1,))]),
        "tensor 't' has the impossible shape [-1]",
    ),
    "overflow": (
        build(tensors=[tensor(shape=(2**32, 2**32))]),
        "tensor 't' has the impossible shape [4294967296, 4294967296]",
    ),
    "removed type": (build(tensors=[tensor(kind=4)]), "tensor 't' has unknown type 4"),
    "rows": (
        build(tensors=[tensor(shape=(40,), kind=2)]),
        "tensor 't' has rows of 40, no multiple of its block of 32",
    ),
    "misaligned": (
        build(tensors=[tensor(offset=8)]),
        "tensor 't' is at offset 8, no multiple of 32",
    ),
    "gap": (
        build(tensors=[tensor(offset=32)]),
        "tensor 't' leaves a gap: it is at offset 32 instead of 0",
    ),
    "overlap": (
        build(tensors=[tensor(shape=(16,)), tensor("u", offset=32)]),
        "tensor 'u' overlaps the one before it: it is at offset 32 instead of 64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named(tmp_path: Path, case: str) -> None:
    content, why = CASES[case]
    path = write(tmp_path / "a.gguf", content)
    refused(path, f"{path} is damaged: {why}.", AGAIN)


@pytest.mark.parametrize(
    ("content", "needed", "where"),
    [
        (b"GGUF", 8, "its version"),
        (build(counts=(500_000, 1)), 16_000_016, "its 500,000 tensors"),
        (build(counts=(1, 60_000)), 840_024, "its 60,000 metadata entries"),
        (build([struct.pack("<Q", HUGE) + b"k" * 20]), HUGE + 32, "metadata key 0"),
        (build([array("k", STRING, HUGE)]), 8 * HUGE + 49, "metadata 'k'"),
        (build([array("k", U64, HUGE)]), 8 * HUGE + 49, "metadata 'k'"),
        (build([array("k", STRING, 2, struct.pack("<Q", HUGE))]), HUGE + 65, "metadata 'k'"),
        (build(tensors=[tensor(shape=(1024,))]), 128 + 4096, "its tensors"),
    ],
)
def test_lengths_beyond_the_file(tmp_path: Path, content: bytes, needed: int, where: str) -> None:
    path = write(tmp_path / "a.gguf", content)
    what = (
        f"{path} is cut short or damaged: it has {len(content):,} bytes, "
        f"but its header requires at least {needed:,} ({where})."
    )
    refused(path, what, AGAIN)


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files")
def test_a_huge_sparse_file_does_not_keep_the_reader_busy(tmp_path: Path) -> None:
    # Zeros read as endless empty strings, and the file's size would justify 5e9 of them.
    path = tmp_path / "a.gguf"
    for kind, why in (
        (STRING, "metadata 'k' has 4,000,000,000 strings; at most 8,388,608 are allowed"),
        (U64, "metadata 'k' makes its header longer than 256 MiB"),
    ):
        write(path, build([ARCHITECTURE, array("k", kind, 4_000_000_000)]))
        os.truncate(path, 40 * 2**30)
        refused(path, f"{path} is damaged: {why}.", AGAIN)


def test_every_truncation_of_a_real_header_is_refused(smol_path: Path, tmp_path: Path) -> None:
    header = read_header(smol_path)
    with smol_path.open("rb") as file:
        content = file.read(header.data_offset)
    path = tmp_path / "a.gguf"
    for step in range(1, 51):
        size = len(content) * step // 50
        write(path, content[:size])
        with pytest.raises(ModelFileError, match=f"cut short or damaged: it has {size:,} bytes"):
            read_header(path)
    os.truncate(path, header.file_bytes - 1)
    what = (
        f"{path} is cut short or damaged: it has {header.file_bytes - 1:,} bytes, "
        f"but its header requires at least {header.file_bytes:,} (its tensors)."
    )
    refused(path, what, AGAIN)


# --- mutations -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with every kind of value, written by the gguf package."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_token_list(["a", "bc", "", "d" * 20])
    writer.add_array("a.numbers", [1, 2, 3])
    for name, shape in (("x.weight", (4, 64)), ("y.weight", (3, 8)), ("z", (5,))):
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    finish(writer)
    return path.read_bytes()


def test_the_written_file_is_read(written: bytes, tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "a.gguf", written))
    assert header.metadata["tokenizer.ggml.tokens"] == ArrayInfo("string", 4)
    assert header.metadata["a.numbers"] == ArrayInfo("int32", 3)
    assert (header.metadata["a.float"], header.metadata["a.bool"]) == (0.5, True)
    assert [tensor.shape for tensor in header.tensors] == [(64, 4), (8, 3), (5,)]


@in_one_folder
@given(flips=st.lists(st.integers(0, 2**20), min_size=1, max_size=4))
def test_flipped_bits(written: bytes, tmp_path: Path, flips: list[int]) -> None:
    content = bytearray(written)
    header_bits = 8 * (len(content) - 1300)  # the data takes about as much
    for flip in flips:
        bit = flip % header_bits
        content[bit // 8] ^= 1 << bit % 8
    read_or_refuse(tmp_path, bytes(content))


@in_one_folder
@given(
    place=st.integers(0, 2**20),
    value=st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]),
    width=st.sampled_from([4, 8]),
)
def test_extreme_numbers_anywhere(written: bytes, tmp_path: Path, place: int, value: int, width: int) -> None:
    content = bytearray(written)
    at = place % (len(content) - 1300)
    content[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    read_or_refuse(tmp_path, bytes(content))


@in_one_folder
@given(start=st.integers(4, 2**20), junk=st.binary(max_size=40), cut=st.integers(0, 40))
def test_spliced_bytes(written: bytes, tmp_path: Path, start: int, junk: bytes, cut: int) -> None:
    at = 4 + start % (len(written) - 4)
    read_or_refuse(tmp_path, written[:at] + junk + written[at + cut :])


# --- split models --------------------------------------------------------------------------------


def split_header(path: Path, number: int, count: int) -> GGUFHeader:
    entries = [ARCHITECTURE] if number == 0 else []
    entries += [u32("split.no", number), u32("split.count", count)]
    return read_header(write(path, build(entries)))


def test_a_whole_model_is_its_one_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", build())
    assert split_paths(read_header(path)) == (path,)


def test_the_parts_of_a_split_model(tmp_path: Path) -> None:
    paths = tuple(tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    headers = [split_header(path, number, 3) for number, path in enumerate(paths)]
    assert [header.architecture for header in headers] == ["a", "", ""]
    assert all(split_paths(header) == paths for header in headers)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-00006.gguf"
    with pytest.raises(ModelFileError) as caught:
        split_paths(split_header(path, 1, 6))
    assert caught.value.what == (
        f"{path} is part 2 of 6; missing: m-00001-of-00006.gguf, m-00003-of-00006.gguf, "
        "m-00004-of-00006.gguf and 2 more."
    )
    assert caught.value.hint == f"Put every part into {tmp_path}."


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00003.gguf", "m-00002-of-00002.gguf"])
def test_a_renamed_part(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ModelFileError) as caught:
        split_paths(split_header(path, 1, 3))
    assert caught.value.what == (f"{path} is part 2 of 3, but its name does not end in -00002-of-00003.gguf.")


# --- helpers -------------------------------------------------------------------------------------


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refused(path: Path, what: str, hint: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert (caught.value.what, caught.value.hint) == (what, hint)


def read_or_refuse(folder: Path, content: bytes) -> None:
    """A header that keeps its promise, or ModelFileError; anything else fails the test."""
    path = write(folder / "mutated.gguf", content)
    try:
        header = read_header(path)
    except ModelFileError:
        return
    end = header.data_offset
    for part in header.tensors:
        assert end <= part.offset
        end = part.offset + part.n_bytes
    assert end <= max(len(content), header.data_offset)
