"""Tries llama.cpp's kernels and prints what works: python -m edgespec.doctor.kernels_check

Exit status 1 if llama.cpp does not work here at all. scripts/setup.py ends with this.
"""

from __future__ import annotations

import sys

from edgespec.doctor.kernels import examine_kernels


def main() -> int:
    """Print a line for each layout; returns the exit code."""
    facts = examine_kernels()
    if facts.error is not None:
        print(facts.error)
        return facts.error.exit_code
    for layout in facts.layouts:
        if layout.problem:
            print(f"{layout.name} is not used: {layout.problem}. {layout.remedy}")
        else:
            print(f"{layout.name} works{f', {layout.speed_text}' if layout.speed_text else ''}")
    if not facts.layouts:
        print("only plain kernels: this processor has no others")
    return 0


if __name__ == "__main__":
    sys.exit(main())
