"""The Hugging Face Hub: what a repository holds, and what of it is already in the local cache.

The huggingface-hub library queries the Hub and manages the cache, so files are shared with every program that
uses it, and HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE have their usual meaning. Its
errors are translated here; no message contains a token or a signed address.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.errors import EdgeSpecError, HubError, OutputError
from edgespec.models.hub.names import ModelVariant, group_files

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOG_IN = "Log in with 'hf auth login', or set HF_TOKEN"


@dataclass(frozen=True)
class Hub:
    """The address of the Hub, and the folder in which its files are kept.

    Attributes:
        token: sent to the Hub only.
        offline: never use the network.
        timeout: seconds without a byte after which a request fails.
        pause: seconds before the first retry after a failure; it doubles.
    """

    endpoint: str
    cache: Path
    token: str | None = None
    offline: bool = False
    timeout: float = 10.0
    pause: float = 1.0

    @classmethod
    def from_environment(cls) -> Hub:
        """With the settings of the environment and of huggingface-hub."""
        from huggingface_hub import get_token

        return replace(cls.without_token(), token=get_token())

    @classmethod
    def without_token(cls) -> Hub:
        """Open the cache without a token: reading that takes a third of a second."""
        from huggingface_hub import constants

        return cls(
            endpoint=constants.ENDPOINT,
            cache=Path(constants.HF_HUB_CACHE).expanduser(),
            offline=bool(constants.HF_HUB_OFFLINE),
            timeout=float(constants.HF_HUB_DOWNLOAD_TIMEOUT),
        )

    def headers(self) -> dict[str, str]:
        """The user agent and the token."""
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        from edgespec.version import __version__

        headers: dict[str, str] = build_hf_headers(
            token=self.token or False, library_name="edgespec", library_version=__version__
        )
        return headers

    def folder(self, repo: str) -> Path:
        """The folder of a repository in the cache."""
        return self.cache / f"models--{repo.replace('/', '--')}"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository; `digest` is its SHA-256, or its git hash (40 digits) for a small one."""

    path: str
    n_bytes: int
    digest: str


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]

    @property
    def models(self) -> tuple[ModelVariant, ...]:
        """The GGUF models in it."""
        return group_files((file.path, file.n_bytes) for file in self.files)

    def files_of(self, model: ModelVariant) -> list[HubFile]:
        """The files that make up a model, in order."""
        by_path = {file.path: file for file in self.files}
        return [by_path[path] for path in model.paths]


def any_repository(hub: Hub, repo: str) -> Repository:
    """Ask the Hub what a repository holds, whatever it is.

    Raises:
        HubError: no network, no such repository, or no access.
    """
    if hub.offline:
        raise HubError(
            f"{repo} is not here, and the Hub cannot be asked because HF_HUB_OFFLINE is set.",
            "Unset HF_HUB_OFFLINE, or give the path of a GGUF file.",
        )
    return _parsed(hub, _asked(hub, repo))


def find_repository(hub: Hub, repo: str) -> Repository:
    """Ask the Hub what a repository with models holds.

    Raises:
        HubError: no network, no such repository, no access, or no GGUF files in it.
    """
    found = any_repository(hub, repo)
    if not found.models:
        names = sorted(file.path for file in found.files)
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise HubError(
            f"{repo} has no GGUF files. It has: {', '.join(names[:8]) or 'nothing'}{more}.",
            f"Look for a conversion: its name usually ends in -GGUF, such as {repo.split('/')[1]}-GGUF.",
        )
    return found


def _asked(hub: Hub, repo: str) -> bytes:
    """The Hub's raw answer about a repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        get_session,
        hf_raise_for_status,
        validate_repo_id,
    )

    api = HfApi(endpoint=hub.endpoint, token=hub.token or False, library_name="edgespec")
    with translated(hub, repo, api):
        validate_repo_id(repo)
        response = get_session().get(
            f"{hub.endpoint}/api/models/{repo}",
            params={"blobs": True},
            headers=hub.headers(),
            timeout=hub.timeout,
        )
        hf_raise_for_status(response)
        return bytes(response.content)


def _parsed(hub: Hub, answer: bytes) -> Repository:
    """The Hub's answer, checked; only the answer can be at fault here."""
    try:
        said = json.loads(answer)
        siblings = said["siblings"] or ()
        files = tuple(_file(sibling) for sibling in siblings if sibling.get("size"))
        # A renamed repository answers under its new name.
        name, commit = said["id"], said["sha"]
        if not (isinstance(name, str) and isinstance(commit, str) and _COMMIT.fullmatch(commit)):
            raise ValueError("no name, or no commit")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise HubError(
            f"{_host(hub)} gave an answer that the Hub would not give.", "Check HF_ENDPOINT and any proxy."
        ) from None
    return Repository(name, commit, files)


def _file(sibling: dict[str, Any]) -> HubFile:
    lfs = sibling.get("lfs")
    digest = lfs["sha256"] if lfs else sibling.get("blobId") or ""
    return HubFile(str(sibling["rfilename"]), int(sibling["size"]), str(digest))


