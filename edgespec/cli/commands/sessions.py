"""`edgespec sessions`: conversations that `chat --session NAME` saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.completion import complete_session
from edgespec.cli.options.common import Yes, confirm_removal
from edgespec.cli.options.declaration import Json, command_group, option
from edgespec.cli.screen.formatting import count, table
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal
from edgespec.errors import UsageError, did_you_mean
from edgespec.printable import printable

if TYPE_CHECKING:
    from edgespec.engine.sessions.file import SavedSession

app = command_group("sessions", "List, show and remove conversations saved with chat --session NAME.")


@app.command("list", epilog="Example:\n\nedgespec sessions list")
def list_sessions(as_json: Json = False) -> None:
    """List saved conversations, latest first."""
    from edgespec.base.units import readable
    from edgespec.engine.sessions.file import saved_sessions

    found = list(saved_sessions())
    if as_json:
        results().record({"sessions": [_record(session) for session in found]})
        return
    if not found:
        Terminal().note("No saved conversations yet. To save one: edgespec chat --session NAME")
        return
    rows = [
        (s.name, str(s.turns), s.saved[:16].replace("T", " "), readable(s.bytes), s.model, _line(s.first))
        for s in found
    ]
    results().table(table(("NAME", "TURNS", "SAVED", "SIZE", "MODEL", "FIRST QUESTION"), rows))


@app.command(epilog="Examples:\n\nedgespec sessions show trip\n\nedgespec sessions show trip --json")
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE", help="Name or file of the session.", autocompletion=complete_session
        ),
    ],
    as_json: Annotated[
        bool, option(None, "--json", "Print JSON messages, as requests of the OpenAI API have them.")
    ] = False,
) -> None:
    """Print a saved conversation as Markdown."""
    from edgespec.cli.conversation.export import Transcript
    from edgespec.engine.sessions.file import read_conversation

    saved = read_conversation(_existing(name))
    assert saved is not None, "the file exists"
    model = saved.model_name.removesuffix(".gguf")
    transcript = Transcript(saved.system, saved.messages, model)
    if as_json:
        results().record(transcript.to_json())
    else:
        results().verbatim(transcript.to_markdown())


@app.command("rm", epilog="Example:\n\nedgespec sessions rm trip")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME|FILE", help="Sessions to remove.", autocompletion=complete_session),
    ],
    yes: Yes = False,
) -> None:
    """Remove saved conversations and their cached model states."""
    from edgespec.engine.sessions.file import SessionFile, is_session, remove_session, sessions_folder

    files = [_existing(name) for name in names]
    for file in files:
        if file.parent != sessions_folder() and not is_session(file):
            raise UsageError(f"{file} is not a saved session.", "Check the path.")
    if not yes:
        what = ", ".join(file.stem for file in files)
        confirm_removal(printable(f"Remove {count(len(files), 'session')}: {what}?"))
    for file in files:
        session = SessionFile(file)  # refuses one that is open in another program
        try:
            freed = remove_session(session)
        finally:
            session.close()
        from edgespec.base.units import readable

        Terminal().note(f"Removed {file.stem}: {readable(freed)} freed.")


def _existing(name: str) -> Path:
    """The file of a session; raises UsageError if there is none."""
    from edgespec.engine.sessions.file import session_path, sessions_folder

    path = session_path(name)
    try:
        is_file = path.is_file()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.", "Check the path and its permissions."
        ) from error
    if not is_file:
        known = [file.stem for file in sessions_folder().glob("*.json") if file.is_file()]
        hint = did_you_mean(name, known, "'edgespec sessions list' lists them.")
        raise UsageError(f"There is no session '{name}'.", hint)
    return path


def _record(session: SavedSession) -> dict[str, object]:
    return {
        "name": session.name,
        "path": str(session.path),
        "turns": session.turns,
        "saved": session.saved,
        "model": session.model,
        "first": session.first,
        "bytes": session.bytes,
    }


def _line(text: str) -> str:
    return " ".join(text.split())
