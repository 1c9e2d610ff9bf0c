"""All results as one self-contained HTML page: nothing is loaded from elsewhere, and there are no scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from edgespec.base.units import readable, readable_duration, readable_rate
from edgespec.bench.report.document import as_text
from edgespec.bench.report.row_tables import shown_columns
from edgespec.bench.rows.figures import Row

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2430; --soft: #5b6675; --grid: #d8dde4;
  --memory: #2e8b57; --mmap: #d9730d; --stream: #2563a8; --bad: #b42318; --band: #f5f7f9; }
@media (prefers-color-scheme: dark) { :root { --back: #14181e; --text: #e4e8ee; --soft: #9aa5b4;
  --grid: #363f4b; --memory: #6fd49a; --mmap: #ffad57; --stream: #6cb2ff; --bad: #ff8f84; --band: #1b2129; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 84rem; background: var(--back);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.3rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p { margin: 0.4rem 0; max-width: 46rem; }
.soft, figcaption, .meaning { color: var(--soft); font-size: 0.9rem; }
.bad { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
th, td { padding: 0.35rem 0.55rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { padding-left: 0; text-align: left; position: sticky; left: 0;
  background: var(--back); }
@media (max-width: 40rem) { th:first-child, td:first-child { white-space: normal; min-width: 8.5rem; } }
tr.best td { background: var(--band); font-weight: 600; }
.meaning { max-width: none; }
figure { margin: 0; max-width: 36rem; }
svg { width: 100%; height: auto; display: block; font-size: 12px; fill: var(--text); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.86rem; }
pre { overflow-x: auto; padding: 0.8rem; background: var(--band); }
summary { cursor: pointer; }
"""
_PLACES = {"memory": "in memory", "mmap": "memory-mapped", "stream": "streamed"}
# Of the plot, in its own units: its size, and the margins at the left and below, which hold the numbers.
_WIDTH, _HEIGHT, _LEFT, _BELOW = 520, 280, 64, 40


def make_page(rows: Sequence[Row], document: dict[str, Any]) -> str:
    title = escape(document["title"])
    date = document["date"][:16].replace("T", " ")
    notes = "".join(f"<li>{escape(note)}</li>" for note in document["notes"])
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>\n"
        f'<h1>{title}</h1>\n<p class="soft">{escape(date)} UTC</p>\n'
        f"{_headline(rows, document)}\n"
        f'<div class="scroll">{_table(rows)}</div>\n{_failures(rows)}{_meanings(rows)}\n'
        f"{_pass_costs(document['curves'])}\n"
        f"<h2>Test setup</h2>\n{_facts(document)}\n"
        + (f"<h2>Notes</h2><ul>{notes}</ul>\n" if notes else "")
        + "<h2>All figures</h2><details><summary>The same as JSON</summary><pre>"
        f"{escape(as_text(document))}</pre></details>\n</body></html>\n"
    )


def fastest(rows: Sequence[Row]) -> Row | None:
    """The fastest row within the limit; None if none worked."""
    within = [row for row in rows if row.tokens_per_second and "no limit" not in row.marks]
    return max(within, key=lambda row: row.tokens_per_second or 0.0, default=None)


def _headline(rows: Sequence[Row], document: dict[str, Any]) -> str:
    """The main result, in a sentence."""
    if document["interrupted"]:
        return '<p class="bad">Interrupted: not all rows were measured.</p>'
    best = fastest(rows)
    if best is None or best.tokens_per_second is None:
        return '<p class="bad">No row worked.</p>'
    text = f"Fastest: {best.name}, {readable_rate(best.tokens_per_second)}"
    plain = next((row for row in rows if row.place == best.place and row.tree == "none"), best)
    if plain.tokens_per_second and plain is not best:
        text += f", {best.tokens_per_second / plain.tokens_per_second:.1f} times as fast as plain decoding"
    return f"<p>{escape(text)}.</p>"


def _table(rows: Sequence[Row]) -> str:
    columns = shown_columns(rows)
    best = fastest(rows)
    head = "".join(f'<th scope="col" title="{escape(c.meaning)}">{escape(c.title)}</th>' for c in columns)
    body = ""
    for row in rows:
        cells = "".join(_cell(column.cell(row)) for column in columns)
        mark = ' class="best"' if row is best else ""
        body += f"<tr{mark}><td>{escape(row.name)}</td>{cells}</tr>\n"
    return f'<table><thead><tr><th scope="col">row</th>{head}</tr></thead><tbody>\n{body}</tbody></table>'


