"""Plots as inline SVG with the page's colours: pass curve, yield, where the time goes."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from edgespec.bench.rows.figures import Row
from edgespec.errors import BackendError

# Colours that are written into the SVG, and the page's variables that take their place.
_TEXT, _GRID = "#010203", "#020304"
_COLOURS = {_TEXT: "--text", _GRID: "--grid"} | {f"#0304{n:02x}": f"--c{n}" for n in range(1, 6)}
_BLUE, _ORANGE, _GREEN, _GREY, _VIOLET = (f"#0304{n:02x}" for n in range(1, 6))
_PLACES = {"memory": ("in memory", _GREEN), "mmap": ("memory-mapped", _GREY), "stream": ("streamed", _BLUE)}
_OF_MAPPED = " With memory-mapped weights, waiting for the disk cannot be separated from computing."
_WIDTH = 5.2  # inches; narrow, so that text is not too small on a phone


def check_matplotlib() -> None:
    """Find out before anything is measured whether plots can be made.

    Raises:
        BackendError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError(
            "--html needs matplotlib, which is not installed.",
            "Install it (pip install matplotlib), or leave out --html.",
        )


def plots(rows: Sequence[Row], curves: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Title, explanation and SVG of each plot for which there are figures.

    Args:
        curves: as in the document.
    """
    check_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    made = []
    with matplotlib.rc_context(_STYLE):
        for number, (title, text, draw) in enumerate(_plots(rows, curves)):
            made.append((title, text, _svg(draw, f"p{number}")))
    return made


_Draw = Callable[[], Any]


def _plots(rows: Sequence[Row], curves: dict[str, Any]) -> list[tuple[str, str, _Draw]]:
    done = [row for row in rows if row.round_s]
    wanted: list[tuple[str, str, _Draw]] = []
    if curves:
        knees = ", ".join(f"{_PLACES[place][0]} {curve['knee']}" for place, curve in curves.items())
        wanted.append(
            (
                "What a pass costs",
                "Seconds per pass, by its number of rows. The dot is the knee: the largest number that "
                f"costs at most a quarter more than one row ({knees}). Up to there a tree is nearly free.",
                lambda: _pass_curve(curves),
            )
        )
    if any(row.tree != "none" for row in done):
        wanted.append(
            (
                "What a tree yields",
                "Tokens per pass by the nodes of its tree. Plain decoding yields one.",
                lambda: _yield(done),
            )
        )
    if done:
        wanted.append(
            (
                "Where the time goes",
                "Seconds per token; shorter is faster."
                + (_OF_MAPPED if any(row.place == "mmap" for row in done) else ""),
                lambda: _breakdown(done),
            )
        )
    return wanted


def _pass_curve(curves: dict[str, Any]) -> Any:
    figure, axes = _axes(3.1)
    for place, curve in curves.items():
        name, colour = _PLACES[place]
        points = {int(rows): pass_["s"] for rows, pass_ in curve["passes"].items()}
        axes.plot(list(points), list(points.values()), color=colour, marker=".", markersize=4, label=name)
        axes.plot([curve["knee"]], [points[curve["knee"]]], color=colour, marker="o", markersize=8)
        waits = [pass_["wait_s"] for pass_ in curve["passes"].values()]
        if max(waits) > 0:
            axes.plot(list(points), waits, color=colour, linestyle=":", label=f"{name}: waiting for the disk")
    axes.set_xscale("log", base=2)
    ticks = sorted({int(rows) for curve in curves.values() for rows in curve["passes"]} - {48})
    axes.set_xticks(ticks, [str(rows) for rows in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of the pass")
    axes.set_ylabel("seconds")
    axes.legend(loc="upper left")
    return figure


def _yield(rows: Sequence[Row]) -> Any:
    figure, axes = _axes(3.1)
    for place, (name, colour) in _PLACES.items():
        fixed = [row for row in rows if row.place == place and isinstance(row.tree, int)]
        auto = [row for row in rows if row.place == place and row.tree == "auto"]
        if not fixed and not auto:
            continue
        points = sorted([(1.0, 1.0), *((row.nodes_per_pass, row.tokens_per_pass) for row in fixed)])
        axes.plot(
            *zip(*points, strict=True), color=colour, marker="o", markersize=5, label=f"{name}, by budget"
        )
        for row in auto:
            label = f"{name}, sized by cost"
            at = row.nodes_per_pass, row.tokens_per_pass
            axes.plot(*at, color=_ORANGE, marker="D", markersize=6, linestyle="", label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("nodes of the tree, mean")
    axes.set_ylabel("tokens per pass")
    axes.legend(loc="lower right")
    return figure


def _breakdown(rows: Sequence[Row]) -> Any:
    figure, axes = _axes(0.9 + 0.52 * len(rows))
    parts = {
        "drafting": (_ORANGE, [row.draft_s or 0.0 for row in rows]),
        "computing the pass": (
            _BLUE,
            [0.0 if row.place == "mmap" else (row.pass_s or 0.0) - (row.wait_s or 0.0) for row in rows],
        ),
        "waiting for the disk": (_GREY, [row.wait_s or 0.0 for row in rows]),
        "computing and paging": (
            _VIOLET,
            [(row.pass_s or 0.0) if row.place == "mmap" else 0.0 for row in rows],
        ),
        "rest": (_GREEN, [(row.round_s or 0.0) - (row.draft_s or 0.0) - (row.pass_s or 0.0) for row in rows]),
    }
    per_pass = [row.tokens_per_pass or 1.0 for row in rows]
    places = [float(n) for n in range(len(rows))]
    left = [0.0] * len(rows)
    for name, (colour, seconds) in parts.items():
        if not any(seconds):
            continue
        widths = [max(s, 0.0) / tokens for s, tokens in zip(seconds, per_pass, strict=True)]
        axes.barh(places, widths, left=left, height=0.38, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    _name_bars(axes, rows, above=0.28)
    axes.set_xlabel("seconds per token")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def _name_bars(axes: Any, rows: Sequence[Row], above: float) -> None:
    """Put names above the bars, where long ones have room, instead of beside them."""
    for place, row in enumerate(rows):
        axes.text(0, place - above, row.name, ha="left", va="bottom", color=_TEXT)
    axes.set_yticks([])
    axes.set_ylim(len(rows) - 0.5, -0.75)
    axes.grid(axis="y", visible=False)


_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's font
    "svg.hashsalt": "edgespec",
    "font.size": 10,
    "text.color": _TEXT,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "figure.constrained_layout.use": True,
}


def _axes(height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height))
    return figure, figure.subplots()


def _svg(draw: _Draw, prefix: str) -> str:
    """A figure as an SVG element of a page, whose ids do not clash with those of others."""
    buffer = io.StringIO()
    draw().savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", text)
    text = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, sans-serif", text)
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, f"var({variable})")
    return text.strip()
