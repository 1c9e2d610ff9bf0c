"""All results as one self-contained HTML page: nothing is loaded from elsewhere, and there are no scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from edgespec.bench.report.plots import plots
from edgespec.bench.report.row_tables import shown_columns
from edgespec.bench.rows.figures import Row
from edgespec.units import readable, readable_rate

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2430; --soft: #5b6675; --grid: #d8dde4;
  --c1: #2563a8; --c2: #d9730d; --c3: #2e8b57; --c4: #98a2b0; --c5: #8256b8;
  --bad: #b42318; --band: #f5f7f9; }
@media (prefers-color-scheme: dark) { :root { --back: #14181e; --text: #e4e8ee; --soft: #9aa5b4;
  --grid: #363f4b; --c1: #6cb2ff; --c2: #ffad57; --c3: #6fd49a; --c4: #7d8896; --c5: #b99bec; --bad: #ff8f84;
  --band: #1b2129; } }
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
td.bad { color: var(--bad); }
tr.best td { background: var(--band); font-weight: 600; }
.meaning { max-width: none; }
.plots { display: grid; gap: 1.5rem 2.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figure svg { width: 100%; height: auto; max-width: 36rem; display: block; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.86rem; }
pre { overflow-x: auto; padding: 0.8rem; background: var(--band); }
summary { cursor: pointer; }
"""


def make_page(rows: Sequence[Row], document: dict[str, Any]) -> str:
    """The page.

    Raises:
        BackendError: matplotlib is missing.
    """
    figures = "".join(
        f"<figure><h2>{escape(title)}</h2>{svg}<figcaption>{escape(text)}</figcaption></figure>"
        for title, text, svg in plots(rows, document["curves"])
    )
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
        f'<div class="plots">{figures}</div>\n'
        f"<h2>Test setup</h2>\n{_facts(document)}\n"
        + (f"<h2>Notes</h2><ul>{notes}</ul>\n" if notes else "")
        + "<h2>All figures</h2><details><summary>The same as JSON</summary><pre>"
        f"{escape(json.dumps(document, ensure_ascii=False, indent=1))}</pre></details>\n</body></html>\n"
    )


def _headline(rows: Sequence[Row], document: dict[str, Any]) -> str:
    """The main result, in a sentence."""
    if document["interrupted"]:
        return '<p class="bad">Interrupted: not all rows were measured.</p>'
    best = fastest(rows)
    plain = [row for row in rows if row.place == (best.place if best else "") and row.tree == "none"]
    if best is None or best.tokens_per_second is None:
        return '<p class="bad">No row worked.</p>'
    text = f"Fastest: {best.name}, {readable_rate(best.tokens_per_second)}"
    if plain and plain[0].tokens_per_second and plain[0] is not best:
        text += f", {best.tokens_per_second / plain[0].tokens_per_second:.1f} times as fast as plain decoding"
    return f"<p>{escape(text)}.</p>"


def fastest(rows: Sequence[Row]) -> Row | None:
    """The fastest row within the limit; None if none worked."""
    within = [row for row in rows if row.tokens_per_second and "no limit" not in row.marks]
    return max(within, key=lambda row: row.tokens_per_second or 0.0, default=None)


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


def _cap(limits: dict[str, Any]) -> str | None:
    if not limits["cap_bytes"]:
        return None
    size = readable(limits["cap_bytes"])
    return (
        f"{size} requested, but not possible here" if limits["cap"] == "none" else f"{size}, {limits['cap']}"
    )


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


def _facts(document: dict[str, Any]) -> str:
    machine, limits, model = document["machine"], document["limits"], document["model"]
    disk = document["disk"]
    speeds = " and ".join(f"{readable(speed)}/s" for speed in disk["bytes_per_s"]) if disk else ""
    how = "direct reads" if disk and disk["direct"] else "reads through the page cache"
    facts = {
        "Model": model["name"]
        if model["widened_from"] or model.get("mixed_from")
        else f"{model['name']}, {readable(model['bytes'])}",
        "Drafter": document["draft"],
        "Processor": f"{machine['cpu']}, {machine['cores']} cores used" if machine["cpu"] else None,
        "Memory": readable(machine["memory_bytes"]),
        "Memory budget": readable(limits["memory_bytes"]) if limits["memory_bytes"] else "what is available",
        "Memory cap": _cap(limits),
        "Disk": machine["disk"],
        "Disk speed": f"{speeds} before and after, {how}" if disk else None,
        "System": machine["system"],
        "Versions": ", ".join(f"{name} {value}" for name, value in document["versions"].items() if value),
        "Asked": document["asked"],
    }
    entries = "".join(f"<dt>{escape(n)}</dt><dd>{escape(str(v))}</dd>" for n, v in facts.items() if v)
    command = f"<dt>Command</dt><dd><code>{escape(document['command'])}</code></dd>"
    return f"<dl>{entries}{command}</dl>"
