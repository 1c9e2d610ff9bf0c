"""Saved sessions: the conversation in a JSON file, and next to it the keys and values of what was read.

The JSON file is the conversation; it is replaced as a whole after every turn. The folder of states only saves
time: what is missing or does not fit is read again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edgespec.engine.sessions.images import ImageFolder
from edgespec.errors import SessionError
from edgespec.files.small_json import MALFORMED, read_json
from edgespec.files.state import size_of
from edgespec.files.user_folders import data_folder, expanded
from edgespec.files.writing import atomic_write, followed, only_writer, remedy
from edgespec.images.parts import Image
from edgespec.text.encoding import EncodedConversation

_FORMAT = 1
_VERSION_KEY = "edgespec_session"  # of the version, by which a file is known as a session
_ROLES = ("user", "assistant")


@dataclass
class Conversation:
    """The contents of a saved session."""

    identity: dict[str, str]  # what the saved states depend on; see `llama.cache.states`
    system: str | None = None  # the system prompt
    # {"role", "content"} of each turn, without the system prompt; questions about images have these, too, as
    # "images".
    messages: list[dict[str, Any]] = field(default_factory=list)
    pending: dict[str, Any] | None = None  # a question without an answer, as in `messages`
    known: EncodedConversation | None = None  # the conversation as it was read, with its tokens
    saved: str = ""  # the time of saving, in ISO 8601
    model_path: str = ""  # the model's file; empty in files of earlier versions

    @property
    def images(self) -> Iterator[Image]:
        """The images of all questions."""
        for message in [*self.messages, self.pending or {}]:
            yield from message.get("images", ())

    @property
    def model_name(self) -> str:
        """The name of the model's file."""
        return model_name(self.identity)


class SessionFile:
    """One saved session, open in one program at a time.

    Args:
        name: a path (a Path, or text with a folder or ending in .json), or the name of a session in the
            sessions folder.

    Attributes:
        path: the JSON file.
        states: the folder of states next to it.
        images: the folder of the conversation's images next to it.

    Raises:
        SessionError: the name is invalid, the folder cannot be created, or the session is open in another
            program.
    """

    def __init__(self, name: str | os.PathLike[str]) -> None:
        self.path = session_path(name)
        file = followed(self.path)  # a link's states and images are those of its file
        self.states = file.with_name(file.name + ".kv")
        self.images = ImageFolder.of(file)
        self._lock = contextlib.ExitStack()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(only_writer(self.path))
        except BlockingIOError as error:
            raise SessionError(
                f"Session {self.path} is open in another program.",
                "Close it there, or choose another name.",
            ) from error
        except OSError as error:
            raise _cannot("written", self.path, error) from error

    def read(self) -> Conversation | None:
        """The saved conversation; None if nothing is saved yet.

        Raises:
            SessionError: the file cannot be read, or is not a session.
        """
        return read_conversation(self.path)

    def write(self, conversation: Conversation) -> None:
        """Replace the saved conversation atomically.

        Raises:
            SessionError: the file cannot be written; what was saved before is untouched.
        """
        conversation.saved = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            record = {_VERSION_KEY: _FORMAT, **_record(conversation, self.images)}
            with atomic_write(self.path) as file:
                text = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
                # Names of files may have bytes that are no text; JSON reads the escapes back.
                file.write(text.encode(errors="backslashreplace"))
            self.images.keep_only(conversation.images)
        except OSError as error:
            raise _cannot("written", self.path, error) from error

    def require_free(self, *, overwrite: bool) -> None:
        """Refuse to replace what is in the file.

        Args:
            overwrite: unless it is a session.

        Raises:
            SessionError: there is something else.
        """
        if not self.path.exists():
            return
        if not is_session(self.path):
            raise _no_session(self.path)
        if not overwrite:
            raise SessionError(
                f"{self.path} holds another conversation.", "Resume that one, or choose another name."
            )

    def close(self) -> None:
        """Release the session, so that other programs can open it."""
        self._lock.close()


@dataclass(frozen=True)
class SavedSession:
    """An entry in the list of sessions."""

    name: str
    path: Path
    turns: int  # questions with an answer
    saved: str
    model: str
    first: str
    bytes: int  # size on disk, states included


def model_name(identity: Mapping[str, str]) -> str:
    """The name of the model's file in an identity, where its header's fingerprint follows the name."""
    model = identity.get("model", "?")
    found = re.match(r"(.+?) [0-9a-f]{32}(?= |$)", model)
    return found[1] if found else model.partition(" ")[0]


def remove_session(session: SessionFile) -> int:
    """Remove a session that is open here, with its states; returns how many bytes are free again.

    Raises:
        SessionError: a file cannot be removed.
    """
    folders = (session.states, session.images.path)
    files = [session.path, *(path for folder in folders for path in folder.rglob("*") if path.is_file())]
    try:
        freed = sum(path.stat().st_size for path in files)
        for folder in folders:
            if folder.exists():
                shutil.rmtree(folder)
        session.path.unlink()
    except OSError as error:
        raise SessionError(f"{session.path} cannot be removed: {error.strerror}.", "") from error
    return freed


