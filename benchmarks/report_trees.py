"""The table and the plot of benchmarks.trees."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


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
    counts = ", ".join(f"{prompts[p, t]} at {p}/{t:g}" for p in pairs for t in temperatures)
    print(f"Prompts: {counts}.\n")
    for temperature in temperatures:
        print(f"Temperature {temperature:g}, tokens a pass, mean over the pairs:\n")
        print("| tree | " + " | ".join(str(b) for b in budgets) + " | mean |")
        print("|---|" + "---|" * (len(budgets) + 1))
        for method in methods:
            row = [
                float(np.mean([cells[p, temperature, method, b].tokens_per_pass for p in pairs]))
                for b in budgets
            ]
            figures = " | ".join(f"{value:.2f}" for value in [*row, float(np.mean(row))])
            print(f"| {method} | {figures} |")
        print()
    for temperature in temperatures:
        print(f"Temperature {temperature:g}, tokens a pass by pair, mean over the budgets:\n")
        print("| tree | " + " | ".join(pairs) + " |")
        print("|---|" + "---|" * len(pairs))
        for method in methods:
            row = [
                float(np.mean([cells[p, temperature, method, b].tokens_per_pass for b in budgets]))
                for p in pairs
            ]
            print(f"| {method} | " + " | ".join(f"{value:.2f}" for value in row) + " |")
        print()
    middle = budgets[len(budgets) // 2]
    print(f"Drafting at budget {middle}, temperature {temperatures[0]:g}, mean over the pairs, a pass:\n")
    print("| tree | steps | nodes read | drafter, ms | growing, ms |")
    print("|---|---|---|---|---|")
    for method in methods:
        of = [cells[p, temperatures[0], method, middle] for p in pairs]
        steps, rows, drafter, growing = (
            float(np.mean([getattr(c, name) / c.passes for c in of]))
            for name in ("steps", "rows", "draft_s", "grow_s")
        )
        print(f"| {method} | {steps:.1f} | {rows:.1f} | {1000 * drafter:.0f} | {1000 * growing:.1f} |")
    _plot(cells, pairs, temperatures, methods, budgets, output / "trees.svg")


def _cells(lines: list[dict[str, Any]]) -> tuple[Cells, dict[tuple[str, float], int]]:
    """Sums over the texts that all methods and budgets were led along, and how many those are."""
    curves = {line["pair"]: line["curve"] for line in lines if "curve" in line}
    texts: dict[tuple[str, float, int], dict[str, Any]] = defaultdict(dict)
    for line in lines:
        if "runs" in line:
            texts[line["pair"], line["temperature"], line["question"]] |= line["runs"]
    names = {name for runs in texts.values() for name in runs}
    cells: Cells = defaultdict(Cell)
    prompts: dict[tuple[str, float], int] = defaultdict(int)
    for (pair, temperature, _), runs in texts.items():
        if set(runs) < names:
            continue
        prompts[pair, temperature] += 1
        curve = curves[pair]
        sizes = [int(size) for size in curve]
        for name, run in runs.items():
            method, budget = name.rsplit(" ", 1)
            cell = cells[pair, temperature, method, int(budget)]
            cell.tokens += run["tokens"]
            cell.passes += run["passes"]
            cell.nodes += run["nodes"]
            cell.grow_s += run["grow_s"]
            for rows, count in run["steps"].items():
                cell.steps += count
                cell.rows += int(rows) * count
                cell.draft_s += count * float(np.interp(int(rows), sizes, list(curve.values())))
    return cells, prompts


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
                values = [cells[pair, temperature, method, b].tokens_per_pass for b in budgets]
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
