"""The table and the plot of benchmarks.trees."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import print_head


@dataclass
class Cell:
    """One method at one budget, summed over prompts."""

    tokens: int = 0
    passes: int = 0
    nodes: int = 0
    steps: int = 0
    rows: int = 0
    draft_s: float = 0.0
    grow_s: float = 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes


Cells = dict[tuple[str, float, str, int], Cell]  # pair, temperature, method, budget


def report(results: Path, output: Path) -> None:
    """Print the tables as Markdown, and write the plot to `output`/trees.svg."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    cells, prompts = _cells(lines)
    pairs = list(dict.fromkeys(key[0] for key in cells))
    temperatures = sorted({key[1] for key in cells})
    methods = list(dict.fromkeys(key[2] for key in cells))
    budgets = sorted({key[3] for key in cells})
    for temperature in temperatures:
        counts = {budget: prompts[temperature, budget] for budget in budgets if prompts[temperature, budget]}
        print(f"Temperature {temperature:g}, tokens a pass, mean over the pairs, along ", end="")
        print(", ".join(f"{count} texts at {budget} nodes" for budget, count in counts.items()) + ":\n")
        print_head("tree", *map(str, counts), "mean", "of specexec")
        rows = {
            method: [_over(pairs, cells, temperature, method, budget) for budget in counts]
            for method in methods
        }
        for method, row in rows.items():
            ratios = [a / b for a, b in zip(row, rows.get("specexec", []), strict=False)]
            print(f"| {method} | {_figures([*row, _mean(row), _mean(ratios)])} |")
        print()
        print(f"Temperature {temperature:g}, tokens a pass by pair, mean over the budgets:\n")
        print_head("tree", *pairs)
        for method in methods:
            by_pair = [[_over([p], cells, temperature, method, b) for b in counts] for p in pairs]
            print(f"| {method} | {_figures([_mean(row) for row in by_pair])} |")
        print()
    most = max(budgets)
    print(f"Drafting at budget {most}, temperature {temperatures[0]:g}, mean over the pairs, a pass:\n")
    print_head("tree", "steps", "nodes read", "drafter, ms", "growing, ms")
    for method in methods:
        of = [c for p in pairs if (c := cells.get((p, temperatures[0], method, most))) is not None]
        steps, rows_read, drafter, growing = (
            _mean([getattr(c, name) / c.passes for c in of])
            for name in ("steps", "rows", "draft_s", "grow_s")
        )
        print(f"| {method} | {steps:.1f} | {rows_read:.1f} | {1000 * drafter:.0f} | {1000 * growing:.1f} |")
    _print_categories(lines, methods, most)
    _plot(cells, pairs, temperatures, methods, budgets, output / "trees.svg")


def _print_categories(lines: Sequence[dict[str, Any]], methods: Sequence[str], budget: int) -> None:
    """Tokens a pass by category of question, over all pairs and the texts that all methods were led along."""
    names = [f"{method} {budget}" for method in methods]
    for temperature in sorted({line["temperature"] for line in lines if "runs" in line}):
        tokens: dict[tuple[str, str], int] = defaultdict(int)
        passes: dict[tuple[str, str], int] = defaultdict(int)
        for line in lines:
            runs = line.get("runs", {})
            if line.get("temperature") == temperature and all(name in runs for name in names):
                for name in names:
                    tokens[line["category"], name] += runs[name]["tokens"]
                    passes[line["category"], name] += runs[name]["passes"]
        print(f"\nTemperature {temperature:g}, {budget} nodes, tokens a pass by category:\n")
        print_head("category", *methods)
        for category in dict.fromkeys(category for category, _ in tokens):
            row = [tokens[category, name] / passes[category, name] for name in names]
            print(f"| {category} | {_figures(row)} |")


def _over(pairs: list[str], cells: Cells, temperature: float, method: str, budget: int) -> float:
    """Tokens a pass, mean over pairs; not a number where the method was not run for one of them."""
    of = [cells.get((pair, temperature, method, budget)) for pair in pairs]
    return _mean([c.tokens_per_pass if c is not None else math.nan for c in of])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _figures(values: Sequence[float]) -> str:
    return " | ".join("" if math.isnan(value) else f"{value:.2f}" for value in values)


def _cells(lines: list[dict[str, Any]]) -> tuple[Cells, dict[tuple[float, int], int]]:
    """Sums over texts, and how many those are by temperature and budget.

    A text counts at a budget once every method that was run at this budget and temperature was led along it
    for all pairs: so all figures that stand side by side come from the same texts.
    """
    curves = {line["pair"]: line["curve"] for line in lines if "curve" in line}
    pairs = list(curves)
    runs: dict[tuple[float, int], dict[int, dict[tuple[str, str], dict[str, Any]]]] = {}
    for line in lines:
        for name, run in line.get("runs", {}).items():
            method, budget = name.rsplit(" ", 1)
            texts = runs.setdefault((line["temperature"], int(budget)), {})
            texts.setdefault(line["question"], {})[line["pair"], method] = run
    cells: Cells = defaultdict(Cell)
    prompts: dict[tuple[float, int], int] = defaultdict(int)
    for (temperature, budget), texts in runs.items():
        methods = {method for text in texts.values() for _, method in text}
        for text in texts.values():
            if len(text) < len(methods) * len(pairs):
                continue
            prompts[temperature, budget] += 1
            for (pair, method), run in text.items():
                _add(cells[pair, temperature, method, budget], run, curves[pair])
    return dict(cells), prompts


def _add(cell: Cell, run: dict[str, Any], curve: dict[str, float]) -> None:
    cell.tokens += run["tokens"]
    cell.passes += run["passes"]
    cell.nodes += run["nodes"]
    cell.grow_s += run["grow_s"]
    sizes = [int(size) for size in curve]
    for rows, count in run["steps"].items():
        cell.steps += count
        cell.rows += int(rows) * count
        cell.draft_s += count * float(np.interp(int(rows), sizes, list(curve.values())))


def _plot(
    cells: Cells,
    pairs: list[str],
    temperatures: list[float],
    methods: list[str],
    budgets: list[int],
    path: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(temperatures), len(pairs), figsize=(4 * len(pairs), 3.2 * len(temperatures)), squeeze=False
    )
    for row, temperature in enumerate(temperatures):
        for column, pair in enumerate(pairs):
            panel = axes[row, column]
            for method in methods:
                values = [_over([pair], cells, temperature, method, b) for b in budgets]
                width = 2.2 if method.startswith("calibrated") else 1.2
                panel.plot(budgets, values, marker="o", markersize=3, linewidth=width, label=method)
            panel.set_xscale("log", base=2)
            panel.set_xticks(budgets, [str(b) for b in budgets])
            panel.set_title(f"{pair}, temperature {temperature:g}", fontsize=9)
            panel.set_ylim(bottom=1)
            panel.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("budget, nodes")
    axes[0, 0].set_ylabel("tokens a pass")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
