"""Requests for the bytes of a file on the Hub, and what the responses say about the file.

Mirrors differ from the Hub: their list of files may have neither sizes nor checksums, so both are also taken
from the response that brings the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from edgespec.models.hub.repository import Hub, HubFile, Repository

if TYPE_CHECKING:
    from httpx2 import Response

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_HASH = re.compile(r"[0-9a-f]{40}")
_CHECKSUMS = ("X-Linked-Etag", "X-Checksum-Sha256", "ETag")  # of the Hub, of Artifactory, of some mirrors


def request_bytes(
    hub: Hub, repository: Repository, file: HubFile, start: int = 0, end: int | None = None
) -> AbstractContextManager[Response]:
    """Request the bytes of a file from `start` to before `end`; servers may ignore both."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    url = f"{hub.endpoint}/{repository.repo}/resolve/{repository.commit}/{quote(file.path)}"
    headers = {**hub.headers(), "Accept-Encoding": "identity"}
    if start or end is not None:
        headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
    stream: AbstractContextManager[Response] = get_session().stream(
        "GET", url, headers=headers, timeout=hub.timeout
    )
    return stream


def described(hub: Hub, file: HubFile, response: Response) -> HubFile:
    """The file with the size and the checksum that its list lacks, as far as the response has them."""
    digest = file.digest if _SHA256.fullmatch(file.digest) else _sha256(hub, response) or file.digest
    return replace(file, n_bytes=file.n_bytes or _size(response), digest=digest or _git_hash(hub, response))


def _size(response: Response) -> int:
    """The size of the whole file; 0 if the response does not say."""
    linked = [answer.headers.get("X-Linked-Size", "") for answer in (*response.history, response)]
    whole = response.headers.get("Content-Range", "").rpartition("/")[2]
    length = response.headers.get("Content-Length", "") if response.status_code == 200 else ""
    return next((int(size) for size in (*linked, whole, length) if size.isdecimal()), 0)


def _sha256(hub: Hub, response: Response) -> str:
    return next((value for _, value in _checksums(hub, response) if _SHA256.fullmatch(value)), "")


def _git_hash(hub: Hub, response: Response) -> str:
    """The ETag of a small file; elsewhere than on the Hub, 40 digits may be any hash."""
    for answer, value in _checksums(hub, response):
        if _GIT_HASH.fullmatch(value) and "X-Repo-Commit" in answer.headers:
            return value
    return ""


def _checksums(hub: Hub, response: Response) -> Iterator[tuple[Response, str]]:
    """Candidates for checksums, from the Hub's host alone: the ETag of a content network is another hash."""
    for answer in (*response.history, response):
        if str(answer.url).startswith(f"{hub.endpoint}/"):
            for name in _CHECKSUMS:
                yield answer, answer.headers.get(name, "").removeprefix("W/").strip('"').lower()
