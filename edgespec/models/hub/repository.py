"""The Hugging Face Hub: what a repository holds.

The session, the cache folder and the token are those of huggingface-hub, so files are shared with all
programs that use it, and HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE have their usual
meaning. Its errors are translated here; no message contains a token or a signed address.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgespec.errors import EdgeSpecError, HubError, NoSuchModelError, OutputError, similar, which_of
from edgespec.files.user_folders import in_home
from edgespec.files.writing import remedy
from edgespec.models.hub.names import HubName, ModelVariant, group_files, parse_hub_name
from edgespec.models.hub.projectors import choose_projector

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_UNSAFE = re.compile(r"[\\:\x00-\x1f]")  # separators of paths on Windows, and control characters
_LOG_IN = "Log in with 'hf auth login', or set HF_TOKEN"


@dataclass(frozen=True)
class Hub:
    """The address of the Hub, and the folder in which its files are kept."""

    endpoint: str
    cache: Path
    token: str | None = None  # sent to the Hub only
    offline: bool = False  # never use the network
    timeout: float = 10.0  # seconds without a byte after which a request fails
    pause: float = 1.0  # seconds before the first retry after a failure; it doubles

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
            cache=in_home(constants.HF_HUB_CACHE),
            offline=bool(constants.HF_HUB_OFFLINE),
            timeout=float(constants.HF_HUB_DOWNLOAD_TIMEOUT),
        )

    @property
    def host(self) -> str:
        """The host, and the port if the address has one, as messages name them."""
        parts = urlsplit(self.endpoint)
        return (parts.hostname or self.endpoint) + (f":{parts.port}" if parts.port else "")

    def headers(self) -> dict[str, str]:
        """The user agent and the token."""
        from edgespec.version import __version__

        # huggingface_hub would first ask the Hub how to tell which agent runs the program, and then say so.
        headers = {"user-agent": f"edgespec/{__version__}"}
        return headers | ({"authorization": f"Bearer {self.token}"} if self.token else {})

    def folder(self, repo: str) -> Path:
        return self.cache / f"models--{repo.replace('/', '--')}"


@dataclass(frozen=True)
class HubFile:
    path: str
    n_bytes: int  # its size; 0 if the Hub does not say
    digest: str  # its SHA-256, or its git hash (40 digits) for a small one; empty if the Hub does not say


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]

    @property
    def models(self) -> tuple[ModelVariant, ...]:
        return group_files((file.path, file.n_bytes) for file in self.files)

    def files_of(self, model: ModelVariant) -> list[HubFile]:
        """The files that make up a model, in order."""
        by_path = {file.path: file for file in self.files}
        return [by_path[path] for path in model.paths]

    def projector_of(self, model: ModelVariant) -> HubFile | None:
        """The projector by which a model sees; None if it has none, or there is no telling which."""
        by_path = {file.path: file for file in self.files}
        chosen = choose_projector(list(by_path), model.paths[0])
        return None if chosen is None else by_path[chosen]


def any_repository(hub: Hub, repo: str) -> Repository:
    """Ask the Hub what a repository holds, whatever it is.

    Raises:
        HubError: no network, no such repository, or no access.
    """
    if hub.offline:
        raise HubError(
            f"{repo} is not installed, and HF_HUB_OFFLINE forbids asking the Hub.",
            "Unset HF_HUB_OFFLINE, or give the path of a GGUF file.",
        )
    return _parsed(hub, repo, _asked(hub, repo))


def find_repository(hub: Hub, repo: str) -> Repository:
    """Ask the Hub what a repository with models holds.

    Raises:
        HubError: no network, no such repository, no access, or no GGUF files in it.
    """
    found = any_repository(hub, repo)
    if not found.models:
        names = sorted(file.path for file in found.files)
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        name = repo.split("/")[1]
        raise NoSuchModelError(
            f"{repo} has no GGUF files. It has: {', '.join(names[:8]) or 'nothing'}{more}.",
            "Choose another repository with this model."
            if name.upper().endswith("-GGUF")
            else f"Choose a GGUF conversion; its name usually ends in -GGUF, such as {name}-GGUF.",
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


def _parsed(hub: Hub, repo: str, answer: bytes) -> Repository:
    """The Hub's answer, checked; only the answer can be at fault here."""
    try:
        said = json.loads(answer)
        siblings = said["siblings"] or ()
        files = tuple(file for sibling in siblings if (file := _file(sibling)) is not None)
        # A renamed repository answers under its new name.
        name, commit = said["id"], said["sha"]
        if parse_hub_name(name) != HubName(name) or not _COMMIT.fullmatch(commit):
            raise ValueError("no name, or no commit")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise HubError(
            f"{hub.host} sent an invalid description of {repo}.", "Check HF_ENDPOINT and any proxy."
        ) from None
    return Repository(name, commit, files)


