"""Downloads files of a repository into the Hub's cache; resumes interrupted downloads and verifies checksums.

The session, the locks and the layout of the cache are those of huggingface-hub. The transfer itself is
implemented here, because the library's starts over after a kill, waits silently, and checks only lengths. A
file is written beside its place in the cache under a temporary name. Once its checksum is verified it is
renamed, and huggingface-hub links it into the snapshot.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from edgespec.errors import HubError, OutputError
from edgespec.models.hub.repository import Hub, HubFile, Repository, translated
from edgespec.progress import Progress
from edgespec.units import readable, readable_time

_ATTEMPTS = 5  # in a row without a new byte
_LONGEST_WAIT = 300  # seconds; a longer wait is reported as an error at once
_CHUNK = 1 << 20
_SPARE_DISK = 64 << 20
_BUSY = (408, 429, 500, 502, 503, 504)


def download(
    hub: Hub, repository: Repository, files: Sequence[HubFile], on_progress: Progress | None = None
) -> list[Path]:
    """Download the files that are missing in the cache; returns all their paths there, in order.

    Raises:
        HubError: the network or the Hub failed, or a checksum is wrong.
        OutputError: the disk is too small, or the cache cannot be written.
    """
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.get_logger("huggingface_hub").setLevel(logging.ERROR)  # it prints addresses on stderr
    with translated(hub, repository.repo):
        _check_room(hub, repository, files)
        paths = [
            _File(hub, repository, file, _Report(on_progress, file, number, len(files))).fetch()
            for number, file in enumerate(files, start=1)
        ]
        _make_newest(hub, repository)
    return paths


def _make_newest(hub: Hub, repository: Repository) -> None:
    """Record in the cache that this is the newest known commit, as huggingface-hub does."""
    reference = hub.folder(repository.repo) / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(repository.commit)


class _Report:
    """Reports the progress of a file, its speed and the time left, five times a second."""

    def __init__(self, on_progress: Progress | None, file: HubFile, number: int, count: int) -> None:
        self._on_progress = on_progress
        name = Path(file.path).name
        self._name = f"{name} (file {number} of {count})" if count > 1 else name
        self._total = file.n_bytes
        self._start: tuple[float, int] | None = None
        self._last = 0.0

    def at(self, done: int) -> None:
        now = time.monotonic()
        if self._start is None:
            self._start = (now, done)
        if self._on_progress is None or (now - self._last < 0.2 and done < self._total):
            return
        self._last = now
        text = f"Downloading {self._name}, {readable(done)} of {readable(self._total)}"
        seconds = now - self._start[0]
        if seconds > 0.5 and done > self._start[1]:
            rate = (done - self._start[1]) / seconds
            text += f", {readable(int(rate))}/s, {readable_time((self._total - done) / rate)} left"
        self._on_progress(text, done / max(self._total, 1))

    def say(self, what: str) -> None:
        if self._on_progress is not None:
            self._on_progress(f"{self._name}: {what}", 0.0)


@dataclass
class _File:
    hub: Hub
    repository: Repository
    file: HubFile
    report: _Report

    def fetch(self) -> Path:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        snapshot = self.hub.folder(self.repository.repo) / "snapshots" / self.repository.commit
        place = snapshot / self.file.path
        if place.exists():
            return place
        blob = _blob(self.hub, self.repository, self.file)
        if not blob.exists():
            lock = self.hub.cache / ".locks" / blob.parent.parent.name / f"{self.file.digest}.lock"
            lock.parent.mkdir(parents=True, exist_ok=True)
            blob.parent.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(lock):
                if not blob.exists():
                    self._fetch_blob(blob)
        # The blob exists, so this only links it into the snapshot.
        return Path(
            hf_hub_download(
                self.repository.repo,
                self.file.path,
                revision=self.repository.commit,  # not a newer one
                cache_dir=self.hub.cache,
                endpoint=self.hub.endpoint,
                token=self.hub.token or False,
                etag_timeout=self.hub.timeout,
                library_name="edgespec",
            )
        )

    def _fetch_blob(self, blob: Path) -> None:
        partial = _partial(blob)
        digest = _new_digest(self.file)
        with partial.open("ab+") as out:
            out.seek(0)
            done = 0
            while chunk := out.read(_CHUNK):  # from an earlier run
                digest.update(chunk)
                done += len(chunk)
            if done > self.file.n_bytes:
                done = 0
                out.truncate(0)
                digest = _new_digest(self.file)
            digest, done = self._transfer(out, digest, done)
        if digest.hexdigest() != self.file.digest:
            partial.unlink(missing_ok=True)
            raise HubError(
                f"The download of {self.file.path} is corrupted: its checksum is "
                f"{digest.hexdigest()[:12]}... instead of {self.file.digest[:12]}...",
                "It was removed. Try again; if that repeats, a proxy may be changing the data.",
            )
        partial.replace(blob)

    def _transfer(self, out: Any, digest: Any, done: int) -> tuple[Any, int]:
        """Download the rest, resuming until no new bytes arrive."""
        failures = 0
        while done < self.file.n_bytes:
            before = done
            try:
                digest, done = self._stream(out, digest, done)
                problem = "the connection ended early"
                wait = self.hub.pause * 2**failures
            except _Busy as busy:
                problem, wait = busy.reason, busy.wait or self.hub.pause * 2**failures
            except _Lost as lost:
                digest, done, problem = lost.digest, lost.done, lost.reason
                wait = self.hub.pause * 2**failures
            if done >= self.file.n_bytes:
                break
            failures = 0 if done > before else failures + 1
            if failures >= _ATTEMPTS or wait > _LONGEST_WAIT:
                raise HubError(
                    f"The download of {self.file.path} stopped at {readable(done)} of "
                    f"{readable(self.file.n_bytes)}: {problem}.",
                    "Try again, and the download resumes."
                    if wait <= _LONGEST_WAIT
                    else f"The Hub asks to wait {readable_time(wait)}.",
                )
            self.report.say(f"{problem}; trying again in {readable_time(wait)}")
            time.sleep(wait)
        return digest, done

    def _stream(self, out: Any, digest: Any, done: int) -> tuple[Any, int]:
        """Request the rest of the file."""
        import httpx2
        from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

        url = (
            f"{self.hub.endpoint}/{self.repository.repo}/resolve/{self.repository.commit}/"
            f"{quote(self.file.path)}"
        )
        headers = {**self.hub.headers(), "Accept-Encoding": "identity"}
        if done:
            headers["Range"] = f"bytes={done}-"
        try:
            with get_session().stream("GET", url, headers=headers, timeout=self.hub.timeout) as response:
                if response.status_code in _BUSY:
                    raise _Busy(response.status_code, response.headers.get("retry-after", ""))
                hf_raise_for_status(response)
                if done and response.status_code != 206:  # the server ignores the range
                    done = 0
                    out.truncate(0)
                    digest = _new_digest(self.file)
                self.report.at(done)
                for (
                    chunk
                ) in response.iter_bytes():  # without a chunk size: a partly filled chunk would be lost
                    chunk = chunk[: self.file.n_bytes - done]
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    self.report.at(done)
        except (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
            silent = isinstance(error, httpx2.TimeoutException)
            reason = "the server stopped responding" if silent else "the connection was lost"
            raise _Lost(digest, done, reason) from None
        finally:
            out.flush()
        return digest, done


class _Lost(Exception):
    """The connection broke; what arrived before is kept."""

    def __init__(self, digest: Any, done: int, reason: str) -> None:
        super().__init__(reason)
        self.digest, self.done, self.reason = digest, done, reason


class _Busy(Exception):
    """The server asks to retry later."""

    def __init__(self, status: int, retry_after: str) -> None:
        self.wait = float(retry_after) if retry_after.isdigit() else 0.0
        self.reason = (
            "the Hub received too many requests" if status == 429 else f"the Hub answers with {status}"
        )
        super().__init__(self.reason)


def _blob(hub: Hub, repository: Repository, file: HubFile) -> Path:
    return hub.folder(repository.repo) / "blobs" / file.digest


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.edgespec.incomplete")


def _new_digest(file: HubFile) -> Any:
    """SHA-256, or git's hash for files that are not in large-file storage."""
    if len(file.digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.n_bytes, usedforsecurity=False)


def _check_room(hub: Hub, repository: Repository, files: Sequence[HubFile]) -> None:
    needed = 0
    for file in files:
        blob = _blob(hub, repository, file)
        if not blob.exists():
            partial = _partial(blob)
            needed += file.n_bytes - (partial.stat().st_size if partial.exists() else 0)
    if needed <= 0:
        return
    hub.cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(hub.cache).free
    if free < needed + _SPARE_DISK:
        raise OutputError(
            f"{repository.repo} needs {readable(needed)} of disk, and {readable(free)} are free "
            f"in {hub.cache}.",
            "Make room, choose a smaller quantization, or set HF_HOME to a folder on a larger disk.",
        )
