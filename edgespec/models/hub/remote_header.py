"""The header of a model on the Hub: its first megabytes, read by range requests."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from edgespec.errors import HubError
from edgespec.models.gguf.cursor import IncompleteHeader
from edgespec.models.gguf.header import read_header_bytes
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub.repository import Hub, HubFile, Repository, translated

_FIRST = 2 << 20
_MOST = 256 << 20  # the limit of `models.gguf.cursor`


def read_remote_header(hub: Hub, repository: Repository, file: HubFile) -> GGUFHeader:
    """Read and check the header of one file of a repository, without downloading the rest.

    Raises:
        HubError: the Hub cannot be asked, or does not support ranges.
        ModelFileError: the file is not a GGUF file, or damaged.
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
                # Most of it is the vocabulary, whose length is only known at its end.
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
            if len(data) >= end - start:  # the server may ignore ranges and send everything
                break
    return bytes(data[: end - start])
