"""Code that runs at the start of a program and of its isolated children."""

from __future__ import annotations

from pathlib import Path

from edgespec.processes import children

SABOTAGED_BOOT = children._BOOT.replace("from importlib", "import sabotage\nfrom importlib")


_UNTRIED = """
from pathlib import Path
from edgespec.kernels.native import build
build.reports_folder = lambda: Path({folder!r})
"""


def sabotage(folder: Path, code: str, *, untried: bool = False) -> None:
    """Have every Python that is started with this folder in PYTHONPATH run the code, and its children.

    Args:
        untried: the processor's kernels have not been tried; `folder`/reports has the report then.
    """
    reports = _UNTRIED.format(folder=str(folder / "reports")) if untried else ""
    (folder / "sabotage.py").write_text(reports + code)
    (folder / "sitecustomize.py").write_text(
        f"import sabotage\nfrom edgespec.processes import children\nchildren._BOOT = {SABOTAGED_BOOT!r}\n"
    )
