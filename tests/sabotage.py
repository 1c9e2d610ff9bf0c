"""Code that runs at the start of a program and of its isolated children."""

from __future__ import annotations

from pathlib import Path

from edgespec.processes import children

SABOTAGED_BOOT = children._BOOT.replace("from importlib", "import sabotage\nfrom importlib")


def sabotage(folder: Path, code: str) -> None:
    """Have every Python that is started with this folder in PYTHONPATH run the code, and its children."""
    (folder / "sabotage.py").write_text(code)
    (folder / "sitecustomize.py").write_text(
        f"import sabotage\nfrom edgespec.processes import children\nchildren._BOOT = {SABOTAGED_BOOT!r}\n"
    )
