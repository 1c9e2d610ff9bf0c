"""Files that are there whole or not at all, whatever ends the program while they are written.

Small ones are replaced as a whole (`written_whole`). Large ones grow under the name of a partial file, which
is removed on every way out that the program notices (`cleaned_up`), and by the next one that looks into the
folder where it did not (`remove_abandoned`).
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO


@contextmanager
def written_whole(path: Path, *, lasting: bool = True) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` when everything is in it and on the disk.

    If the block raises, `path` stays what it was. Only its owner can read the new file.

    Args:
        lasting: wait until the disk has it, so that it also outlasts a power failure; what can be had again
            need not.

    Raises:
        OSError: the folder is not there, or cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            if lasting:
                os.fsync(file.fileno())
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            file.close()
            with suppress(OSError):
                Path(file.name).unlink()
            raise


def open_claimed(path: Path) -> IO[bytes]:
    """A new file, marked as being written for as long as it is open.

    `remove_abandoned` leaves such a file alone. The mark is a lock that the system drops when the process
    ends, however it ends. File systems without locks have no marks, and nothing is removed there.

    Raises:
        OSError: the file cannot be made.
    """
    while True:
        file = path.open("wb")
        try:
            if _claim(file.fileno()) is None or path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except FileNotFoundError:
            pass  # it was taken for abandoned between these two lines
        except BaseException:
            file.close()
            raise
        file.close()


def remove_abandoned(folder: Path, pattern: str = "*.partial") -> int:
    """Remove the unfinished files of a folder whose writers are gone; returns the bytes that were freed."""
    freed = 0
    for path in folder.glob(pattern):
        with suppress(OSError):
            if os.name != "posix":  # there the system itself refuses to remove what somebody has open
                n_bytes = path.stat().st_size
                path.unlink()
                freed += n_bytes
                continue
            with path.open("rb") as file:
                if _claim(file.fileno()):
                    freed += os.fstat(file.fileno()).st_blocks * 512
                    path.unlink()
    return freed


def _claim(descriptor: int) -> bool | None:
    """Lock an open file: False if another process has it locked, None if it cannot be locked here."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


class _Ended(BaseException):
    """A signal asks the program to end."""


@contextmanager
def cleaned_up() -> Iterator[None]:
    """While this lasts, SIGTERM and SIGHUP raise an exception, so that what is unfinished gets removed.

    The program then ends by the signal, as it would have without this. A signal that is ignored, or that
    the program handles, is left as it is; so is everything outside the main thread, where Python delivers
    no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGTERM", "SIGHUP")
    ending = [number for name in names if (number := getattr(signal, name, None)) is not None]
    ending = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
    came = 0

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = number
        for other in ending:  # a second one must not end the cleaning up
            signal.signal(other, signal.SIG_IGN)
        raise _Ended

    for number in ending:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)
        if came:
            signal.raise_signal(came)
