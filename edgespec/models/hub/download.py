"""Downloads files of a repository into the Hub's cache; resumes interrupted downloads and verifies checksums.

The session, the locks and the layout of the cache are those of huggingface-hub. The transfer itself is
implemented here, because the library's starts over after a kill, waits silently, checks only lengths, and
needs HEAD requests and headers that some mirrors lack. A file is written beside its place in the cache under
a temporary name, renamed once its checksum is verified, and linked into the snapshot.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedRandom
from pathlib import Path

from edgespec.base.progress import Progress
from edgespec.base.units import readable, readable_time
from edgespec.errors import HubError, OutputError
from edgespec.models.hub.cache import blobs_folder, link_blob, make_newest, snapshot_folder
from edgespec.models.hub.file_requests import described, request_bytes
from edgespec.models.hub.repository import Hub, HubFile, Repository, translated

_ATTEMPTS = 5  # in a row without a new byte
_LONGEST_WAIT = 300  # seconds; a longer wait is reported as an error at once
_CHUNK = 1 << 20
_SPARE_DISK = 64 << 20
_BUSY = (408, 429, 500, 502, 503, 504)
_BEYOND_THE_END = 416


def download(
    hub: Hub, repository: Repository, files: Sequence[HubFile], on_progress: Progress | None = None
) -> list[Path]:
    """Download the files that are missing in the cache; returns all their paths there, in order.

    Raises:
        HubError: the network or the Hub failed, or a checksum is wrong or missing.
        OutputError: the disk is too small, or the cache cannot be written.
    """
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.get_logger("huggingface_hub").setLevel(logging.ERROR)  # it prints addresses on stderr
    with translated(hub, repository.repo), _continuing_later():
        _check_room(hub, repository, files)
        paths = [
            _fetch(hub, repository, file, _Report(on_progress, file, number, len(files)))
            for number, file in enumerate(files, start=1)
        ]
        make_newest(hub, repository)
    return paths


@contextmanager
def _continuing_later() -> Iterator[None]:
    """Say at Ctrl-C that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted; the same command resumes the download.") from None


class _Report:
    """Reports the progress of a file, its speed and the time left, five times a second."""

    def __init__(self, on_progress: Progress | None, file: HubFile, number: int, count: int) -> None:
        self._on_progress = on_progress
        name = Path(file.path).name
        self._name = f"{name} (file {number} of {count})" if count > 1 else name
        self._start: tuple[float, int] | None = None
        self._last = 0.0

    def at(self, done: int, total: int) -> None:
        """So many bytes have arrived; `total` is 0 if the size is unknown."""
        now = time.monotonic()
        if self._start is None:
            self._start = (now, done)
        if self._on_progress is None or (now - self._last < 0.2 and done != total):
            return
        self._last = now
        text = f"Downloading {self._name}, {readable(done)}" + (f" of {readable(total)}" if total else "")
        seconds = now - self._start[0]
        if seconds > 0.5 and done > self._start[1]:
            rate = (done - self._start[1]) / seconds
            text += f", {readable(int(rate))}/s"
            text += f", {readable_time((total - done) / rate)} left" if total else ""
        self._on_progress(text, done / total if total else 0.0)

    def say(self, what: str) -> None:
        if self._on_progress is not None:
            self._on_progress(f"{self._name}: {what}", 0.0)


