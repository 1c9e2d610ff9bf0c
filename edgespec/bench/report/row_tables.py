"""Rows as a Markdown table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.base.units import significant
from edgespec.bench.rows.figures import Row


@dataclass(frozen=True)
class TableColumn:
    """A column for people: its title, what it means, and a row's cell, which is empty if unknown."""

    title: str
    meaning: str
    cell: Callable[[Row], str]


COLUMNS = (
    TableColumn("tokens/s", "median (least-most) of the repetitions", lambda row: _speed(row)),
    TableColumn("tokens", "tokens per pass", lambda row: _number(row.tokens_per_pass, 2)),
    TableColumn("per seq.", "tokens/s per sequence", lambda row: _rate(row.tokens_per_second_a_text)),
    TableColumn("first s", "seconds to a sequence's first token", lambda row: _number(row.first_token_s, 2)),
    TableColumn("nodes", "nodes of a tree, the root included", lambda row: _number(row.nodes_per_pass, 1)),
    TableColumn("pass s", "seconds per pass of the target", lambda row: _number(row.pass_s, 3)),
    TableColumn("draft s", "seconds of drafting per pass", lambda row: _number(row.draft_s, 3)),
    TableColumn("read MiB", "MiB read from disk per pass", lambda row: _mebi(row.streamed_bytes_per_pass)),
    TableColumn("held", "share of experts held in memory", lambda row: _share(row.held)),
    TableColumn("hits", "share of needed experts found in memory", lambda row: _share(row.hit_rate)),
    TableColumn("disk", "share of the disk's limit reached", lambda row: _share(row.disk_share)),
    TableColumn("cpu", "share of the processor's limit reached", lambda row: _share(row.compute_share)),
    TableColumn("peak MiB", "peak memory in MiB", lambda row: _mebi(row.peak_rss_bytes)),
    TableColumn("identical", "same answers as the first exact row", lambda row: _identical(row)),
)


def shown_columns(rows: Sequence[Row]) -> list[TableColumn]:
    """The columns that are not empty in all rows."""
    return [column for column in COLUMNS if any(column.cell(row) for row in rows)]


def format_rows(rows: Sequence[Row], columns: int | None = None) -> str:
    """Markdown tables with aligned columns, and a line for each row that failed.

    Args:
        columns: of the window: a wider table continues below in another one. None keeps it whole.
    """
    text: list[str] = []
    for part in _parts(rows, columns):
        text += [*([""] if text else []), *_table(rows, part)]
    remarks = [f"{row.name} failed: {row.error}" for row in rows if row.error]
    if any(row.cut for row in rows):
        remarks.append("* cut off by --row-seconds.")
    return "".join(f"{line}\n" for line in [*text, *([""] if remarks else []), *remarks])


def _parts(rows: Sequence[Row], columns: int | None) -> list[list[TableColumn]]:
    """The columns of each table, so that none is wider than the window."""
    parts: list[list[TableColumn]] = [[]]
    for column in shown_columns(rows):
        if columns is not None and parts[-1] and len(_table(rows, [*parts[-1], column])[0]) > columns:
            parts.append([])
        parts[-1].append(column)
    return parts


def _table(rows: Sequence[Row], columns: Sequence[TableColumn]) -> list[str]:
    lines = [["row", *(column.title for column in columns)]]
    lines += [[row.name, *(column.cell(row) for column in columns)] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [_line(lines[0], widths), _line(rule, widths), *(_line(line, widths) for line in lines[1:])]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return f"| {' | '.join(padded)} |"


def _speed(row: Row) -> str:
    if row.error:
        return "failed"
    if row.tokens_per_second is None:
        return ""
    text, least, most = map(
        _rate, (row.tokens_per_second, row.tokens_per_second_min, row.tokens_per_second_max)
    )
    if least != most:
        text += f" ({least}-{most})"
    return text + ("*" if row.cut else "")


def _rate(tokens_per_second: float | None) -> str:
    return "" if tokens_per_second is None else significant(tokens_per_second)


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:.{0 if value >= 1000 else 1 if value >= 100 else digits}f}"


def _mebi(n_bytes: int | None) -> str:
    return f"{n_bytes / 2**20:.0f}" if n_bytes else ""


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _identical(row: Row) -> str:
    if row.identical is None:
        return ""
    if row.identical:
        return "yes"
    return "NO" if row.promised else "lossy" if row.lossy else "not exact"
