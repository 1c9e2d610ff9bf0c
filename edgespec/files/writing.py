"""Atomic writes: a file is complete or absent, whatever ends the program while it is written.

Small files are written to a temporary file and renamed (`atomic_write`). Large ones grow in a partial file
(`atomic_large_write`), which is removed whenever the program notices that it is ending; after a SIGKILL, the
next program that looks into the folder removes it (`remove_abandoned`). A symbolic link stays, and the file
that it leads to is replaced.

What a program writes over a longer time is locked (`only_writer`): a second one is refused with
BlockingIOError, which `unwritable` explains.
"""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from edgespec.errors import OutputError
from edgespec.files.sharing import lock, occupied, open_to_read, open_to_write, replace

_FULL_DISK = "Free some space on that disk."


@contextmanager
def atomic_write(path: Path, *, durable: bool = True, suffix: str = "") -> Iterator[IO[bytes]]:
    """A file to write to, which replaces `path` when the block ends.

    If the block raises, the file stays as it was. Only its owner can read the new one.

    Args:
        durable: wait for the disk, so that the file survives a power failure; not needed for what can be
            made again.
        suffix: of the temporary file's name, by which leftovers of killed writers can be found.

    Raises:
        OSError: as `require_replaceable`; or the folder does not exist, or cannot be written.
    """
    path = followed(path)
    require_replaceable(path)
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", suffix=suffix, delete=False
    ) as file:
        try:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            file.close()
            replace(Path(file.name), path)
        except BaseException:
            with suppress(OSError):  # what a full disk has no room for fails again
                file.close()
            with suppress(OSError):
                Path(file.name).unlink()
            raise


def followed(path: Path) -> Path:
    """The file that a path leads to through symbolic links; it need not exist."""
    return Path(os.path.realpath(path))


def require_replaceable(path: Path) -> None:
    """Refuse to put a file in the place of a device or a pipe: as root, /dev/null would be lost.

    Raises:
        OSError: there is one.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Keep other programs that ask the same from writing a file, which need not exist, during the block.

    Where no lock can be made beside an existing file, nothing is kept out.

    Raises:
        BlockingIOError: another program is writing it.
        OSError: there is no such folder, or nothing can be made in it.
    """
    from filelock import FileLock, Timeout

    path = followed(path)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    path.parent.stat()  # it would be made for the lock
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not path.exists() and not Path(lock.lock_file).exists():  # it hides why there can be none
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path)) from None
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path)) from None
    except OSError:
        if not path.exists():
            raise
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # Windows removes no open file
                Path(lock.lock_file).unlink()  # a program that has just opened it notices, and makes another
        lock.release()


@contextmanager
def writing_to(path: object, hint: str = "") -> Iterator[None]:
    """If the system refuses to write in this block, the error is one for people, about a path.

    Args:
        hint: as of `unwritable`.

    Raises:
        OutputError: the system does.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, error, hint) from error


def unwritable(path: object, error: OSError, hint: str = "") -> OutputError:
    """Make an error for people of one from the system.

    Args:
        path: what was to be written.
        hint: what to do about errors that do not say it themselves.
    """
    if isinstance(error, BlockingIOError):
        return OutputError(
            f"{path} is being written by another program.", "Wait for it, or choose another file."
        )
    if isinstance(error, FileNotFoundError) and isinstance(path, Path) and not path.parent.exists():
        return OutputError(f"{path} cannot be written: there is no folder {path.parent}.", "Create it first.")
    reason = error.strerror or error
    if isinstance(error, PermissionError) and os.path.isdir(str(path)):  # noqa: PTH112 (the other may raise)
        reason = os.strerror(errno.EISDIR)  # which Windows does not say
    return OutputError(f"{path} cannot be written: {reason}.", remedy(error, hint))


def remedy(error: OSError, otherwise: str) -> str:
    """Return what to do about an error of the system: free space on a full disk, or something else."""
    return _FULL_DISK if error.errno in (errno.ENOSPC, errno.EDQUOT) else otherwise


@contextmanager
def atomic_large_write(path: Path, partial: Path) -> Iterator[IO[bytes]]:
    """A partial file to write to, which replaces `path` when the block ends.

    If the block raises, or SIGTERM or SIGHUP ends the program, the partial file is removed and `path` stays
    as it was.

    Args:
        partial: the partial file; beside the file that `path` leads to (`followed`), with a name that
            `remove_abandoned` finds.

    Raises:
        BlockingIOError: another program is writing the partial file.
        OSError: as `require_replaceable`; or the folder does not exist, or cannot be written.
    """
    require_replaceable(path)
    with termination_raises(), open_locked(partial) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            replace(partial, followed(path))
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def open_locked(path: Path) -> IO[bytes]:
    """An empty file, locked for as long as it is open.

    `remove_abandoned` leaves locked files alone. The system drops the lock when the process ends, however it
    ends. Where the file system has no locks, nothing is removed.

    Raises:
        BlockingIOError: another program has it open.
        OSError: the file cannot be created.
    """
    while True:
        file = open(path, "wb", opener=open_to_write)  # noqa: SIM115 (whole: it may be another program's)
        try:
            locked = lock(file.fileno())
            if locked is None or path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                if locked is False:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
                file.truncate(0)
                return file
        except FileNotFoundError:
            pass  # another process took it for abandoned, and removed it before it was locked
        except BaseException:
            file.close()
            raise
        file.close()


def remove_abandoned(folder: Path, pattern: str = "*.partial") -> int:
    """Remove a folder's partial files whose writers have ended; returns the bytes that were freed."""
    freed = 0
    for path in folder.glob(pattern):
        with suppress(OSError), open(path, "rb", opener=open_to_read) as file:
            if lock(file.fileno()):
                freed += occupied(os.fstat(file.fileno()))
                path.unlink()
    return freed


def is_locked(path: Path) -> bool:
    """True if another program, or another place in this one, holds the lock of a file."""
    try:
        with path.open("rb") as file:
            return lock(file.fileno()) is False
    except OSError:
        return False


class _Ended(BaseException):
    """A signal has asked the program to end."""


@contextmanager
def termination_raises() -> Iterator[None]:
    """Raise an exception on SIGTERM, SIGHUP and SIGBREAK in this block, so that `finally` clauses run.

    At the end of the block the signal ends the program, as it would have at once. Signals that are ignored
    or have a handler are left alone. Outside the main thread, where Python delivers no signals, this does
    nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGTERM", "SIGHUP", "SIGBREAK")
    ending = [number for name in names if (number := getattr(signal, name, None)) is not None]
    ending = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
    came = 0

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = number
        for other in ending:  # a second signal must not interrupt the clean-up
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