def session_path(name: str | os.PathLike[str]) -> Path:
    """The JSON file of a session.

    Raises:
        SessionError: it is not a valid name.
    """
    is_path = not isinstance(name, str)
    name = os.fspath(name)
    if is_path or name.endswith(".json") or "/" in name or os.sep in name or name.startswith("~"):
        path = expanded(name)
        return path if path.suffix == ".json" else Path(f"{path}.json")
    if not re.fullmatch(r"[\w][\w .-]{0,99}", name):
        raise SessionError(
            f"'{name}' is not a valid session name.",
            "Use letters, digits, spaces, '.', '-' and '_', or a path.",
        )
    return sessions_folder() / f"{name}.json"


def sessions_folder() -> Path:
    """The folder of sessions that have a name."""
    return data_folder() / "sessions"


def saved_sessions() -> Iterator[SavedSession]:
    """The sessions that have a name, latest first; unreadable ones are left out."""
    times: dict[Path, float] = {}
    with contextlib.suppress(OSError):
        for path in sessions_folder().glob("*.json"):
            with contextlib.suppress(OSError):  # a link that leads nowhere, or just removed
                times[path] = path.stat().st_mtime
    for path in sorted(times, key=times.__getitem__, reverse=True):
        with contextlib.suppress(SessionError):
            talk = read_conversation(path, with_images=False)
            if talk is not None:
                states = path.with_name(path.name + ".kv")
                size = sum(map(size_of, [path, *states.rglob("*.kv"), *ImageFolder.of(path).files]))
                first = next((m["content"] for m in [*talk.messages, talk.pending] if m is not None), "")
                turns = len(talk.messages) // 2
                yield SavedSession(path.stem, path, turns, talk.saved, talk.model_name, first, size)


def is_session(path: Path) -> bool:
    """True if a file is a saved session, of whatever version."""
    record = read_json(path, lambda record: record)
    return isinstance(record, dict) and _VERSION_KEY in record


def read_conversation(path: Path, *, with_images: bool = True) -> Conversation | None:
    """The conversation in a file; None without a file.

    Raises:
        SessionError: it is unreadable or invalid, or an image of it is missing.
    """
    try:
        if path.exists() and not path.is_file():
            raise _no_session(path)
        record = json.loads(path.read_bytes())
        if record[_VERSION_KEY] != _FORMAT:
            raise SessionError(
                f"{path} was saved by another version of EdgeSpec.",
                "Use that version, or choose another name.",
            )
        return _conversation(record, ImageFolder.of(followed(path)) if with_images else None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _cannot("read", path, error) from error
    except MALFORMED as error:
        raise _no_session(path) from error


def _record(conversation: Conversation, images: ImageFolder) -> dict[str, Any]:
    """A conversation as JSON, whose images are in files of their own.

    Raises:
        OSError: an image cannot be written.
    """

    def told(message: Mapping[str, Any]) -> dict[str, Any]:
        shown = [images.write(image) for image in message.get("images", ())]
        return {
            "role": message["role"],
            "content": message["content"],
            **({"images": shown} if shown else {}),
        }

    pending = None if conversation.pending is None else told(conversation.pending)
    return {
        "identity": conversation.identity,
        "system": conversation.system,
        "messages": [told(message) for message in conversation.messages],
        "pending": pending["content"] if pending else None,
        **({"pending_images": pending["images"]} if pending and "images" in pending else {}),
        "known": asdict(conversation.known) if conversation.known else None,
        "saved": conversation.saved,
        "model_path": conversation.model_path,
    }


def _conversation(record: Mapping[str, Any], images: ImageFolder | None) -> Conversation:
    """A conversation from its record.

    Args:
        images: where its images are; None to leave them out.
    """

    def message(role: object, content: object, shown: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        told: dict[str, Any] = {"role": _text(role), "content": _text(content)}
        if images is not None and (found := [images.read(image["sha256"], image["name"]) for image in shown]):
            told["images"] = found
        return told

    messages = [message(m["role"], m["content"], m.get("images", ())) for m in record["messages"]]
    if len(messages) % 2 or any(m["role"] != _ROLES[i % 2] for i, m in enumerate(messages)):
        raise ValueError("questions and answers do not alternate")
    known, pending = record["known"], record["pending"]
    tokens = array("i", map(int, known["tokens"])) if known else ()  # OverflowError beyond 32 bits
    return Conversation(
        identity={_text(name): _text(value) for name, value in record["identity"].items()},
        system=_optional(record["system"]),
        messages=messages,
        pending=None if pending is None else message("user", pending, record.get("pending_images", ())),
        known=EncodedConversation(_text(known["text"]), tuple(tokens)) if known else None,
        saved=_text(record["saved"]),
        model_path=_text(record.get("model_path", "")),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _optional(value: object) -> str | None:
    return None if value is None else _text(value)


def _no_session(path: Path) -> SessionError:
    return SessionError(f"{path} is not a saved session.", "Choose another name, or move that file away.")


def _cannot(verb: str, path: Path, error: OSError) -> SessionError:
    hint = remedy(error, "Give another name or path.")
    return SessionError(f"{path} cannot be {verb}: {error.strerror}.", hint)
