"""llama.cpp beside other libraries that use the processor's tiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_BESIDE_TORCH = """
import sys
import edgespec

def answer(engine):
    engine.target.rewind(0)
    return engine.generate("Tell me about the sea.", edgespec.GenerationConfig(max_tokens=8)).tokens

with edgespec.load(sys.argv[1], draft="none") as engine:
    alone = answer(engine)
    import torch
    for _ in range(3):
        matrix = torch.ones(256, 256, dtype=torch.bfloat16)
        assert float((matrix @ matrix)[0, 0]) == 256
        assert answer(engine) == alone
"""


@pytest.mark.slow
def test_pytorch_in_the_same_thread_does_no_harm(smol_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BESIDE_TORCH, str(smol_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
