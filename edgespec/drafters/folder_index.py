"""An index of a person's files, made once and mapped into memory: where `--draft-from` finds its drafts.

The index holds the files' tokens in blocks, each with a suffix array. It is made again when a file was added,
removed or changed; files that stayed as they were are not tokenized again. It is in the user's cache folder,
is readable by its owner alone, and says as much as the files themselves do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from edgespec.base.option import named
from edgespec.base.progress import Progress
from edgespec.errors import UsageError
from edgespec.files.cache_kind import CacheKind
from edgespec.files.user_folders import expanded
from edgespec.files.writing import atomic_large_write, remedy, remove_abandoned
from edgespec.speculation.sources.corpus import BREAK, Corpus, CorpusBlock, Tokens, suffix_array

MAKING_BYTES = 48 << 20  # of memory while an index is made; a block of tokens is sorted at a time

_MAGIC = b"EdgeSpec files1\n"  # its length keeps what follows aligned
_BLOCK_TOKENS = 1 << 19
_MAX_TOKENS = 8 << 20  # of an index: searches in more blocks would take a share of a pass that shows
_MAX_FILE_BYTES = 2 << 20  # of a file that is worth quoting from
_PEEKED = 1 << 13  # bytes in which a binary file shows that it is one
_MAX_FILES = 20_000


class Tokenizer(Protocol):
    """The part of a vocabulary that is needed."""

    @property
    def n_tokens(self) -> int: ...

    def tokenize(self, text: str, *, control: bool) -> list[int]: ...


@dataclass(frozen=True)
class _Stamp:
    """A file as it was when it was read: what changes when it changes."""

    name: str
    size: int
    changed_ns: int


def open_corpus(
    source: Path, vocabulary: Tokenizer, key: str, on_progress: Progress
) -> tuple[Corpus, list[str]]:
    """The index of a folder or a file, made or brought up to date if need be.

    Args:
        source: a folder, whose text files are read, those in folders below it included; or a file. Hidden
            files, links, binary files and those above 2 MiB are left out.
        key: the vocabulary, as what is remembered of it names it.

    Returns:
        The corpus, and what a person might want to know about it.

    Raises:
        UsageError: there is nothing to read, or it cannot be read, or the index cannot be written.
    """
    source = expanded(source)
    _require_readable(source)
    source = source.resolve()
    stamps = _stamps(source)
    if not stamps:
        raise _without_text(source)
    folder = CacheKind.FILES.folder
    name = _digest(f"{source} {key}")
    path = folder / f"{name}-{_digest(repr(stamps))}.index"
    index = _read(path)
    if index is None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_abandoned(folder)
            old = [other for other in folder.glob(f"{name}-*.index") if other != path]
            _make(path, source, stamps, _known_tokens(old), vocabulary, on_progress)
            for other in old:
                with contextlib.suppress(OSError):  # Windows removes none that a program has mapped
                    other.unlink()
        except OSError as error:
            raise UsageError(
                f"The index of {source} cannot be written to {folder}: {error.strerror or error}.",
                remedy(error, f"Allow writing there, or leave out {named('draft_from')}."),
            ) from error
        index = _read(path)
        if index is None:
            raise UsageError(
                f"The index of {source} disappeared.", "Check whether another program clears the cache."
            )
    if not index.blocks:
        raise _without_text(source)
    notes = []
    if index.left_out:
        notes.append(f"{source} is too large: {index.left_out} of its {len(stamps)} files are left out.")
    return Corpus(index.blocks, vocabulary.n_tokens), notes


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _require_readable(source: Path) -> None:
    """Refuse a folder or file that cannot be read; a file in the folder that cannot be is only left out."""
    try:
        if not source.exists():
            raise UsageError(
                f"{source} does not exist.", f"{named('draft_from')} takes a text file or a folder of them."
            )
        if source.is_dir():
            with os.scandir(source):
                pass
        elif source.is_file():  # opening a pipe would block
            with source.open("rb"):
                pass
    except OSError as error:
        raise UsageError(
            f"{source} cannot be read: {error.strerror}.", "Check the path and its permissions."
        ) from error


def _without_text(source: Path) -> UsageError:
    what = "has no text files" if source.is_dir() else "is not a text file that can be drafted from"
    return UsageError(f"{source} {what}.", f"{named('draft_from')} takes a text file or a folder of them.")


@dataclass(frozen=True)
class _Index:
    """An index, mapped into memory."""

    stamps: list[_Stamp]  # the files of the folder
    lengths: list[int]  # tokens of each file, the break behind it included; 0 for those that hold no text
    left_out: int  # files for which there was no room
    blocks: list[CorpusBlock]  # the tokens, and their suffix arrays

    def tokens(self) -> dict[_Stamp, list[Tokens]]:
        """The tokens of each file that holds text, in parts where a block ends within it."""
        found: dict[_Stamp, list[Tokens]] = {}
        place = 0
        for stamp, length in zip(self.stamps, self.lengths, strict=True):
            behind = place + length
            while place < behind:
                part = self.blocks[place // _BLOCK_TOKENS].tokens[place % _BLOCK_TOKENS :][: behind - place]
                found.setdefault(stamp, []).append(part)
                place += len(part)
        return found


def _stamps(source: Path) -> list[_Stamp]:
    """The files that could be read, by name."""
    if source.is_file():
        paths = [source]
    else:
        paths = []
        for folder, folders, files in os.walk(source):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            paths += [Path(folder) / name for name in sorted(files) if not name.startswith(".")]
            if len(paths) >= _MAX_FILES:
                break
    stamps = []
    for path in paths[:_MAX_FILES]:
        with contextlib.suppress(OSError):
            state = path.stat()
            if path.is_file() and not path.is_symlink() and 0 < state.st_size <= _MAX_FILE_BYTES:
                name = path.name if path == source else path.relative_to(source).as_posix()
                name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                stamps.append(_Stamp(name, state.st_size, state.st_mtime_ns))
    return stamps


def _tokens(path: Path, vocabulary: Tokenizer) -> Tokens:
    """A file's tokens and a break behind them; none if it is binary, empty or cannot be read."""
    try:
        data = path.read_bytes()
        text = "" if b"\0" in data[:_PEEKED] else data.decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        text = ""
    found = vocabulary.tokenize(text, control=False) if text else []
    return np.array([*found, BREAK] if found else [], dtype=np.int32)


