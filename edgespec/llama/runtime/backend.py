"""llama.cpp's process-wide state: started once, and silenced. Each call keeps its own lines of the log."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from edgespec.base.prebuilt import wheel_in_use
from edgespec.kernels import ggml
from edgespec.kernels.bindings import llama_cpp
from edgespec.kernels.layouts import available_layouts, kernels_identity
from edgespec.printable import one_line

_INFO_LEVEL, _ERROR_LEVEL = 2, 4  # ggml_log_level
_KEPT_ERRORS = 8

# What llama.cpp and the system say of memory that cannot be had. What llama.cpp quotes is from the file.
_NO_MEMORY = re.compile(
    r"(failed|unable|cannot|attempted) to allocate|cannot allocate memory|allocation failed|bad_alloc"
    r"|out ?of ?(device|host|pool)? ?memory|insufficient memory|mmap failed|not enough space in the buffer"
    r"|failed to reserve memory",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'.*'", re.DOTALL)


def tells_of_memory(line: str) -> bool:
    """True if a line of llama.cpp's says that memory ran out."""
    return _NO_MEMORY.search(_QUOTED.sub("", line)) is not None


@dataclass
class LogLines:
    """Lines that llama.cpp logs during a block."""

    errors: list[str] = field(default_factory=list)  # the first error lines
    info: list[str] = field(default_factory=list)  # lines of information

    def add(self, level: int, text: str) -> None:
        """Keep a line, if its level is one of those that are kept."""
        if level == _ERROR_LEVEL and len(self.errors) < _KEPT_ERRORS:
            self.errors.append(text)
        elif level == _INFO_LEVEL:
            self.info.append(text)

    def cause(self) -> str:
        """The first error line; later ones only repeat it."""
        return one_line(self.errors[0]).rstrip(".") if self.errors else "no reason given"

    @property
    def memory_ran_out(self) -> bool:
        """True if an allocation has failed."""
        return any(map(tells_of_memory, self.errors))


# Those that are being kept for this thread, or for the one that it computes for.
_kept: ContextVar[tuple[LogLines, ...]] = ContextVar("kept log lines", default=())
_callback: Any = None  # C keeps only the address, so Python must keep the object


def start_backend() -> None:
    """Initialise llama.cpp once, and print its log nowhere.

    llama-cpp-python has the log printed when somebody else imports its classes later.
    """
    global _callback
    if _callback is not None:
        llama_cpp.llama_log_set(_callback, None)
        return

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def receive(level: int, text: bytes, _data: object) -> None:
        for lines in _kept.get():
            lines.add(level, text.decode("utf-8", "replace").strip())

    _callback = receive
    llama_cpp.llama_log_set(receive, None)
    llama_cpp.llama_backend_init()
    available_layouts()  # before llama.cpp reads the list of layouts, which it does once


@contextmanager
def log_lines() -> Iterator[LogLines]:
    """Yield what llama.cpp logs in this thread during the block."""
    start_backend()
    lines = LogLines()
    before = _kept.set((*_kept.get(), lines))
    try:
        yield lines
    finally:
        _kept.reset(before)


def build_identity() -> str:
    """The llama.cpp build, the CPU features it uses, and the kernel layouts in use, as one string.

    Libraries for several processors have another identity than those compiled here: the compiler may have
    ordered sums differently.

    Rounding and speed depend on these.
    """
    start_backend()
    features = llama_cpp.llama_print_system_info().decode()
    variant = ggml.cpu_variant()
    libraries = f" {variant} {_wheel_version()}".rstrip() if variant else ""
    return f"{llama_cpp.__version__}{libraries} {sys.platform} {features} {kernels_identity()}"


def _wheel_version() -> str:
    wheel = wheel_in_use()
    return wheel.version if wheel is not None else ""
