"""The child's part of reading an image: decode it, and turn it into embeddings with a model's projector.

Run by `processes.trial` for `images.reader`. Only child processes load Pillow and llama.cpp's library for
images, mtmd: they decode what strangers made, with limits on memory and time.
"""

from __future__ import annotations

import base64
import ctypes
import io
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from edgespec.base.prebuilt import VARIABLE as LLAMA_CPP_FOLDER
from edgespec.kernels.bindings import llama_cpp, without_classes
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.model import Model
from edgespec.printable import one_line
from edgespec.processes.limits import limited_memory, limited_time

FOLDER = "MTMD_CPP_LIB"  # where the bindings look for it


class NoImageLibrary(Exception):
    """llama.cpp was compiled without the part that reads images, or it cannot be loaded."""


def load_library() -> ModuleType:
    """The bindings of the library, which is beside llama.cpp's own unless a person names another folder.

    Raises:
        NoImageLibrary: it is not there.
    """
    if FOLDER not in os.environ and LLAMA_CPP_FOLDER in os.environ:
        os.environ[FOLDER] = os.environ[LLAMA_CPP_FOLDER]
    try:
        with without_classes():
            from llama_cpp import mtmd_cpp
    except (OSError, RuntimeError, AttributeError) as error:  # whatever loading a library raises
        raise NoImageLibrary(str(error)) from error
    return mtmd_cpp


_FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")  # of the many that Pillow reads
Image.MAX_IMAGE_PIXELS = None  # the limits of the caller apply instead


class DamagedImage(Exception):
    """An image cannot be decoded."""


class ImageTooLarge(Exception):
    """An image has too many pixels, or none.

    Attributes:
        size: width and height in pixels.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__(size)
        self.size = size


def decode(data: bytes, *, max_side: int, max_pixels: int) -> NDArray[np.uint8]:
    """(height, width, 3) the first picture of a file, upright, in RGB without transparency.

    Args:
        max_side: most pixels of width and height.
        max_pixels: most pixels of the picture.

    Raises:
        DamagedImage: it is incomplete, damaged, or needs more memory than this process may take.
        ImageTooLarge: it exceeds the limits.
    """
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            sides_fit = 0 < min(width, height) <= max(width, height) <= max_side
            if not sides_fit or width * height > max_pixels:
                raise ImageTooLarge(image.size)
            image.load()
            with suppress(Exception):  # a picture whose EXIF is damaged is shown as it is stored
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I"):  # 16 bits of grey, which `convert` would cut off at 255
                return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
            return np.array(image.convert("RGB"))
    except ImageTooLarge:
        raise
    except Exception as error:  # whatever Pillow's parsers raise
        raise DamagedImage from error


_ERROR_LEVEL = 4  # ggml_log_level
_DECODING_BYTES = 2 << 30  # 64 million pixels of up to 8 bytes, in several copies

_errors: list[str] = []  # lines of the library's log


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_errors(level: int, text: bytes, _data: object) -> None:
    if level == _ERROR_LEVEL:
        _errors.append(one_line(text.decode("utf-8", "replace").strip()).rstrip("."))


start_backend()
mtmd: Any = None
with suppress(NoImageLibrary):
    mtmd = load_library()
    mtmd.mtmd_helper_log_set(_keep_errors, None)


class _UnknownPositions(Exception):
    """The rows of an image have positions of another kind than those that are known."""


class _Refused(Exception):
    """The image cannot be read; the text says why."""


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the image "data", in Base64, with the "projector" of the "model".

    Args:
        request: also has the "threads" to compute with, "max_tokens", "max_pixels" and "max_side" of the
            image, and "decoding_s", the most processor time to decode it in.

    Returns:
        The "pieces" that stand for the image in a prompt, in order: lists of tokens, and mappings with the
        number of "rows", the "positions" that they take, and for M-RoPE their "places" in the image: height
        and width of each, in one list. The "rows" of all pieces are 32-bit numbers in Base64, and "causal"
        says what each of them may see. If that is not possible, "why" is one
        of "library", "damaged", "mrope", "tokens" and "size", or there is an "error" of llama.cpp.
    """
    if mtmd is None:
        return {"why": "library"}
    try:
        # A few bytes may unpack to gigabytes, or take hours.
        with limited_memory(_DECODING_BYTES), limited_time(request["decoding_s"]):
            data = base64.b64decode(request["data"])
            pixels = decode(data, max_side=request["max_side"], max_pixels=request["max_pixels"])
        with Model(Path(request["model"]), allocate=False, repack=False, vetted=False) as model:
            return _read(model, pixels, request)
    except ImageTooLarge as large:
        return {"why": "size", "size": large.size}
    except _UnknownPositions:
        return {"why": "mrope"}
    except DamagedImage:
        return {"why": "damaged"}
    except _Refused as refused:
        return {"error": _errors[0] if _errors else str(refused)}


