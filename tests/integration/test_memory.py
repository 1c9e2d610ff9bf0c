"""What the program may hold: imports, caches, and whole runs in a control group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_IMPORTS = """
import sys, edgespec
with edgespec.load({model!r}, draft={draft!r}, context=256, threads=1) as engine:
    config = edgespec.GenerationConfig(max_tokens=8, temperature=0.8, top_p=0.9, seed=1)
    assert engine.generate("one two three one two three one two", config, raw=True).tokens
print([name for name in ("torch", "hf_xet", "huggingface_hub") if name in sys.modules])
"""


@pytest.mark.parametrize("draft", ["none", "lookup", "model"])
def test_answers_need_no_large_library(draft: str, smol_path: Path, q4_drafter_path: Path) -> None:
    program = _IMPORTS.format(model=str(smol_path), draft=str(q4_drafter_path) if draft == "model" else draft)
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.stdout.strip() == "[]", child.stderr
