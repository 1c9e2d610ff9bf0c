"""Tab completion: of commands, their values and paths in a chat; of models and sessions in a shell."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgespec.config import NO_MODEL
from edgespec.files.user_folders import expanded, holds

_PATH_AT_END = re.compile(r'(?:^|\s)@("?)([^"\s]*|(?<=")[^"]*)$')


@dataclass(frozen=True)
class Completion:
    text: str  # what is inserted
    replaces: int  # how many characters before the cursor it replaces
    shown: str  # what is listed


class Completer:
    """Completes the commands of a chat.

    Args:
        values: command -> completions of its value, given what was typed; None for commands without a value.
    """

    def __init__(self, values: Mapping[str, Callable[[str], Sequence[str]] | None]) -> None:
        self._values = values

    def __call__(self, before: str) -> list[Completion]:
        """Completions for the text before the cursor."""
        mention = _PATH_AT_END.search(before)
        if mention:
            return [Completion(path, len(mention[2]), path) for path in paths(mention[2])]
        command, space, value = before.partition(" ")
        if not command.startswith("/") or "\n" in before:
            return []
        if not space:
            names = [name for name in self._values if name.startswith(command)]
            tail = " " if len(names) == 1 and self._values[names[0]] else ""
            return [Completion(name + tail, len(command), name) for name in names]
        offers = self._values.get(command)
        if offers is None:
            return []
        return [Completion(offer, len(value), offer) for offer in offers(value) if offer.startswith(value)]


def paths(typed: str) -> list[str]:
    """Files and folders that begin with `typed`; folders end with a slash."""
    at = max(typed.rfind("/"), typed.rfind(os.sep)) + 1
    prefix, start = typed[:at], typed[at:]
    base = expanded(prefix or ".")
    try:
        entries = sorted(base.iterdir())
    except (OSError, ValueError):
        return []
    return [
        prefix + entry.name + ("/" if holds(entry.is_dir) else "")
        for entry in entries
        if entry.name.startswith(start) and (start.startswith(".") or not entry.name.startswith("."))
    ]


def complete_words(*words: str) -> Callable[[str], list[str]]:
    """Completes with these words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def complete_model(incomplete: str) -> list[str]:
    """Models for a shell: names, and GGUF files."""
    from edgespec.models.hub import catalog
    from edgespec.models.hub.external import external_models

    known = (*catalog.names(), *(model.name for model in external_models()))
    names = [name for name in known if name.startswith(incomplete)]
    return names + [path for path in paths(incomplete) if path.endswith((".gguf", "/"))]


def complete_draft(incomplete: str) -> list[str]:
    """Complete --draft: model names, and the words that it takes."""
    words = [word for word in NO_MODEL if word.startswith(incomplete)]
    return words + complete_model(incomplete)


def complete_session(incomplete: str) -> list[str]:
    """Saved sessions for a shell: names, and files."""
    from edgespec.engine.sessions.file import sessions_folder

    names = sorted(path.stem for path in sessions_folder().glob("*.json"))
    files = [path for path in paths(incomplete) if path.endswith((".json", "/"))]
    return [name for name in names if name.startswith(incomplete)] + files