def _fetch(hub: Hub, repository: Repository, file: HubFile, report: _Report) -> Path:
    """The path of a file in the cache, downloaded if its content is not there."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    place = snapshot_folder(hub, repository) / file.path
    if place.exists():
        return place
    blobs = blobs_folder(hub, repository)
    lock = hub.cache / ".locks" / blobs.parent.name / f"{_key(repository, file)}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    blobs.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not place.exists():
            blob = blobs / file.digest
            if not blob.is_file():  # a folder without a digest
                blob = _Transfer(hub, repository, file, report).run()
            link_blob(blob, place)
    return place


class _Transfer:
    """A file on its way into the cache. What has arrived survives lost connections and kills."""

    def __init__(self, hub: Hub, repository: Repository, file: HubFile, report: _Report) -> None:
        self._hub, self._repository, self._file, self._report = hub, repository, file, report
        self._partial = _partial(hub, repository, file)
        self._done = 0  # bytes in the partial file
        self._sha256 = hashlib.sha256()  # of them
        self._resumable = True

    def run(self) -> Path:
        """Download the file and verify it; returns its place among the blobs."""
        try:
            with self._partial.open("ab+") as out:
                out.seek(0)
                while chunk := out.read(_CHUNK):  # from an earlier run
                    self._count(chunk)
                if self._file.n_bytes and self._done > self._file.n_bytes:
                    self._start_over(out)
                self._receive(out)
                found = self._checksum(out)
                out.flush()
                os.fsync(out.fileno())  # a blob is trusted if it exists
        except HubError:
            if not self._done:
                self._partial.unlink(missing_ok=True)
            raise
        if found != self._file.digest:
            self._partial.unlink(missing_ok=True)
            raise HubError(
                f"The download of {self._file.path} is corrupted: its checksum is "
                f"{found[:12]}... instead of {self._file.digest[:12]}...",
                "The file was removed. Try again; if it fails again, a proxy may be changing the data.",
            )
        return self._partial.replace(self._partial.with_name(found))

    @property
    def _is_whole(self) -> bool:
        return bool(self._file.digest and self._file.n_bytes) and self._done >= self._file.n_bytes

    def _receive(self, out: BufferedRandom) -> None:
        """Receive the rest, resuming until no new bytes arrive."""
        failures = 0
        while not self._is_whole:
            before, wait = self._done, self._hub.pause * 2**failures
            try:
                self._stream(out)
                problem = "the connection ended early"
            except _Interrupted as interruption:
                problem, wait = interruption.reason, interruption.wait or wait
            if self._is_whole:
                break
            failures = 0 if self._done > before else failures + 1
            if failures >= _ATTEMPTS or wait > _LONGEST_WAIT:
                raise self._gave_up(problem, wait)
            self._report.say(f"{problem}; trying again in {readable_time(wait)}")
            time.sleep(wait)

    def _gave_up(self, problem: str, wait: float) -> HubError:
        hint = "Try again, and the download resumes."
        if wait > _LONGEST_WAIT:
            hint = f"The Hub asks to wait {readable_time(wait)}."
        elif not self._resumable:
            hint = f"{self._hub.host} cannot resume downloads, so the next try starts over."
        done, total = readable(self._done), readable(self._file.n_bytes)
        where = f"at {done} of {total}" if self._file.n_bytes else f"at {done}"
        if done == total:
            where = f"{self._file.n_bytes - self._done:,} bytes before its end"
        return HubError(f"The download of {self._file.path} stopped {where}: {problem}.", hint)

    def _stream(self, out: BufferedRandom) -> None:
        """Request the rest of the file, and write what arrives.

        Raises:
            _Interrupted: more may arrive with another request.
        """
        import httpx2
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

        try:
            with request_bytes(self._hub, self._repository, self._file, self._done) as response:
                status = response.status_code
                if status in _BUSY:
                    raise _busy(status, response.headers.get("retry-after", ""))
                if status != _BEYOND_THE_END:
                    hf_raise_for_status(response)
                self._describe(described(self._hub, self._file, response))
                if self._done and status == 200:  # the server ignores the range
                    self._resumable = False
                    self._start_over(out)
                if status == _BEYOND_THE_END:
                    if not self._is_whole:
                        self._start_over(out)
                    return
                self._report.at(self._done, self._file.n_bytes)
                for chunk in response.iter_bytes():  # of any size: a partly filled chunk would be lost
                    if self._file.n_bytes:
                        chunk = chunk[: self._file.n_bytes - self._done]
                    out.write(chunk)
                    self._count(chunk)
                    self._report.at(self._done, self._file.n_bytes)
        except httpx2.TimeoutException:
            raise _Interrupted("the server stopped responding") from None
        except (httpx2.NetworkError, httpx2.RemoteProtocolError):
            raise _Interrupted("the connection was lost") from None
        finally:
            out.flush()
        if not self._file.n_bytes:  # nothing said how long it is, and the response ended properly
            self._file = replace(self._file, n_bytes=self._done)

    def _describe(self, file: HubFile) -> None:
        """Take up what a response says about the file.

        Raises:
            HubError: nothing says what its checksum is.
            OutputError: the disk is too small.
        """
        if not file.digest:
            raise HubError(
                f"{self._hub.host} provides no checksum of {file.path}, so the download cannot be verified.",
                "Set HF_ENDPOINT to another address, or download the file by other means and give its path.",
            )
        if file.n_bytes and not self._file.n_bytes:
            _require_room(self._hub, self._repository, file.n_bytes - self._done)
        self._file = file

    def _count(self, chunk: bytes) -> None:
        self._sha256.update(chunk)
        self._done += len(chunk)

    def _start_over(self, out: BufferedRandom) -> None:
        out.truncate(0)
        self._done, self._sha256 = 0, hashlib.sha256()

    def _checksum(self, out: BufferedRandom) -> str:
        """The SHA-256 of the file, or its git hash if the Hub gives that one."""
        if len(self._file.digest) == 64:
            return self._sha256.hexdigest()
        out.seek(0)
        start = b"blob %d\0" % self._done
        return hashlib.file_digest(out, lambda: hashlib.sha1(start, usedforsecurity=False)).hexdigest()


class _Interrupted(Exception):
    """The transfer stopped; another request may continue it, after `wait` seconds if the server says so."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.wait = reason, wait


def _busy(status: int, retry_after: str) -> _Interrupted:
    reason = (
        "the Hub received too many requests" if status == 429 else f"the Hub answered with status {status}"
    )
    return _Interrupted(reason, float(retry_after) if retry_after.isdigit() else 0.0)


def _key(repository: Repository, file: HubFile) -> str:
    """The name of a file's lock and partial download: its checksum, or else its place in the repository."""
    place = f"{repository.commit}/{file.path}"
    return file.digest or hashlib.sha1(place.encode(), usedforsecurity=False).hexdigest()


def _partial(hub: Hub, repository: Repository, file: HubFile) -> Path:
    return blobs_folder(hub, repository) / f"{_key(repository, file)}.edgespec.incomplete"


def _check_room(hub: Hub, repository: Repository, files: Sequence[HubFile]) -> None:
    """Check that the disk has room for the files whose size is known."""
    needed = 0
    for file in files:
        blob, partial = blobs_folder(hub, repository) / file.digest, _partial(hub, repository, file)
        place = snapshot_folder(hub, repository) / file.path
        if file.n_bytes and not blob.is_file() and not place.exists():
            needed += file.n_bytes - (partial.stat().st_size if partial.exists() else 0)
    _require_room(hub, repository, needed)


def _require_room(hub: Hub, repository: Repository, needed: int) -> None:
    if needed <= 0:
        return
    hub.cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(hub.cache).free
    if free < needed + _SPARE_DISK:
        raise OutputError(
            f"{repository.repo} needs {readable(needed)} of disk, and {readable(free)} are free "
            f"in {hub.cache}.",
            "Free some space, choose a smaller quantization, or set HF_HOME to a folder on a larger disk.",
        )
