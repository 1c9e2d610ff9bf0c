"""Reads images: each becomes rows of embeddings, once, in a child process that holds the projector."""

from __future__ import annotations

import base64
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from edgespec.base.installation import install_command
from edgespec.base.option import named
from edgespec.errors import BackendError, ContextLengthError, EdgeSpecError, UsageError
from edgespec.images.file import MAX_PIXELS, MAX_SIDE, check_size
from edgespec.images.projector import find_projector, identity_of
from edgespec.images.rows import ImageRows, PlacedImage, placed_images
from edgespec.models.gguf.types import GGUFHeader
from edgespec.processes.trial import Verdict, attempt_in_child

_ENCODER = "edgespec.llama.projector"
_MAX_S = 3600.0  # of processor time: the largest projectors compute for minutes on small processors
_DECODING_S = 60.0  # of it, to decode the image
_STACK_BYTES = 8 << 20
_MAX_KEPT = 256 << 20  # bytes of embeddings

_may_read: ContextVar[bool] = ContextVar("may_read", default=True)


class UnreadImage(Exception):
    """An image would have to be read where that may not be waited for."""


@contextmanager
def without_reading() -> Iterator[None]:
    """Have `ImageReader.read` raise `UnreadImage` in this thread for images that were not read before."""
    token = _may_read.set(False)
    try:
        yield
    finally:
        _may_read.reset(token)