def _read(model: Model, pixels: NDArray[np.uint8], request: Mapping[str, Any]) -> Mapping[str, Any]:
    params = mtmd.mtmd_context_params_default()
    params.use_gpu = params.print_timings = params.warmup = False
    params.n_threads = request["threads"]
    context = mtmd.mtmd_init_from_file(os.fsencode(request["projector"]), model.handle, params)
    if not context:
        raise _Refused("the projector cannot be loaded")
    if not mtmd.mtmd_support_vision(context):
        raise _Refused("the projector reads no images")
    chunks = _chunks_of(context, pixels)
    n_tokens = sum(mtmd.mtmd_input_chunk_get_n_tokens(chunk) for chunk in chunks)
    if n_tokens > request["max_tokens"]:
        return {"why": "tokens", "tokens": n_tokens}
    pieces: list[list[int] | Mapping[str, Any]] = []
    rows: list[NDArray[np.float32]] = []
    causal = True
    for chunk in chunks:
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            pieces.append(_tokens_of(chunk))
            continue
        rows.append(_embedded(context, chunk, model.input_width))
        pieces.append({"rows": len(rows[-1]), **_positions_of(context, chunk)})
        causal = not mtmd.mtmd_decode_use_non_causal(context, chunk)
    data = base64.b64encode(np.concatenate(rows).tobytes()).decode()
    return {"pieces": pieces, "rows": data, "width": model.input_width, "causal": causal}


def _chunks_of(context: Any, pixels: NDArray[np.uint8]) -> list[Any]:
    """The parts of the prompt that stand for an image."""
    height, width, _ = pixels.shape
    data = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    bitmap = mtmd.mtmd_bitmap_init(width, height, data)
    chunks = mtmd.mtmd_input_chunks_init()
    marker = mtmd.mtmd_default_marker()
    text = mtmd.mtmd_input_text(marker, len(marker), False, True)
    bitmaps = (ctypes.c_void_p * 1)(bitmap)
    if mtmd.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1):
        raise _Refused("it cannot be divided for the projector")
    return [mtmd.mtmd_input_chunks_get(chunks, n) for n in range(mtmd.mtmd_input_chunks_size(chunks))]


def _tokens_of(chunk: Any) -> list[int]:
    count = ctypes.c_size_t()
    found = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
    tokens = [int(token) for token in found[: count.value]]
    if min(tokens, default=0) < 0:  # that is how the library says that it has not found a token
        raise _Refused("the model has no tokens for what stands around its images")
    return tokens


def _positions_of(context: Any, chunk: Any) -> Mapping[str, Any]:
    """The positions of the rows of a part of an image."""
    taken = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
    if not mtmd.mtmd_decode_use_mrope(context):
        return {"positions": taken}
    image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
    count = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
    found = [mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, row) for row in range(count)]
    places = [(place.y, place.x) for place in found]
    # All rows must have one position in time, and the text behind must come after all of them.
    if any(place.t or place.z for place in found) or max(map(max, places)) >= taken:
        raise _UnknownPositions
    return {"positions": taken, "places": [number for place in places for number in place]}


def _embedded(context: Any, chunk: Any, width: int) -> NDArray[np.float32]:
    """(rows, width) the embeddings of a part of an image."""
    if mtmd.mtmd_encode_chunk(context, chunk):
        raise _Refused("the projector fails on it")
    n_rows = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
    values = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(context), (n_rows, width)).copy()
    if not np.isfinite(values).all():
        raise _Refused("the projector gives numbers that are not finite")
    return values
