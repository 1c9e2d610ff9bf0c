"""The layout of layers and experts in files, and the places of their tensors in a slot."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from pathlib import Path

from edgespec.files.positioned import BLOCK
from edgespec.models.gguf.experts import LayerExperts
from edgespec.models.gguf.layers import FileTensor, Layer, ModelFiles

PIECE_BYTES = 4 << 20  # of one read
N_READERS = 2
READS_AHEAD = 4  # that keep a disk busy: one under way for each reader, and one to follow it
PART_BYTES = READS_AHEAD * PIECE_BYTES  # of which layers need not be divided further
# Of one read of an expert: several must be under way at once, although a pass often misses only one or two.
EXPERT_PIECE_BYTES = 1 << 20

Home = tuple[int, int]  # a file's number, and a byte's offset in it

_GAP = 64 << 10  # tensors further apart than this are read separately


@dataclass(frozen=True, slots=True)
class Piece:
    """One read: `n_bytes` from `offset` of a file to byte `at` of the layer's slot.

    All three are multiples of a block; the last piece of a file may extend beyond its end. `checksum` is that
    of the bytes read, or None.
    """

    file: int
    offset: int
    at: int
    n_bytes: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """One read into a slot of which all bytes, or some, belong there."""

    # what is read. It may begin before the wanted bytes and end after them, and `at` is where the whole piece
    # would begin in the slot.
    piece: Piece
    # the piece's bytes that are wanted
    first: int
    last: int

    @classmethod
    def of(cls, piece: Piece) -> Read:
        return cls(piece, 0, piece.n_bytes)

    @property
    def direct(self) -> bool:
        """True if the piece can be read to its place; otherwise only its bytes may be moved there."""
        return self.piece.at % BLOCK == 0

    def continued_by(self, other: Read) -> bool:
        """True if another read begins in the file where this one ends, so that both can be one."""
        piece, next_piece = self.piece, other.piece
        return (
            self.direct
            and other.direct
            and piece.file == next_piece.file
            and piece.offset + piece.n_bytes == next_piece.offset
        )


@dataclass(frozen=True)
class StoredLayer:
    """The reads of a layer into a slot."""

    index: int
    pieces: tuple[Piece, ...]
    places: Mapping[str, int]  # tensor name to its offset in the slot
    n_bytes: int  # size of the slot it needs

    def only(self, names: Collection[str]) -> StoredLayer:
        """The reads that bring these tensors, and whatever shares a read with them."""
        if all(name in names for name in self.places):
            return self
        ends = [*sorted(self.places.values())[1:], self.n_bytes]
        ranges = [
            (start, end)
            for (name, start), end in zip(sorted(self.places.items(), key=itemgetter(1)), ends, strict=True)
            if name in names
        ]
        kept: list[Piece] = []
        places: dict[str, int] = {}
        size = 0
        for piece in sorted(self.pieces, key=attrgetter("at")):
            first, last = piece.at, piece.at + piece.n_bytes
            if any(start < last and first < end for start, end in ranges):
                for name, start in self.places.items():
                    if name in names and first <= start < last:
                        places[name] = size + start - first
                kept.append(replace(piece, at=size))
                size += piece.n_bytes
        return StoredLayer(self.index, tuple(kept), places, size)


@dataclass(frozen=True)
class ExpertRun:
    """Consecutive bytes that every expert of a layer has, at equal distances in one file."""

    file: int
    offset: int  # of the first expert's
    distance: int  # from one expert's to the next one's
    n_bytes: int  # of one expert's
    at: int  # where they belong in the slot


@dataclass(frozen=True)
class StoredExperts:
    """The reads of the experts of one layer, each into a slot of its own."""

    index: int
    n_experts: int
    runs: tuple[ExpertRun, ...]  # what an expert consists of
    places: Mapping[str, int]  # name of a stack to the offset of one expert's part in a slot
    n_bytes: int  # size of the slot that an expert needs
    # for each expert, those of its reads; empty if they are not known
    checksums: Sequence[Sequence[int]] = ()
    # for each expert, the file and offset of its reads, where they are spread over several files; otherwise
    # empty
    homes: Sequence[Sequence[Home]] = ()

    def reads(self, expert: int) -> tuple[Read, ...]:
        """The reads that bring one expert."""
        return tuple(self._reads(expert))

    def _reads(self, expert: int) -> Iterator[Read]:
        known = iter(self.checksums[expert]) if self.checksums else None
        homes = iter(self.homes[expert]) if self.homes else None
        for run in self.runs:
            begin = run.offset + expert * run.distance
            start = begin // BLOCK * BLOCK
            size = round_up(begin + run.n_bytes - start, BLOCK)
            for done in range(0, size, EXPERT_PIECE_BYTES):
                offset, n_bytes = start + done, min(EXPERT_PIECE_BYTES, size - done)
                checksum = next(known) if known is not None else None
                file, place = next(homes) if homes is not None else (run.file, offset)
                yield Read(
                    Piece(file, place, run.at + offset - begin, n_bytes, checksum),
                    first=max(begin - offset, 0),
                    last=min(begin + run.n_bytes - offset, n_bytes),
                )


@dataclass(frozen=True)
class Store:
    """The source of layers: the model's own files, or a packed file or its parts."""

    paths: tuple[Path, ...]
    layers: Mapping[int, StoredLayer]
    # tensor name to the name of the kernel layout it is stored in; plain tensors are absent
    kernels: Mapping[str, str]
    packed: bool
    # layer to its experts, where they are read one by one; they are not part of `layers` then
    experts: Mapping[int, StoredExperts] = field(default_factory=dict)
    spread: bool = False  # whether every file is on a disk of its own
    pack: Path | None = None  # the file with the index of packed layers; None for the model's own files

    @property
    def n_disks(self) -> int:
        """Disks that can be read at the same time, as far as that is known."""
        return len(self.paths) if self.spread else 1

    def disk_of(self, piece: Piece) -> int:
        return piece.file if self.spread else 0