class ImageReader:
    """Reads images for one model, and keeps the embeddings of the latest ones in memory.

    Any thread may use it. One image is read at a time, with all threads of the processor.

    Args:
        model: the file of the target.
        projector: that of its projector; None for the one beside it.
        threads: to compute with.
        context: most tokens of a prompt.
    """

    def __init__(
        self,
        model: Path,
        projector: Path | None,
        *,
        threads: int,
        context: int,
    ) -> None:
        self._model = model
        self._given = projector
        self._threads = threads
        self._context = context
        self._read: OrderedDict[bytes, tuple[tuple[int, ...], list[ImageRows]]] = OrderedDict()
        # Rows by the first of their ids, for as long as anyone holds them.
        self._known: WeakValueDictionary[int, ImageRows] = WeakValueDictionary()
        self._lock = threading.Lock()  # of both
        self._reading = threading.Lock()

    @property
    def sees(self) -> bool:
        """True if the model has a projector, judging by the header of its file."""
        return bool(self.identity)

    @property
    def identity(self) -> str:
        """The identity of the projector's file; empty if there is none."""
        try:
            return identity_of(find_projector(self._model, self._given))
        except EdgeSpecError:
            return ""

    def require_projector(self) -> None:
        """Find the projector.

        Raises:
            UsageError: there is none, or there are several.
            ModelFileError: the one that was named is none any more.
        """
        find_projector(self._model, self._given)

    def read(self, data: bytes, name: str) -> tuple[int, ...]:
        """The tokens that stand for an image in a prompt; those of its rows are below zero.

        Args:
            data: an image that `check_image` has let pass.
            name: what it is called in messages.

        Raises:
            UsageError: it cannot be read with this model.
            ModelFileError: the projector that was named is none any more.
            ContextLengthError: it has more tokens than the context.
            InconclusiveTrial: the child process was killed, starved or refused memory.
            UnreadImage: it was not read before, and may not be read now; see `without_reading`.
        """
        header = find_projector(self._model, self._given)
        key = blake2b(f"{identity_of(header)}\0".encode() + data).digest()
        if (found := self._found(key)) is not None:
            return found
        if not _may_read.get():
            raise UnreadImage
        with self._reading:
            if (found := self._found(key)) is not None:  # meanwhile, by another thread
                return found
            tokens, images = self._encoded(data, name, header)
            with self._lock:
                # Rows that were forgotten here and are held elsewhere are taken again.
                self._read[key] = tokens, [self._known.setdefault(rows.ids[0], rows) for rows in images]
                self._forget_oldest()
            return tokens

    def placed(self, tokens: Sequence[int]) -> tuple[PlacedImage, ...]:
        """The images in a prompt that were read for it; whoever holds them may ask again.

        Raises:
            BackendError: the embeddings of one are not known any more.
        """
        try:
            with self._lock:
                return tuple(placed_images(tokens, self._known))
        except KeyError:
            raise BackendError("The embeddings of an image are not known.", "Ask again.") from None

    def knows(self, tokens: Sequence[int]) -> bool:
        """True if all ids below zero stand for images that were read."""
        try:
            self.placed(tokens)
        except BackendError:
            return False
        return True

    def _found(self, key: bytes) -> tuple[int, ...] | None:
        """The tokens of an image that was read."""
        with self._lock:
            if key not in self._read:
                return None
            self._read.move_to_end(key)
            return self._read[key][0]

    def _forget_oldest(self) -> None:
        """Keep what there is room for, and the latest image in any case."""
        room = _MAX_KEPT
        for key, (_, images) in reversed(list(self._read.items())):
            room -= sum(rows.values.nbytes for rows in images)
            if room < 0 and key != next(reversed(self._read)):
                del self._read[key]

    def _encoded(self, data: bytes, name: str, header: GGUFHeader) -> tuple[tuple[int, ...], list[ImageRows]]:
        request = {
            "model": str(self._model.absolute()),
            "projector": str(header.path.absolute()),
            "data": base64.b64encode(data).decode(),
            "threads": self._threads,
            "max_tokens": self._context,
            "max_pixels": MAX_PIXELS,
            "max_side": MAX_SIDE,
            "decoding_s": _DECODING_S,
        }
        verdict = attempt_in_child(
            _ENCODER, request, subject=f"Reading {name}", cpu_s=_MAX_S, stack_bytes=_STACK_BYTES
        )
        answer = verdict.answer
        if answer is None or "pieces" not in answer:
            raise self._failure(verdict, name, header.path)
        return _pieces_of(answer)

    def _failure(self, verdict: Verdict, name: str, projector: Path) -> EdgeSpecError:
        """The reason why there are no embeddings."""
        answer: Mapping[str, Any] = verdict.answer or {}
        match answer.get("why"):
            case "library":
                return UsageError(
                    "llama.cpp was compiled here without the part that reads images.",
                    f"Install it again: {install_command(rebuild=True)}",
                )
            case "mrope":
                return UsageError(
                    f"{self._model.name} gives the parts of an image positions of a kind that is not known.",
                    "Use another model, such as Qwen3-VL, SmolVLM or Gemma 3.",
                )
            case "tokens":
                return ContextLengthError(
                    f"{name} takes {answer['tokens']} tokens, but the context holds {self._context}.",
                    f"Make the image smaller, or raise {named('context')}.",
                )
            case "size":
                width, height = answer["size"]
                check_size(width, height, name)
            case "damaged":
                return UsageError(f"{name} is damaged or incomplete.", "Save or download it again.")
        if verdict.answer is None:
            fault = (
                "it takes too long"
                if verdict.why == "time"
                else f"its child process crashed ({verdict.detail})"
            )
            return UsageError(
                f"{name} cannot be read with {projector.name}: {fault}.",
                "Try another image, or get another conversion of the projector.",
            )
        return UsageError(f"{name} cannot be read with {projector.name}: {answer.get('error')}.")


def _pieces_of(answer: Mapping[str, Any]) -> tuple[tuple[int, ...], list[ImageRows]]:
    """The tokens that stand for an image, and its rows."""
    values = np.frombuffer(base64.b64decode(answer["rows"]), dtype="<f4").reshape(-1, answer["width"])
    tokens: list[int] = []
    images: list[ImageRows] = []
    at = 0
    for piece in answer["pieces"]:
        if isinstance(piece, dict):
            rows = values[at : at + piece["rows"]]
            places = piece.get("places")
            found = None if places is None else np.array(places, dtype=np.int32).reshape(-1, 2)
            images.append(ImageRows(rows, bool(answer["causal"]), found, piece["positions"]))
            tokens += images[-1].ids
            at += len(rows)
        else:
            tokens += piece
    return tuple(tokens), images
