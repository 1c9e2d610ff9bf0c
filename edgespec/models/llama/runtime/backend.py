"""llama.cpp's process-wide state: started once, silenced, its log kept for error messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp

from edgespec.kernels.layouts import available_layouts, kernels_identity
from edgespec.printable import one_line

_INFO_LEVEL, _ERROR_LEVEL = 2, 4  # ggml_log_level
_KEPT_ERRORS = 8

# What llama.cpp and the system say of memory that cannot be had. What llama.cpp quotes is from the file.
_NO_MEMORY = re.compile(
    r"(failed|unable|cannot|attempted) to allocate|cannot allocate memory|allocation failed|bad_alloc"
    r"|out of memory|insufficient memory|mmap failed|not enough space in the buffer|failed to reserve memory",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'.*'", re.DOTALL)


class _Log:
    """llama.cpp's log: printed nowhere, with its first error lines kept for messages."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.info: list[str] | None = None  # collected while `info_lines` is active
        self._callback: Any = None

    def install(self) -> None:
        if self._callback is not None:
            return

        @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
        def receive(level: int, text: bytes, _data: object) -> None:
            if level == _ERROR_LEVEL and len(self.errors) < _KEPT_ERRORS:
                self.errors.append(text.decode("utf-8", "replace").strip())
            elif level == _INFO_LEVEL and self.info is not None:
                self.info.append(text.decode("utf-8", "replace").strip())

        self._callback = receive  # C keeps only the address, so Python must keep the object
        llama_cpp.llama_log_set(receive, None)
        llama_cpp.llama_backend_init()
        available_layouts()  # before llama.cpp reads the list of layouts, which it does once

    def cause(self) -> str:
        """The first error line since `errors` was cleared; later ones only repeat it."""
        return one_line(self.errors[0]).rstrip(".") if self.errors else "it gave no reason"

    @property
    def memory_ran_out(self) -> bool:
        """True if an allocation has failed."""
        return any(_NO_MEMORY.search(_QUOTED.sub("", line)) for line in self.errors)


log = _Log()


def start_backend() -> None:
    """Initialise llama.cpp once and silence its log."""
    log.install()


@contextmanager
def info_lines() -> Iterator[list[str]]:
    """The lines that llama.cpp logs during the block; for one thread at a time."""
    start_backend()
    lines = log.info = []
    try:
        yield lines
    finally:
        log.info = None


def build_identity() -> str:
    """The llama.cpp build, the CPU features it uses, and the kernel layouts in use, as one string.

    Rounding and speed depend on these.

    Raises:
        UsageError: EDGESPEC_KERNELS cannot be obeyed.
    """
    start_backend()
    features = llama_cpp.llama_print_system_info().decode()
    return f"{llama_cpp.__version__} {sys.platform} {features} {kernels_identity()}"