def _file(sibling: dict[str, Any]) -> HubFile | None:
    """A file of the Hub's answer; None for an empty one, and for a path that could lead out of the cache.

    The answer may be a mirror's. Paths and digests become names of files here, so they are checked.
    """
    path, lfs, size = str(sibling["rfilename"]), sibling.get("lfs"), sibling.get("size")
    digest = str(lfs["sha256"] if lfs else sibling.get("blobId"))
    if size == 0 or path.startswith("/") or ".." in path.split("/") or _UNSAFE.search(path):
        return None
    return HubFile(path, int(size or 0), digest if _DIGEST.fullmatch(digest) else "")


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
        raise NoSuchModelError(
            f"There is no repository {repo} on the Hub, or it is private.",
            which_of(close) if close else f"Check the name. {_LOG_IN} if it is private.",
        ) from None
    except errors.HFValidationError:
        raise NoSuchModelError(
            f"'{repo}' is not the name of a repository.", "Write it as org/repo:quant."
        ) from None
    except errors.HfHubHTTPError as error:
        raise _refused(repo, error.response) from None
    except errors.OfflineModeIsEnabled:
        raise HubError("Offline mode forbids asking the Hub.", "Unset HF_HUB_OFFLINE.") from None
    except httpx2.TimeoutException:
        raise HubError(
            f"{hub.host} does not answer.", "Try again later; the partial download is kept."
        ) from None
    except httpx2.HTTPError as error:
        raise HubError(
            f"{hub.host} cannot be reached ({type(error).__name__}).",
            "Check the network and HF_ENDPOINT. Without a network, give the path of a GGUF file.",
        ) from None
    except OSError as error:
        raise OutputError(
            f"{error.filename or hub.cache} cannot be written: {error.strerror or error}.",
            remedy(error, "Check its permissions, or set HF_HOME to another folder."),
        ) from None


def _refused(repo: str, response: Any) -> HubError:
    status = int(response.status_code)
    if status == 401:
        return _bad_token()
    if status == 403:
        return HubError(
            f"The Hub refuses access to {repo} (403).",
            "Allow your token to read it: huggingface.co/settings/tokens",
        )
    if status == 404:
        return HubError(
            f"A file of {repo} is gone from the Hub (404).", "Try again, or choose another quantization."
        )
    if status == 429:
        wait = response.headers.get("retry-after", "")
        again = f"in {wait} seconds" if wait.isdigit() else "later"
        return HubError("The Hub received too many requests (429).", f"Try again {again}, or log in.")
    return HubError(f"The Hub answered with status {status}.", "Try again later.")


def _bad_token() -> HubError:
    return HubError("The Hub rejected the token.", f"{_LOG_IN} to a valid token.")


def _similar(api: Any, repo: str) -> list[str]:
    """Repositories with similar names, if the Hub can say."""
    try:
        found = [
            str(model.id)
            for model in api.list_models(search=repo.split("/")[1], limit=20)
            if str(model.id) != repo
        ]
    except Exception:  # only a suggestion in an error message
        return []
    return similar(repo, found, n=3)
