"""The family of exceptions for failures that a person can cause.

    EdgeSpecError            exit code 1
    ├── UsageError           exit code 2: a wrong flag, number or input line
    │   ├── ContradictionError  options that exclude each other
    │   └── GrammarError     a grammar or schema that is wrong, too large, or cannot be followed
    ├── ModelFileError       a path that is no model, a damaged or hostile GGUF
    ├── HubError             a model that cannot be fetched: no network, no access, a corrupted download
    │   └── NoSuchModelError    a repository that is not on the Hub, or holds no GGUF files
    ├── PairingError         a drafter that does not suit its target
    ├── MemoryLimitError     more memory needed than there is
    │   └── DeviceMemoryError   a graphics card that ran out of memory while it computed
    ├── ContextLengthError   a prompt longer than the context
    ├── TemplateError        a chat template that is missing, broken or hostile
    ├── OutputError          a file that cannot be written
    ├── SessionError         a saved conversation that cannot be opened or kept
    ├── StreamError          weights that cannot be read while they are needed
    └── BackendError         llama.cpp is missing, or refused what it was asked
        ├── WorkerError      another machine that holds layers cannot be reached, or is gone
        ├── DeviceLostError  a graphics card that failed while it computed
        └── InconclusiveTrial  a trial that was killed, starved or refused memory, so it proves nothing

Each carries what happened and what to do about it; the command line prints both, and the server sends them.
Functions of `cli`, `serving`, `api`, `bench` and `drafting` document an error only if their callers handle it
or rely on the state that it leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edgespec.printable import one_line, printable

_SIMILAR = 0.7  # by difflib; words below that are unrelated
_LONGEST_NAME = 200  # characters; comparing takes quadratic time


class EdgeSpecError(Exception):
    """A failure with a message for people.

    Attributes:
        what: what happened, one sentence, naming the value at fault.
        hint: what to do about it; may be empty.
        exit_code: the process exit status the command line ends with.
    """

    exit_code = 1

    def __init__(self, what: str, hint: str = "") -> None:
        # Names and values in messages may come from files, from llama.cpp and from the network.
        self.what = one_line(printable(what))
        self.hint = printable(hint)
        super().__init__(self.what)

    def __str__(self) -> str:
        return f"{self.what} {self.hint}".rstrip()

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by `__init__`, whose arguments subclasses choose.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class UsageError(EdgeSpecError):
    """A wrong flag, an absurd number, or an input line that cannot be read."""

    exit_code = 2


class InvalidValueError(UsageError):
    """A value that an option or a setting does not take.

    Attributes:
        name: of the option or setting.
        fault: the rest of the sentence: what it must be, and what was given.
    """

    def __init__(self, name: str, fault: str) -> None:
        super().__init__(f"{name} {fault}")
        self.name = name
        self.fault = fault

    def renamed(self, name: str) -> InvalidValueError:
        """The error for whoever knows the option by another name."""
        return InvalidValueError(name, self.fault)


class ContradictionError(UsageError):
    """Options that exclude each other.

    Attributes:
        options: their names as arguments.
    """

    def __init__(self, what: str, hint: str, *options: str) -> None:
        super().__init__(what, hint)
        self.options = options


class GrammarError(UsageError):
    """A grammar or JSON schema that is wrong, takes more than it may, or cannot be followed to its end."""


class ModelFileError(EdgeSpecError):
    """A path that is no model, or a GGUF file that is damaged."""


class HubError(EdgeSpecError):
    """A model that cannot be fetched: no network, no access, no such repository, a corrupted download."""


class NoSuchModelError(HubError):
    """A repository that is not on the Hub, or holds no GGUF files."""


class PairingError(EdgeSpecError):
    """A drafter that does not suit its target, such as one that is larger."""


class MemoryLimitError(EdgeSpecError):
    """More memory is needed than there is, or than the budget allows.

    Attributes:
        least: bytes that are needed at least, if known.
    """

    def __init__(self, what: str, hint: str = "", least: int | None = None) -> None:
        super().__init__(what, hint)
        self.least = least


class DeviceMemoryError(MemoryLimitError):
    """A graphics card, or another device, that ran out of memory while it computed."""


class ContextLengthError(EdgeSpecError):
    """A prompt that does not fit the context."""


class TemplateError(EdgeSpecError):
    """A chat template that is missing, broken, or does not end."""


class OutputError(EdgeSpecError):
    """A result that cannot be written where it was asked for."""


class SessionError(EdgeSpecError):
    """A saved conversation that cannot be opened, does not fit the model, or cannot be kept."""


class StreamError(EdgeSpecError):
    """Weights that cannot be read while they are needed: a disk that fails, a file that changes."""


class BackendError(EdgeSpecError):
    """llama.cpp is missing, or refused what it was asked to do."""


class WorkerError(BackendError):
    """A machine that was to hold layers of the model cannot be reached or used, or is gone."""


class DeviceLostError(BackendError):
    """A graphics card, or another device, that failed while it computed, and cannot be used any more."""


_MORE_MEMORY = "Close other programs or allow this one more memory, and try again."


class InconclusiveTrial(BackendError):
    """A trial that proves nothing: its process was killed, starved, stopped or refused memory.

    Outcomes are saved where they are returned (`files.small_json.remembered`). This is raised instead of one,
    so nothing is saved, and the next call tries again.

    Attributes:
        reason: how the trial ended, as a verb phrase.
    """

    def __init__(self, subject: str, reason: str, remedy: str = _MORE_MEMORY) -> None:
        super().__init__(
            f"{subject}: the trial was inconclusive, as its process {reason}.",
            f"Nothing was recorded. {remedy}",
        )
        self.reason = reason


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The hint for a name that does not exist: the nearest of those that do, or else another hint."""
    close = similar(name, known)
    return which_of(close) if close else otherwise


def which_of(names: Sequence[str]) -> str:
    """The hint that asks which of some names was meant: "Did you mean a, b or c?"."""
    return f"Did you mean {listed(names)}?"


def listed(words: Sequence[str]) -> str:
    """Words as a sentence lists them: "a, b or c"."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def similar(name: str, known: Iterable[str], n: int = 1) -> list[str]:
    """The names among `known` that `name` may be a slip for, nearest first; at most `n`."""
    import difflib  # takes longer to import than all else here

    spelled = {other.lower(): other for other in known}
    return [
        spelled[other]
        for other in difflib.get_close_matches(name[:_LONGEST_NAME].lower(), spelled, n, _SIMILAR)
    ]
