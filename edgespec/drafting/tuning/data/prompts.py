"""Prompts for the target: bundled questions of several categories, and a person's own.

Held-out prompts are never trained on. Bundled ones are about subjects of their own, so that
a drafter cannot know them from the same question in another form.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from edgespec.errors import UsageError

OWN = "own"
_HELD_OUT_SUBJECTS = 2  # of each category
_HELD_OUT_SHARE = 8  # one in so many of a person's own
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Prompt:
    """A question, and the category it belongs to."""

    text: str
    category: str


@dataclass(frozen=True)
class PromptSplit:
    """Prompts to learn from, in the order in which they are answered, and held-out ones."""

    training: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]


def bundled_prompts() -> PromptSplit:
    """Questions of every category in turn, with every form of a question and every subject early on."""
    source = resources.files("edgespec.drafting.tuning.data").joinpath("prompts.json")
    categories = json.loads(source.read_text(encoding="utf-8"))
    training: list[list[Prompt]] = []
    held_out: list[list[Prompt]] = []
    for category, parts in categories.items():
        forms, subjects = parts["forms"], parts["subjects"]
        kept, learned = subjects[:_HELD_OUT_SUBJECTS], subjects[_HELD_OUT_SUBJECTS:]
        held_out.append(
            [Prompt(forms[i % len(forms)].format(subject), category) for i, subject in enumerate(kept)]
        )
        training.append(
            [
                Prompt(forms[(i + turn) % len(forms)].format(subject), category)
                for turn in range(len(forms))
                for i, subject in enumerate(learned)
            ]
        )
    return PromptSplit(_in_turn(training), _in_turn(held_out))


def with_own(prompts: PromptSplit, own: list[Prompt]) -> PromptSplit:
    """A person's prompts before the bundled ones, some of them held out."""
    kept = own[_HELD_OUT_SHARE - 1 :: _HELD_OUT_SHARE]
    held = set(kept)
    learned = [prompt for prompt in own if prompt not in held]
    return PromptSplit((*learned, *prompts.training), (*kept, *prompts.held_out))


def read_prompts(path: Path) -> list[Prompt]:
    """A person's prompts: one a line, as plain text, or as JSON with a "prompt" (perhaps a "category")."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is larger than {_MAX_BYTES >> 20} MiB.", "Give a smaller file.")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", "Name a file of prompts.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", "Write one prompt per line.") from error
    found: dict[str, Prompt] = {}  # by text: what is held out must not be learned from under another category
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = _read_line(path, number, line)
            found.setdefault(prompt.text, prompt)
    if not found:
        raise UsageError(f"{path} contains no prompts.", "Write one prompt per line.")
    return list(found.values())


def _read_line(path: Path, number: int, line: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(line.strip(), OWN)
    try:
        record = json.loads(line)
    except ValueError:
        return Prompt(line.strip(), OWN)  # a question may begin with a brace
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(
            f'Line {number} of {path} has no "prompt".', 'Write plain text, or JSON with a "prompt".'
        )
    return Prompt(prompt, str(record.get("category", OWN)))


def _in_turn(groups: list[list[Prompt]]) -> tuple[Prompt, ...]:
    longest = max(map(len, groups))
    return tuple(group[i] for i in range(longest) for group in groups if i < len(group))