def cached_models(hub: Hub, repo: str) -> Iterator[tuple[ModelVariant, Path]]:
    """The whole models of a repository that are in the cache, and the path of each one's first file.

    The latest revision comes first.
    """
    snapshots = hub.folder(repo) / "snapshots"
    try:
        newest = (hub.folder(repo) / "refs" / "main").read_text().strip()
    except OSError:
        newest = ""
    seen: set[tuple[str, ...]] = set()
    for revision in sorted(_folders(snapshots), key=lambda path: (path.name != newest, -_modified(path))):
        # is_file(): a link whose blob was removed is not a file.
        found = [path for path in revision.rglob("*") if path.is_file()]
        sizes = [(path.relative_to(revision).as_posix(), path.stat().st_size) for path in found]
        for model in group_files(sizes):
            if model.paths not in seen:
                seen.add(model.paths)
                yield model, revision / model.paths[0]


def cached_repositories(hub: Hub) -> list[str]:
    """The repositories that have something in the cache."""
    return sorted(
        folder.name.removeprefix("models--").replace("--", "/", 1)
        for folder in _folders(hub.cache)
        if folder.name.startswith("models--")
    )


@contextmanager
def translated(hub: Hub, repo: str, api: Any = None) -> Iterator[None]:
    """Turn what huggingface-hub, the network and the system raise into messages for people.

    Nothing else is caught: a bug must not look like a network failure.
    """
    import httpx2
    from huggingface_hub import errors

    # `from None`: the libraries' messages quote addresses, which may be signed.
    try:
        yield
    except EdgeSpecError:
        raise
    except errors.GatedRepoError:
        raise HubError(
            f"Access to {repo} is restricted by its owner.",
            f"Open {hub.endpoint}/{repo}, accept the terms there, then: {_LOG_IN}.",
        ) from None
    except errors.RepositoryNotFoundError as error:
        if error.response.status_code == 401 and hub.token:
            raise _bad_token() from None
        close = _similar(api, repo) if api is not None else []
        raise HubError(
            f"There is no repository {repo} on the Hub, or it is private.",
            f"Did you mean {' or '.join(close)}?"
            if close
            else f"Check the name. If it is private: {_LOG_IN}.",
        ) from None
    except errors.HFValidationError:
        raise HubError(f"'{repo}' is not the name of a repository.", "Write it as org/repo:quant.") from None
    except errors.HfHubHTTPError as error:
        raise _refused(repo, error.response) from None
    except errors.LocalEntryNotFoundError:  # a subclass of OSError, but about the network
        raise HubError(f"{_host(hub)} cannot be reached.", "Try again; what was fetched is kept.") from None
    except errors.OfflineModeIsEnabled:
        raise HubError("The Hub cannot be asked in offline mode.", "Unset HF_HUB_OFFLINE.") from None
    except httpx2.TimeoutException:
        raise HubError(
            f"{_host(hub)} does not answer.", "Try again later; what was fetched so far is kept."
        ) from None
    except httpx2.HTTPError as error:
        raise HubError(
            f"{_host(hub)} cannot be reached ({type(error).__name__}).",
            "Check the network and HF_ENDPOINT. Without a network, give the path of a GGUF file.",
        ) from None
    except OSError as error:
        raise OutputError(
            f"{error.filename or hub.cache} cannot be written: {error.strerror or error}.",
            "Check its permissions, or set HF_HOME to another folder.",
        ) from None


def _refused(repo: str, response: Any) -> HubError:
    status = int(response.status_code)
    if status == 401:
        return _bad_token()
    if status == 403:
        return HubError(
            f"The Hub refuses access to {repo} (403).",
            "Give your token the right to read it: huggingface.co/settings/tokens.",
        )
    if status == 404:
        return HubError(f"A file of {repo} is gone from the Hub (404).", "Ask for the model again.")
    if status == 429:
        wait = response.headers.get("retry-after", "")
        again = f"in {wait} seconds" if wait.isdigit() else "later"
        return HubError("The Hub received too many requests (429).", f"Try again {again}, or log in.")
    return HubError(f"The Hub answers with status {status}.", "Try again later.")


def _bad_token() -> HubError:
    return HubError("The Hub does not accept the token.", f"{_LOG_IN} to a valid one.")


def _similar(api: Any, repo: str) -> list[str]:
    """Repositories with similar names, if the Hub can say."""
    import difflib

    try:
        found = [
            str(model.id)
            for model in api.list_models(search=repo.split("/")[1], limit=20)
            if str(model.id) != repo
        ]
    except Exception:  # only a suggestion in an error message
        return []
    return difflib.get_close_matches(repo, found, n=3, cutoff=0.4)


def _host(hub: Hub) -> str:
    from urllib.parse import urlsplit

    parts = urlsplit(hub.endpoint)
    return f"{parts.hostname or hub.endpoint}" + (f":{parts.port}" if parts.port else "")


def _folders(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