def _cell(text: str) -> str:
    return f'<td class="bad">{text}</td>' if text in ("NO", "failed") else f"<td>{escape(text)}</td>"


def _failures(rows: Sequence[Row]) -> str:
    failed = [
        f'<p class="bad">{escape(row.name)} failed: {escape(row.error)}</p>' for row in rows if row.error
    ]
    if any(row.cut for row in rows):
        failed.append('<p class="soft">* cut off by --row-seconds.</p>')
    return "".join(failed)


def _meanings(rows: Sequence[Row]) -> str:
    entries = "; ".join(f"<b>{escape(c.title)}</b>: {escape(c.meaning)}" for c in shown_columns(rows))
    return f'<p class="meaning">{entries}.</p>' if entries else ""


def _pass_costs(curves: dict[str, Any]) -> str:
    """A plot of the seconds of a pass by its rows, with a dot at the knee; empty without figures."""
    if not curves:
        return ""
    places: dict[str, dict[int, float]] = {
        place: {int(rows): pass_["s"] for rows, pass_ in curve["passes"].items()}
        for place, curve in curves.items()
    }
    most = max(rows for passes in places.values() for rows in passes)
    top = max(seconds for passes in places.values() for seconds in passes.values())

    def x(rows: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - 16) * math.log2(rows) / max(math.log2(most), 1.0)

    def y(seconds: float) -> float:
        return _HEIGHT - _BELOW - (_HEIGHT - _BELOW - 12) * seconds / top

    drawn = [
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(at):.0f}" y2="{y(at):.0f}" style="stroke:var(--grid)"/>'
        f'<text x="{_LEFT - 6}" y="{y(at) + 4:.0f}" text-anchor="end">{readable_duration(at)}</text>'
        for at in (top * part / 4 for part in range(1, 5))
    ]
    drawn += [
        f'<text x="{x(rows):.0f}" y="{_HEIGHT - _BELOW + 18}" text-anchor="middle">{rows}</text>'
        for rows in (2**power for power in range(most.bit_length()))
    ]
    drawn.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">rows of the pass</text>')
    for number, (place, seconds) in enumerate(places.items()):
        points = " ".join(f"{x(rows):.1f},{y(s):.1f}" for rows, s in seconds.items())
        knee = curves[place]["knee"]
        drawn.append(
            f'<g style="stroke:var(--{place});fill:none"><polyline points="{points}" stroke-width="2"/></g>'
            f'<circle cx="{x(knee):.1f}" cy="{y(seconds[knee]):.1f}" r="5" style="fill:var(--{place})"/>'
            f'<text x="{_LEFT + 8}" y="{28 + 16 * number}" style="fill:var(--{place})">{_PLACES[place]}, '
            f"knee at {knee} rows</text>"
        )
    return (
        f'<figure><h2>What a pass costs</h2><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"{''.join(drawn)}</svg><figcaption>Time of a pass, by its number of rows. The dot is the knee: "
        "the largest number that costs at most a quarter more than one row. Up to it a tree is nearly free."
        "</figcaption></figure>"
    )


def _facts(document: dict[str, Any]) -> str:
    machine, model, disk = document["machine"], document["model"], document["disk"]
    memory = document["settings"]["memory_bytes"]
    speeds = " and ".join(f"{readable(speed)}/s" for speed in disk["bytes_per_s"]) if disk else ""
    how = "direct reads" if disk and disk["direct"] else "reads through the page cache"
    facts = {
        "Model": f"{model['name']}, {readable(model['bytes'])}",
        "Drafter": document["draft"],
        "Processor": f"{machine['cpu']}, {machine['cores']} cores used" if machine["cpu"] else None,
        "Memory": readable(machine["memory_bytes"]),
        "Memory budget": readable(memory) if memory else "what is available",
        "Disk": machine["disk"],
        "Disk speed": f"{speeds} before and after, {how}" if disk else None,
        "System": machine["system"],
        "Versions": ", ".join(f"{name} {value}" for name, value in document["versions"].items()),
        "Asked": document["asked"],
    }
    entries = "".join(f"<dt>{escape(n)}</dt><dd>{escape(str(v))}</dd>" for n, v in facts.items() if v)
    command = f"<dt>Command</dt><dd><code>{escape(document['command'])}</code></dd>"
    return f"<dl>{entries}{command}</dl>"
