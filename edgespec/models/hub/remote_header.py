"""The header of a model that is still on the Hub: the first megabytes, by range requests."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from edgespec.errors import HubError
from edgespec.models.gguf.cursor import IncompleteHeader
from edgespec.models.gguf.header import read_header_bytes
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub.repository import Hub, HubFile, Repository, translated

_FIRST = 2 << 20
_MOST = 256 << 20  # what gguf.cursor allows a header


def read_remote_header(hub: Hub, repository: Repository, file: HubFile) -> GGUFHeader:
    """Read and check the header of one file of a repository, without downloading the rest.

    Raises:
        HubError: the Hub cannot be asked, or gives no ranges.
        ModelFileError: the file is no GGUF, or damaged.
    """
    data, wanted = b"", _FIRST
    with translated(hub, repository.repo):
        while True:
            wanted = min(wanted, file.n_bytes, _MOST)
            data += _range(hub, repository, file, len(data), wanted)
            try:
                return read_header_bytes(Path(file.path), data, file.n_bytes)
            except IncompleteHeader as more:
                if len(data) >= min(file.n_bytes, _MOST):
                    raise HubError(
                        f"The Hub sends less of {file.path} than it has.", "Try again later."
                    ) from None
                # Vocabularies are the bulk, and how long they are is only known at their end.
                wanted = max(more.needed, 2 * wanted)


def _range(hub: Hub, repository: Repository, file: HubFile, start: int, end: int) -> bytes:
    from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

    url = f"{hub.endpoint}/{repository.repo}/resolve/{repository.commit}/{quote(file.path)}"
    headers = {**hub.headers(), "Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
    with get_session().stream("GET", url, headers=headers, timeout=hub.timeout) as response:
        hf_raise_for_status(response)
        if response.status_code != 206 and start:
            raise HubError(f"The Hub gives no part of {file.path}.", "Download it: edgespec models pull.")
        data = bytearray()
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) >= end - start:  # all of it, where ranges are ignored
                break
    return bytes(data[: end - start])
