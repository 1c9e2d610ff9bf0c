"""Compares two `--json` documents of `edgespec bench`: their origins, and the rows that both have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.base.units import readable, significant
from edgespec.bench.report.document import FORMAT
from edgespec.errors import UsageError

_MAX_BYTES = 16 << 20


def _read(path: Path) -> dict[str, Any]:
    """A document of `bench --json`, made by anybody."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("it is too large")
        record = json.loads(path.read_bytes())
        if record["format"] != FORMAT:
            raise ValueError("its version is not supported")
        for row in record["rows"]:
            _speed(row)
            str(row["name"])
        _heading(record)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a document of 'edgespec bench --json'.", "Make one: edgespec bench --json FILE"
        ) from error
    return dict(record)


def compare_files(first: str, second: str | None) -> str:
    """Compare two files, as Markdown.

    Args:
        second: what stands after the first file, which is where a model would be named.
    """
    if second is None:
        raise UsageError(f"Cannot compare {first} alone.", "Name two files: --compare A B")
    paths = [Path(first), Path(second)]
    names = [path.stem for path in paths] if paths[0].stem != paths[1].stem else [first, second]
    one, other = map(_read, paths)
    return compare(one, other, names)


def compare(first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str]) -> str:
    """Compare two documents side by side, as Markdown: their origins, and the rows that both have.

    Args:
        names: what to call them.
    """
    facts = [("", *names)]
    for (title, one), (_, other) in zip(_heading(first), _heading(second), strict=True):
        facts.append((title, one, other if other != one else "the same"))
    rows = [("tokens/s", *names, "ratio")]
    ours = {row["name"]: row for row in first["rows"]}
    theirs = {row["name"]: row for row in second["rows"]}
    for name in dict.fromkeys([*ours, *theirs]):
        speeds = [_speed(rows_of[name]) if name in rows_of else None for rows_of in (ours, theirs)]
        ratio = f"{speeds[1] / speeds[0]:.2f}x" if speeds[0] and speeds[1] else ""
        rows.append((name, *(significant(speed) if speed else "" for speed in speeds), ratio))
    return f"{_table(facts)}\n{_table(rows)}"


def _heading(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine, settings = record["machine"], record["settings"]
    limit = settings["memory_bytes"]
    prompts = int(settings["prompts"])
    disk = record["disk"]
    measured = [f"{readable(int(speed))}/s" for speed in disk["bytes_per_s"]] if disk else []
    speeds = f"{measured[0]} before, {measured[1]} after" if len(measured) == 2 else ", ".join(measured)
    sampled = f"temperature {float(settings['temperature']):g}" if settings["temperature"] else "greedy"
    return [
        ("processor", f"{machine['cpu']}, {int(machine['cores'])} cores"),
        (
            "memory",
            readable(int(machine["memory_bytes"])) + (f", {readable(int(limit))} used" if limit else ""),
        ),
        ("disk", f"{machine['disk']} {speeds}".strip()),
        ("system", str(machine["system"])),
        (
            "edgespec",
            f"{record['versions']['edgespec']}, llama-cpp-python {record['versions']['llama-cpp-python']}",
        ),
        ("model", f"{record['model']['name']}, {readable(int(record['model']['bytes']))}"),
        ("drafter", str(record["draft"])),
        (
            "asked",
            f"{prompts} prompt{'s' if prompts != 1 else ''}, "
            f"at most {int(settings['max_tokens'])} tokens, {sampled}",
        ),
    ]


def _speed(row: Mapping[str, Any]) -> float | None:
    speed = row["tokens_per_second"]
    return None if speed is None else float(speed)


def _table(lines: Sequence[Sequence[str]]) -> str:
    printable = [
        ["".join(c for c in cell if c.isprintable()).replace("|", "/") for cell in line] for line in lines
    ]
    widths = [max(map(len, column)) for column in zip(*printable, strict=True)]
    rule = ["-" * width for width in widths]
    shown = [printable[0], rule, *printable[1:]]
    return "".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |\n"
        for line in shown
    )
