"""llama.cpp's kernel layouts on this processor: which are used, why others are not, and their speed.

`python -m edgespec.doctor.kernels` tries them and prints a line for each; scripts/setup.py ends with this.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.errors import EdgeSpecError


@dataclass(frozen=True)
class LayoutFacts:
    name: str  # ggml's, or that of EdgeSpec's own
    used: bool  # weights are rearranged for it
    problem: str = ""  # what is wrong with it; empty if it works
    remedy: str = ""
    speedup: tuple[tuple[int, float], ...] = ()  # rows, and speed relative to the plain layout

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"speedup": {str(rows): round(times, 3) for rows, times in self.speedup}}

    @property
    def speed_text(self) -> str:
        """The speedup for people; empty if it was not measured."""
        if not self.speedup:
            return ""
        times = ", ".join(f"{times:.1f}" for _rows, times in self.speedup)
        rows = ", ".join(str(rows) for rows, _times in self.speedup)
        return f"{times} times as fast as plain at {rows} rows"


@dataclass(frozen=True)
class KernelFacts:
    """All layouts of this processor."""

    layouts: tuple[LayoutFacts, ...] = ()
    setting: str = "auto"  # EDGESPEC_KERNELS
    error: EdgeSpecError | None = None  # llama.cpp does not work, or the setting cannot be satisfied

    def to_json(self) -> dict[str, Any]:
        return {"setting": self.setting, "layouts": [layout.to_json() for layout in self.layouts]}


def examine_kernels() -> KernelFacts:
    """Compile own kernels and try the layouts, unless that was done before."""
    from edgespec.kernels.layouts import available_layouts
    from edgespec.kernels.report import ROWS
    from edgespec.kernels.report_store import ensure_report, layouts_in_use, own_fault
    from edgespec.kernels.setting import OWN, kernels_setting, rebuild_command

    setting = ""
    try:
        setting = kernels_setting()
        report = ensure_report()
        names = [layout.name for layout in available_layouts()]
        used = layouts_in_use(names, report)
    except EdgeSpecError as error:
        return KernelFacts((), setting, error)
    layouts = []
    for name in dict.fromkeys([OWN, *names]):
        problem = report.problems.get(name, "")
        remedy = f"To fix it: {rebuild_command(name)}" if problem else ""
        if name == OWN and (problem or name not in names):
            problem, remedy = own_fault(problem)
        speedup = tuple(zip(ROWS, report.speedup(name) or (), strict=False))
        layouts.append(LayoutFacts(name, name in used, problem, remedy, speedup))
    return KernelFacts(tuple(layouts), setting)


def main() -> int:
    """Print a line for each layout; returns the exit code: 1 if llama.cpp does not work here at all."""
    facts = examine_kernels()
    if facts.error is not None:
        print(facts.error)
        return facts.error.exit_code
    for layout in facts.layouts:
        if layout.problem:
            print(f"{layout.name} is not used: {layout.problem}. {layout.remedy}")
        else:
            print(f"{layout.name} works{f', {layout.speed_text}' if layout.speed_text else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