def plain_store(files: ModelFiles, layers: Iterable[Layer], experts: Iterable[LayerExperts] = ()) -> Store:
    """The model's own files as a store."""
    return Store(
        files.paths,
        {layer.index: _stored(layer) for layer in layers},
        {},
        packed=False,
        experts={found.index: _stored_experts(found) for found in experts},
    )


def pieces(file: int, offset: int, at: int, n_bytes: int) -> tuple[Piece, ...]:
    """A range divided into reads."""
    return tuple(
        Piece(file, offset + done, at + done, min(PIECE_BYTES, n_bytes - done))
        for done in range(0, n_bytes, PIECE_BYTES)
    )


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


def _stored(layer: Layer) -> StoredLayer:
    """Reads of whole blocks that cover the layer, and where its tensors end up."""
    reads: list[Piece] = []
    places: dict[str, int] = {}
    at = 0
    for run in _runs(layer.tensors):
        start = run[0].offset // BLOCK * BLOCK
        size = round_up(run[-1].offset + run[-1].n_bytes - start, BLOCK)
        reads += pieces(run[0].file, start, at, size)
        for tensor in run:
            places[tensor.name] = at + tensor.offset - start
        at += size
    return StoredLayer(layer.index, tuple(reads), places, at)


def _stored_experts(experts: LayerExperts) -> StoredExperts:
    """Reads of whole blocks that cover one expert's part of each stack.

    If all parts of a stack begin equally far behind the beginning of a block, which they do where their size
    is a multiple of a block, they are read directly to their places.
    """
    runs: list[ExpertRun] = []
    places: dict[str, int] = {}
    end = 0
    for stack in experts.tensors:
        size = stack.n_bytes // experts.n_experts
        lead = stack.offset % BLOCK
        places[stack.name] = end + lead
        runs.append(ExpertRun(stack.file, stack.offset, size, size, at=end + lead))
        end += round_up(lead + size, BLOCK)
    return StoredExperts(experts.index, experts.n_experts, tuple(runs), places, end)


def _runs(tensors: tuple[FileTensor, ...]) -> list[list[FileTensor]]:
    """Groups of tensors that are close enough to be read together."""
    runs: list[list[FileTensor]] = []
    for tensor in tensors:
        last = runs[-1][-1] if runs else None
        if last and last.file == tensor.file and tensor.offset - last.offset - last.n_bytes <= _GAP:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs
