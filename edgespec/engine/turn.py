"""A turn of a conversation, as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec.files.checked import CheckedFiles
from edgespec.generation.result import Generation
from edgespec.llama.cache.states import StateStore
from edgespec.text.encoding import Prompt


@dataclass(eq=False)
class SavedStates:
    """The states of one conversation on disk."""

    target: StateStore  # those of the target
    drafter: Path  # the folder of the drafter's
    closed: bool = False  # whether nothing is saved here any more

    def clear(self) -> None:
        self.target.clear()
        StateStore(CheckedFiles(self.drafter), "").clear()


@dataclass(frozen=True)
class Turn:
    """A prompt that is to be answered, of its own or of a conversation."""

    prompt: Prompt
    raw: bool = False  # nothing in the answer is a thought or a call
    states: SavedStates | None = None  # where the state of the conversation is kept; None if it is not
    # called with the answer when it has ended, in whatever way, if there is any of it
    on_end: Callable[[Generation], None] = lambda answer: None
