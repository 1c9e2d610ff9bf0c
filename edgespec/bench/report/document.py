"""All results as one JSON document, with everything needed to repeat the measurement."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec.bench.rows.figures import broken_promises, knee
from edgespec.bench.rows.runner import BenchMeasurements
from edgespec.errors import OutputError
from edgespec.files.writing import atomic_large_write, followed, require_replaceable, unwritable

FORMAT = 1


def make_document(measured: BenchMeasurements, about: dict[str, Any]) -> dict[str, Any]:
    """The document: names are fixed, new ones may be added.

    Args:
        about: title, date, command, machine, versions, model, drafter and settings.
    """
    notes = [*about["notes"], *measured.notes]
    for row in measured.rows:
        notes += [f"{row.name}: {note}" for note in row.notes]
    for row in broken_promises(measured.rows):
        notes.append(f"{row.name} is exact, but its answers differ. This is a bug in EdgeSpec.")
    return {
        "format": FORMAT,
        **{name: value for name, value in about.items() if name != "notes"},
        "disk": asdict(measured.disk) if measured.disk else None,
        "rows": [row.to_json() for row in measured.rows],
        "curves": {
            place: {
                "passes": {str(rows): pass_ for rows, pass_ in sorted(curve.items())},
                "knee": knee({rows: pass_["s"] for rows, pass_ in curve.items()}),
            }
            for place, curve in measured.curves.items()
        },
        "notes": list(dict.fromkeys(notes)),
        "interrupted": measured.interrupted,
    }


def as_text(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def check_writable(path: Path) -> None:
    """Find out before hours of measuring whether a file can be written."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder.", "Give the name of a file.")
    try:
        require_replaceable(path)
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise unwritable(path, error, "Give another name.") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name, and rename it.

    Raises:
        OutputError: it cannot be written; the old file is then unchanged.
    """
    try:
        real = followed(path)
        with atomic_large_write(real, real.with_name(f"{real.name}.partial")) as file:
            # Names of files may have bytes that are no text; JSON reads the escapes back.
            file.write(text.encode(errors="backslashreplace"))
    except OSError as error:
        raise unwritable(path, error, "Give another name.") from error