def _known_tokens(paths: list[Path]) -> dict[_Stamp, list[Tokens]]:
    indexes = filter(None, map(_read, paths))
    return {stamp: parts for index in indexes for stamp, parts in index.tokens().items()}


def _make(
    path: Path,
    source: Path,
    stamps: list[_Stamp],
    known: dict[_Stamp, list[Tokens]],
    vocabulary: Tokenizer,
    on_progress: Progress,
) -> None:
    """Write an index. Blocks are sorted one after another, so that memory is bounded."""
    lengths: list[int] = []
    total = left_out = read = 0
    pending: list[Tokens] = []
    in_all = sum(stamp.size for stamp in stamps)
    partial = path.with_suffix(".partial")
    with atomic_large_write(path, partial) as file:
        partial.chmod(0o600)
        file.write(_MAGIC)
        for stamp in stamps:
            on_progress("Indexing files to draft from", read / in_all)
            read += stamp.size
            place = source if source.is_file() else source / stamp.name
            parts = known.get(stamp) or [_tokens(place, vocabulary)]
            length = sum(map(len, parts))
            if total + length > _MAX_TOKENS:
                left_out += 1
                length, parts = 0, []
            lengths.append(length)
            total += length
            pending = _write_full_blocks(file, [*pending, *parts])
        _write_block(file, np.concatenate([np.zeros(0, dtype=np.int32), *pending]))
        described = json.dumps(
            {
                "files": [[stamp.name, stamp.size, stamp.changed_ns] for stamp in stamps],
                "lengths": lengths,
                "left_out": left_out,
            }
        ).encode()
        file.write(described)
        file.write(len(described).to_bytes(8, "little"))
    on_progress("Indexing files to draft from", 1.0)


def _write_full_blocks(file: IO[bytes], pending: list[Tokens]) -> list[Tokens]:
    """Write as many blocks as there are tokens for; returns the rest."""
    if sum(map(len, pending)) < _BLOCK_TOKENS:
        return pending
    tokens = np.concatenate(pending)
    while len(tokens) >= _BLOCK_TOKENS:
        _write_block(file, tokens[:_BLOCK_TOKENS])
        tokens = tokens[_BLOCK_TOKENS:]
    return [tokens]


def _write_block(file: IO[bytes], tokens: Tokens) -> None:
    file.write(np.ascontiguousarray(tokens).tobytes())
    file.write(suffix_array(tokens).tobytes())


def _read(path: Path) -> _Index | None:
    """An index from its file; None if there is none, or it is damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            file.seek(size - 8)
            described_bytes = int.from_bytes(file.read(8), "little")
            end = size - 8 - described_bytes
            if end < len(_MAGIC):
                return None
            file.seek(end)
            described = json.loads(file.read(described_bytes))
        stamps = [_Stamp(str(name), int(n), int(ns)) for name, n, ns in described["files"]]
        lengths = [int(length) for length in described["lengths"]]
        total = sum(lengths)
        if len(lengths) != len(stamps) or min(lengths, default=0) < 0 or end - len(_MAGIC) != 8 * total:
            return None
        data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        blocks: list[CorpusBlock] = []
        place = len(_MAGIC)
        while total:
            length = min(total, _BLOCK_TOKENS)
            parts = (np.frombuffer(data, np.int32, length, place + 4 * length * part) for part in (0, 1))
            blocks.append(CorpusBlock(*parts))
            place += 8 * length
            total -= length
        return _Index(stamps, lengths, int(described["left_out"]), blocks)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
