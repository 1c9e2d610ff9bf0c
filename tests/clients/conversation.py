"""A program's conversation with a server: every turn asks for the word in another file."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.installing import Installed
from tests.clients.programs import Program
from tests.clients.running import clean_environment, run, scripted_server
from tests.clients.script import question


@dataclass(frozen=True)
class Turn:
    """A question of the user, and what came of it.

    Attributes:
        requests: those of the conversation, as they were answered: the call, and the answer with its result.
        asides: those without tools, such as for a title.
        word: what the file holds.
        output: what the program printed.
        failure: why the program failed; empty if it did not.
        asides: those without tools, such as for a title.
        by_form: how the program has its answers enforced, if it does without tools.
    """

    requests: Sequence[dict[str, Any]]
    word: str
    output: str
    failure: str
    asides: Sequence[dict[str, Any]] = ()
    by_form: str = ""

    @property
    def called(self) -> str:
        """The tool that was called, or what stands for it; empty if none was."""
        return self.by_form or next((name for request in self.requests for name in request["called"]), "")

    @property
    def result_came(self) -> bool:
        """True if the model was shown what the file holds, and the user was told."""
        shown = bool(self.by_form) or any(self.word in request["results"] for request in self.requests)
        return shown and self.word in self.output


@dataclass(frozen=True)
class Conversation:
    """All turns, and what went wrong.

    Attributes:
        refused: requests that were refused, with the reasons.
        changed: where requests had another beginning than those before them, so that it was read again.
        warnings: of all responses, each once.
    """

    turns: Sequence[Turn]
    refused: Sequence[str] = ()
    warnings: Sequence[str] = ()
    changed: Sequence[str] = ()


def converse(
    program: Program, installed: Installed, model: Path, folder: Path, *, turns: int, limit_s: float
) -> Conversation:
    """Ask a program, turn by turn.

    Args:
        folder: the program's own, kept between runs; its home folder and its files are made anew.
        limit_s: for each turn.

    Raises:
        Failed: the server does not start.
    """
    home, work, records = folder / "home", folder / "work", folder / "records.jsonl"
    for path in (home, work):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    records.write_text("")
    told: list[Turn] = []
    with scripted_server(model, folder, records) as url:
        for path, text in program.files(url).items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(text)
        environment = clean_environment(home, **program.environment(url))
        for number in range(1, turns + 1):
            before = len(_read(records))
            note, word = work / f"note-{number}.txt", f"heron-{secrets.token_hex(4)}"
            note.write_text(f"The word is {word}.\n")
            done = run(
                [str(installed.binary), *program.arguments(question(note), number > 1)],
                work,
                environment,
                limit_s,
            )
            answers = [entry for entry in _read(records)[before:] if entry["kind"] == "answer"]
            requests = [entry for entry in answers if entry["offered"] or program.by_form]
            asides = [entry for entry in answers if entry not in requests]
            told.append(Turn(requests, word, done.output, done.failure, asides, program.by_form))
            if done.failure:
                break
    entries = _read(records)
    answers = [entry for entry in entries if entry["kind"] == "answer"]
    return Conversation(
        told,
        [
            f"{entry['method']} {entry['path']} {entry['status']}: {entry['reason'][:300]}"
            for entry in entries
            if entry["kind"] == "refused"
        ],
        list(dict.fromkeys(warning for entry in answers for warning in entry["warnings"])),
        [entry["changed"] for entry in answers if entry["changed"]],
    )


def _read(records: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in records.read_text().splitlines()]
