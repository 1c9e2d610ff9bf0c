"""Images among the tokens of a sequence: rows of embeddings, decoded in passes of their own."""

from __future__ import annotations

from collections import abc

from edgespec.errors import UsageError
from edgespec.images.rows import PlacedImage
from edgespec.llama.cache.kv_cache import KVCache
from edgespec.llama.runtime.batch import EmbeddedBatch
from edgespec.llama.runtime.context import Context
from edgespec.option import named


def read_image(context: Context, cache: KVCache, image: PlacedImage) -> None:
    """Decode the rows of an image, the next ones of a sequence.

    They are always read from the first on and in the same pieces, with nothing beside them. So their keys and
    values depend on the image and on what is before it alone, whatever the row rule is.
    """
    rows, most = image.rows, context.n_rows
    if not rows.causal:
        context.set_causal(False)
    try:
        cache.reserve(len(rows))
        start = cache.positions.at(image.start)
        for first in range(0, len(rows), most):
            piece = rows.values[first : first + most]
            positions = rows.positions_from(start, first, first + len(piece))
            cache.append(EmbeddedBatch.of_rows(piece, positions, cache.open_paths))
    finally:
        if not rows.causal:
            context.set_causal(True)


def require_readable(context: Context, images: abc.Sequence[PlacedImage]) -> None:
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
