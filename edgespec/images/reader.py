"""Reads images: each becomes rows of embeddings, once, in a child process that holds the projector."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import BackendError, ContextLengthError, EdgeSpecError, ModelFileError, UsageError
from edgespec.images.file import MOST_PIXELS
from edgespec.images.projector import find_projector
from edgespec.images.rows import ImageRows, PlacedImage, placed_images
from edgespec.installation import install_command
from edgespec.models.gguf.types import GGUFHeader
from edgespec.processes.trial import Verdict, attempt_in_child

_ENCODER = "edgespec.llama.projector.encode"
_MOST_S = 3600.0  # of processor time: the largest projectors compute for minutes on small processors
_STACK_BYTES = 8 << 20
_MOST_KEPT = 256 << 20  # bytes of embeddings


class ImageReader:
    """Reads images for one model, and keeps the embeddings of the latest ones in memory.

    Args:
        model: the file of the target.
        projector: that of its projector; None for the one beside it.
        threads: to compute with.
        context: most tokens of a prompt.
    """

    def __init__(self, model: Path, projector: Path | None, *, threads: int, context: int) -> None:
        self._model = model
        self._given = projector
        self._threads = threads
        self._context = context
        self._read: OrderedDict[bytes, tuple[tuple[int, ...], list[ImageRows]]] = OrderedDict()

    def read(self, data: bytes, name: str) -> tuple[int, ...]:
        """The tokens that stand for an image in a prompt; those of its rows are below zero.

        Args:
            data: an image that `check_image` has let pass.
            name: what it is called in messages.

        Raises:
            UsageError: it cannot be read with this model.
            ModelFileError: the projector cannot be used.
            ContextLengthError: it has more tokens than the context.
            InconclusiveTrial: the child process was killed, starved or refused memory.
        """
        header = find_projector(self._model, self._given)
        key = blake2b(f"{header.path} {header.fingerprint}\0".encode() + data).digest()
        if key not in self._read:
            tokens, rows = self._encoded(data, name, header)
            self._read[key] = tokens, rows
            self._forget_oldest()
        self._read.move_to_end(key)
        return self._read[key][0]

    def placed(self, tokens: Sequence[int]) -> tuple[PlacedImage, ...]:
        """The images in a prompt that were read for it.

        Raises:
            BackendError: the embeddings of one are not known any more.
        """
        known = {rows.ids[0]: rows for _, images in self._read.values() for rows in images}
        try:
            return tuple(placed_images(tokens, known))
        except KeyError:
            raise BackendError("The embeddings of an image are not known.", "Ask again.") from None

    def _forget_oldest(self) -> None:
        """Keep what there is room for, and the latest image in any case."""
        room = _MOST_KEPT
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
            "most_tokens": self._context,
            "most_pixels": MOST_PIXELS,
        }
        verdict = attempt_in_child(
            _ENCODER, request, subject=f"Reading {name}", cpu_s=_MOST_S, stack_bytes=_STACK_BYTES
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
                    f"{self._model.name} gives each part of an image a position in two dimensions (M-RoPE), "
                    "which is not supported yet.",
                    "Use a model whose images have plain positions, such as SmolVLM, LLaVA or Gemma 3.",
                )
            case "tokens":
                return ContextLengthError(
                    f"{name} takes {answer['tokens']} tokens, but the context holds {self._context}.",
                    "Make the image smaller, or raise the context.",
                )
            case "pixels":
                return UsageError(f"{name} has too many pixels.", "Make the image smaller.")
        if verdict.answer is None:
            fault = "it does not finish" if verdict.why == "time" else verdict.detail
            return ModelFileError(
                f"{projector.name} fails on {name} ({fault}).",
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
        if isinstance(piece, int):
            images.append(ImageRows(values[at : at + piece], bool(answer["causal"])))
            tokens += images[-1].ids
            at += piece
        else:
            tokens += piece
    return tuple(tokens), images
