"""One line of a batch: what is asked, with which settings, or why the line is invalid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgespec.generation.config import GenerationConfig

if TYPE_CHECKING:
    from edgespec.text.encoding import Prompt


@dataclass(frozen=True)
class Job:
    """One input line.

    Attributes:
        line: its number, from 1.
        identifier: its "id" or "custom_id", or else the line number.
        prompt: None if the line could not be read.
        config: the command's settings with those that the line overrides.
        answers: its "n"; None if it has none.
        endpoint: the path of the OpenAI API that it asks; None if it is in EdgeSpec's own format.
        error: why the line is invalid; empty if it is valid.
        duplicate_of: the earlier line with the same id; 0 if there is none.
        warnings: what of the line has no effect, in sentences.
        scored: the texts after the prompt that are to be scored, or none to score the prompt itself; None if
            the line asks for an answer.
        choices_given: the line has them as a list of choices.
    """

    line: int
    identifier: str | int
    prompt: Prompt | None = None
    config: GenerationConfig = field(default_factory=GenerationConfig)
    answers: int | None = None
    endpoint: str | None = None
    error: str = ""
    duplicate_of: int = 0
    warnings: tuple[str, ...] = ()
    scored: tuple[str, ...] | None = None
    choices_given: bool = False
