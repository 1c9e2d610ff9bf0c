"""Drafting from files: suffix arrays against sorting, retrieval against a naive search, and the index."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.base.progress import no_progress
from edgespec.drafters import folder_index
from edgespec.drafters.folder_index import open_corpus
from edgespec.errors import UsageError
from edgespec.files.cache_kind import CacheKind
from edgespec.files.secret import user_secret
from edgespec.speculation.drafters.proposing import ProposingDrafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.ranking import ProbabilityRanking
from edgespec.speculation.sources.corpus import BREAK, Corpus, CorpusBlock, FileSource, suffix_array
from tests.unit.privileges import unprivileged
from tests.unit.strategies import texts_of

_N_VOCAB = 256
_RANKING = ProbabilityRanking()  # nothing is ranked: there are no logits

tokens = st.lists(st.integers(-1, 2), max_size=80) | st.lists(st.integers(-1, 9), max_size=80)
texts = st.lists(st.integers(0, 2), min_size=1, max_size=20) | st.lists(
    st.integers(0, 9), min_size=1, max_size=20
)


def _block(tokens: Sequence[int]) -> CorpusBlock:
    array = np.array(tokens, dtype=np.int32)
    return CorpusBlock(array, suffix_array(array))


def _corpus(*blocks: Sequence[int]) -> Corpus:
    return Corpus([_block(block) for block in blocks], _N_VOCAB)


@given(tokens)
def test_suffixes_are_sorted(tokens: list[int]) -> None:
    """A shorter suffix comes before those that go on from it."""
    order = suffix_array(np.array(tokens, dtype=np.int32)).tolist()
    assert sorted(order) == list(range(len(tokens)))
    keys = [tokens[place : place + 32] for place in order]
    assert keys == sorted(keys)


def test_equal_tokens_are_sorted_in_reasonable_time() -> None:
    assert len(suffix_array(np.zeros(1 << 17, dtype=np.int32))) == 1 << 17


@given(st.lists(tokens, min_size=1, max_size=3), texts)
def test_finds_the_longest_ending_that_occurs(blocks: list[list[int]], text: list[int]) -> None:
    found = _corpus(*blocks).longest(text)
    windows = {tuple(b[i:j]) for b in blocks for i in range(len(b)) for j in range(i + 1, len(b) + 1)}
    endings = [n for n in range(1, min(len(text), 16) + 1) if tuple(text[-n:]) in windows]
    assert found == max(endings, default=0)


@given(st.lists(tokens, min_size=1, max_size=3), texts)
def test_finds_where_an_ending_occurs(blocks: list[list[int]], text: list[int]) -> None:
    corpus = _corpus(*blocks)
    length = corpus.longest(text)
    if not length:
        return
    found = Counter(
        tuple(tokens[place - length : place].tolist()) for tokens, place in corpus.places(text, length)
    )
    assert set(found) == {tuple(text[-length:])}
    everywhere = sum(
        block[i : i + length] == text[-length:] for block in blocks for i in range(len(block) - length + 1)
    )
    assert 1 <= found.total() <= everywhere
    if everywhere <= 64 // len(blocks):
        assert found.total() == everywhere


@given(tokens, texts)
def test_proposes_what_followed_there_and_nothing_beyond_a_file(tokens: list[int], text: list[int]) -> None:
    drafter = ProposingDrafter([FileSource(_corpus([*tokens, BREAK]))])
    drafted = set(texts_of(drafter.draft(text, TreeLimits(10_000, depth=4, leaves=10_000), _RANKING)))
    length = _corpus([*tokens, BREAK]).longest(text)
    expected: set[tuple[int, ...]] = {(text[-1],)}
    if length >= 2:
        for place in range(length, len(tokens) + 1):
            if tokens[place - length : place] == text[-length:]:
                for end in range(place, min(place + 4, len(tokens))):
                    if tokens[end] == BREAK:
                        break
                    expected.add((text[-1], *tokens[place : end + 1]))
    assert drafted == expected


def test_what_followed_more_often_comes_first() -> None:
    corpus = _corpus([1, 2, 7, BREAK, 1, 2, 8, BREAK, 1, 2, 7, BREAK])
    drafter = ProposingDrafter([FileSource(corpus)])
    assert set(texts_of(drafter.draft([5, 1, 2], TreeLimits(2), _RANKING))) == {(2,), (2, 7)}


def test_numbers_that_are_no_tokens_are_never_drafted() -> None:
    corpus = _corpus([1, 2, 3, _N_VOCAB, 4], [1, 2, -7, 5])
    drafter = ProposingDrafter([FileSource(corpus)])
    assert set(texts_of(drafter.draft([1, 2], TreeLimits(9), _RANKING))) == {(2,), (2, 3)}


class _Bytes:
    """A vocabulary whose tokens are bytes, and which counts what it is asked."""

    n_tokens = _N_VOCAB

    def __init__(self) -> None:
        self.asked: list[str] = []

    def tokenize(self, text: str, *, control: bool) -> list[int]:
        assert not control, "a file's text is not the template's"
        self.asked.append(text)
        return list(text.encode())


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "WIN_PD_OVERRIDE_LOCAL_APPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("the quick brown fox")
    (folder / "deep" / "b.md").write_text("the quick brown bear\n")
    (folder / "deep" / "picture").write_bytes(b"\x89PNG\0the quick brown hare")
    (folder / "latin").write_bytes("the quick brown \xe9lan".encode("latin-1"))
    (folder / ".hidden").write_text("the quick brown secret")
    (folder / "empty").write_text("")
    return folder


def _continued(corpus: Corpus, text: str, depth: int = 6) -> set[str]:
    """Drafts after a text."""
    drafter = ProposingDrafter([FileSource(corpus)])
    drafted = texts_of(drafter.draft(list(text.encode()), TreeLimits(200, depth=depth), _RANKING))
    longest = {path for path in drafted if not any(path == other[:-1] for other in drafted)}
    return {bytes(path[1:]).decode() for path in longest}


def test_text_files_are_read_and_nothing_else(folder: Path) -> None:
    corpus, notes = open_corpus(folder, _Bytes(), "v", no_progress)
    assert _continued(corpus, "a quick brown ") == {"fox", "bear\n"}
    assert not notes


def test_an_index_is_made_once_and_again_for_what_has_changed(folder: Path) -> None:
    vocabulary = _Bytes()
    open_corpus(folder, vocabulary, "v", no_progress)
    vocabulary.asked.clear()
    corpus, _ = open_corpus(folder, vocabulary, "v", no_progress)
    assert vocabulary.asked == []
    assert _continued(corpus, "quick brown ") == {"fox", "bear\n"}
    (folder / "a.txt").write_text("the quick brown badger")
    (folder / "c.txt").write_text("a quick brown owl")
    (folder / "deep" / "b.md").unlink()
    corpus, _ = open_corpus(folder, vocabulary, "v", no_progress)
    assert sorted(vocabulary.asked) == ["a quick brown owl", "the quick brown badger"]
    assert _continued(corpus, "s quick brown ") == {"badger", "owl"}
    del corpus  # Windows removes no file that is mapped
    (folder / "d.txt").write_text("one more")
    vocabulary.asked.clear()
    corpus, _ = open_corpus(folder, vocabulary, "v", no_progress)
    assert vocabulary.asked == ["one more"], "the others are taken from the old index"
    assert len(list(CacheKind.FILES.folder.iterdir())) == 1, "older ones were removed"
    assert _continued(corpus, "s quick brown ") == {"badger", "owl"}


def test_other_vocabularies_and_folders_have_indexes_of_their_own(folder: Path) -> None:
    for source, key in ((folder, "v"), (folder, "w"), (folder / "deep", "v"), (folder / "a.txt", "v")):
        open_corpus(source, _Bytes(), key, no_progress)
    assert len(list(CacheKind.FILES.folder.iterdir())) == 4
    corpus, _ = open_corpus(folder / "a.txt", _Bytes(), "v", no_progress)
    assert _continued(corpus, "quick brown ") == {"fox"}


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_only_the_owner_can_read_an_index(folder: Path) -> None:
    open_corpus(folder, _Bytes(), "v", no_progress)
    (path,) = CacheKind.FILES.folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=60).map(lambda data: data.replace(b"\0", b"")), min_size=1, max_size=12))
def test_blocks_hold_all_files_whatever_their_sizes(files: list[bytes]) -> None:
    """With blocks of 16 tokens, files end in, on and across their limits."""
    with (  # Windows removes no file that is mapped
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        for variable in ("XDG_CACHE_HOME", "WIN_PD_OVERRIDE_LOCAL_APPDATA"):
            patch.setenv(variable, f"{name}/cache")
        patch.setattr(folder_index, "_BLOCK_TOKENS", 16)
        source = Path(name) / "files"
        source.mkdir()
        for number, data in enumerate(files):
            (source / f"{number:02}").write_bytes(data)
        expected: list[int] = []
        for data in files:
            with contextlib.suppress(UnicodeDecodeError):
                expected += [*data.decode().encode(), BREAK] if data else []
        if not expected:
            with pytest.raises(UsageError, match="has no text files"):
                open_corpus(source, _Bytes(), "v", no_progress)
            return
        for _ in range(2):  # new, and from the old one's tokens
            corpus, _ = open_corpus(source, _Bytes(), "v", no_progress)
            blocks = corpus._blocks
            assert [token for block in blocks for token in block.tokens.tolist()] == expected
            assert all(len(block.tokens) == 16 for block in blocks[:-1])
            for block in blocks:
                assert block.suffixes.tolist() == suffix_array(block.tokens).tolist()
            (source / "99").write_bytes(b"z")
            expected += [ord("z"), BREAK]


def test_what_has_no_room_is_left_out_and_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_index, "_MAX_TOKENS", 30)
    corpus, notes = open_corpus(folder, _Bytes(), "v", no_progress)
    assert len(corpus) <= 30
    assert notes == [f"{folder} is too large: 1 of its 4 files are left out."]


def test_an_index_is_made_within_its_share_of_the_memory_budget(tmp_path: Path) -> None:
    class Words(_Bytes):
        n_tokens = 60_000

        def tokenize(self, text: str, *, control: bool) -> list[int]:
            rng = np.random.default_rng(len(text))
            return (1000 + rng.zipf(1.4, len(text) // 3) % 50_000).tolist()

    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("ab c\n" * 400_000 + "x" * number, newline="\n")
    tracemalloc.start()
    corpus, _ = open_corpus(tmp_path, Words(), "v", no_progress)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(corpus) > 1_300_000
    assert peak <= folder_index.MAKING_BYTES


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: b"?" + data[1:],
        lambda data: data[:-8] + b"\xff" * 8,
        lambda data: data.replace(b'"files"', b'"filas"'),
        lambda data: data.replace(b"[[", b"[{"),
    ],
)
def test_a_damaged_index_is_made_again(folder: Path, damage: object) -> None:
    open_corpus(folder, _Bytes(), "v", no_progress)
    (path,) = CacheKind.FILES.folder.iterdir()
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    corpus, _ = open_corpus(folder, _Bytes(), "v", no_progress)
    assert _continued(corpus, "a quick brown ") == {"fox", "bear\n"}


def test_what_people_can_get_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        open_corpus(tmp_path / "missing", _Bytes(), "v", no_progress)
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="has no text files"):
        open_corpus(tmp_path / "none", _Bytes(), "v", no_progress)
    (tmp_path / "binary").write_bytes(b"\0" * 100)
    with pytest.raises(UsageError, match="is not a text file that can be drafted from"):
        open_corpus(tmp_path / "binary", _Bytes(), "v", no_progress)
    (tmp_path / "some").write_text("text")
    (tmp_path / "blocked").write_text("no folder")
    for name in ("XDG_CACHE_HOME", "WIN_PD_OVERRIDE_LOCAL_APPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "blocked"))
    with pytest.raises(UsageError, match=r"cannot be written.* Allow writing there, or leave out draft_from"):
        open_corpus(tmp_path / "some", _Bytes(), "v", no_progress)


@pytest.mark.skipif(sys.platform == "win32", reason="no such permissions there")
@pytest.mark.parametrize("name", ["locked", "locked.txt"])
def test_what_cannot_be_read_is_no_source_without_text(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # not in the tests' own folder, which nobody else may enter
        Path(folder).chmod(0o755)
        path = Path(folder, name)
        if path.suffix:
            path.write_text("text")
        else:
            path.mkdir()
        path.chmod(0)
        with unprivileged(), pytest.raises(UsageError, match="cannot be read: Permission denied"):
            open_corpus(path, _Bytes(), "v", no_progress)
        path.chmod(0o700)


def test_everything_that_is_kept_can_be_deleted(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgespec.cli.main import main

    open_corpus(folder, _Bytes(), "v", no_progress)
    for kind, name in (
        (CacheKind.LEARNED, "pair.npz"),
        (CacheKind.PROMPTS, "0-8"),
        (CacheKind.PROMPTS, "1-8"),
        (CacheKind.TRIALS, "model.json"),
    ):
        kind.folder.mkdir(parents=True, exist_ok=True)
        (kind.folder / name).write_bytes(b"x")
    (CacheKind.FILES.folder / "killed.partial").write_bytes(b"x")
    secret = user_secret()
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(["config", "--forget"]) == 2, "nothing is deleted unasked"
    assert user_secret() == secret
    assert main(["config", "--forget", "--yes"]) == 0
    assert capsys.readouterr().out == (
        "Deleted: what was learned about 1 pair of models, 1 index of files, 2 states of prompts, "
        "and the outcomes of 1 trial load.\n"
    )
    assert not any(path.is_file() for kind in CacheKind for path in kind.folder.glob("*"))
    assert user_secret() != secret, "older copies of the cache folder say nothing any more"
    assert main(["config", "--forget", "--yes"]) == 0, "there is nothing left to delete, which is no error"
