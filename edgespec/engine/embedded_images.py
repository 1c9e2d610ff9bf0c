"""Images among the tokens of a sequence: rows of embeddings, decoded alone or together with the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.base.option import named
from edgespec.engine.sequence import TextSequence
from edgespec.errors import UsageError
from edgespec.images.rows import PlacedImage
from edgespec.llama.cache.kv_cache import KVCache
from edgespec.llama.runtime.batch import EmbeddedBatch, TokenRows
from edgespec.llama.runtime.context import Context


def decode_image(context: Context, cache: KVCache, image: PlacedImage, most: int | None = None) -> int:
    """Decode the rows of an image, the next ones of a sequence; returns how many.

    Unless `most` is given, they are always read in the same pieces, with nothing beside them. So their keys
    and values depend on the image and on what is before it alone, whatever the row rule is.

    Args:
        most: rows to decode now; None for all that are left.
    """
    rows, first = image.rows, cache.length - image.start
    end = len(rows) if most is None else min(first + most, len(rows))
    if not rows.causal:
        context.set_causal(False)
    try:
        cache.reserve(end - first)
        start = cache.positions.at(image.start)
        for at in range(first, end, context.n_rows):
            piece = rows.values[at : min(at + context.n_rows, end)]
            positions = rows.positions_from(start, at, at + len(piece))
            cache.append(EmbeddedBatch.of_rows(piece, positions, cache.open_paths))
    finally:
        if not rows.causal:
            context.set_causal(True)
    return end - first


def tokens_with_images(sequence: TextSequence, end: int, most: int) -> int:
    """Count the next tokens, up to `end`, that are read together: an image and the text around it.

    They fill one pass, or as many as the first image needs. Rows that see those behind them (without a causal
    mask) cannot be read with others.

    Args:
        most: rows of a pass.

    Returns:
        0 if there would be no image among them.
    """
    start = sequence.n_cached
    image = sequence.next_image(start)
    if image is None:
        return 0
    blind = (later.start for later in sequence.images if later.end > start and not later.rows.causal)
    passes = -(-(image.end - start) // most)
    stop = sequence.between_images(min(end, start + passes * most, *blind))
    return stop - start if stop >= image.end else 0


def decode_with_text(sequence: TextSequence, count: int, token_rows: TokenRows, most: int) -> None:
    """Decode the next tokens of a sequence, with embeddings in place of all of them, `most` in a pass.

    That gives the bits of passes of their own only where no number of rows changes any.
    """
    cache = sequence.kv_cache
    start = cache.length
    tokens = np.array(sequence.tokens[start : start + count], dtype=np.int64)
    is_text = tokens >= 0
    indexes = np.arange(start, start + count, dtype=np.int32)
    images = [image for image in sequence.images if image.end > start and image.start < start + count]
    positions = cache.positions.of(indexes)
    if sequence.images[0].rows.places is not None:
        positions = np.stack([positions, positions, positions, np.zeros_like(positions)])
    text = token_rows.read(tokens[is_text].tolist())
    values = np.empty((count, text.shape[1]), dtype=np.float32)
    values[is_text] = text
    for image in images:
        begin, end = max(image.start, start), min(image.end, start + count)
        first, last, place = begin - image.start, end - image.start, slice(begin - start, end - start)
        values[place] = image.rows.values[first:last]
        found = image.rows.positions_from(cache.positions.at(image.start), first, last)
        positions[..., place] = found.reshape(*positions.shape[:-1], last - first)
    cache.reserve(count)
    for first in range(0, count, most):
        piece = slice(first, first + most)
        batch = EmbeddedBatch.of_rows(values[piece], positions[..., piece].reshape(-1), cache.open_paths)
        cache.append(batch)


def require_readable(context: Context, images: Sequence[PlacedImage]) -> None:
    """Refuse images that cannot be read in a context.

    Raises:
        UsageError: one of them cannot.
    """
    most = context.n_rows
    for image in images:
        if not image.rows.causal and len(image.rows) > most:
            raise UsageError(
                f"An image takes {len(image.rows)} rows of one pass, and passes have {most} here.",
                f"Give the model more memory, or use {named('exact', False)}.",
            )
