"""The check that weights can be streamed on this system."""

from __future__ import annotations

from edgespec.files.positioned import can_read_at_offsets
from edgespec.kernels import ggml
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.kernels.watch import can_watch
from edgespec.llama.runtime.backend import start_backend


def check_supported() -> None:
    """Make sure that weights can be streamed on this system with this llama.cpp build.

    Raises:
        UnsupportedBuild: they cannot; the text says why.
    """
    if not can_read_at_offsets():
        raise UnsupportedBuild("this system lacks direct reads")
    if not can_watch():
        raise UnsupportedBuild("EdgeSpec's own library was not compiled")
    start_backend()
    ggml.check()
