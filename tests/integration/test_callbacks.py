"""Errors in Python functions that ggml and llama.cpp call, which C cannot pass on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.errors import StreamError
from edgespec.kernels import ggml
from edgespec.kernels.ggml import Address
from edgespec.kernels.watch import Watch
from edgespec.llama.runtime.backend import LogLines
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.graph import GraphObserver
from edgespec.llama.runtime.model import Model

# In a process of its own, as the device keeps its functions.
LENT = """
import json, sys
from edgespec.kernels import ggml
from edgespec.kernels.ggml import rpc

def available():
    if len(asked) == 1:
        asked.append(2)
        raise OSError("no such file")
    asked.append(1)
    return 1 << 30

asked, told = [], []
(*_, device) = rpc.own_devices()
limit = rpc.LimitedMemory(device, lambda: 1 << 20, available, told.append)
kind = ggml.functions()["ggml_backend_dev_buffer_type"](device)
free = [rpc.describe(device).free for _ in range(3)]
asked.clear(), asked.append(1)
buffer = ggml.functions()["ggml_backend_buft_alloc_buffer"](kind, 1 << 10)
print(json.dumps({"free": free, "told": [str(error) for error in told], "refused": not buffer}))
"""


class Failing(GraphObserver):
    """Fails once, at a product, when it is asked or when that was computed."""

    def __init__(self, *, computed: bool) -> None:
        self.left = 1
        self._computed = computed
        self.watch = Watch()
        self.watch.ask_about_operation(ggml.product())

    def reached(self, node: Address) -> bool:
        """Fail, or stop the graph."""
        if not self._computed:
            self._fail()
        return bool(self.left)

    def computed(self, node: Address) -> None:
        """Fail, the first time."""
        self._fail()

    def _fail(self) -> None:
        if self.left:
            self.left -= 1
            raise StreamError("The disk is gone.")


@pytest.mark.parametrize("computed", [True, False])
def test_an_error_within_a_pass_ends_it_and_is_raised_after_it(
    computed: bool,
    short_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = Model(short_path)
    observer = Failing(computed=computed)
    sizes = {"n_cells": 256, "n_rows": 8, "n_outputs": 8, "n_sequences": 1, "n_threads": 1}
    context = Context(model, **sizes, observers=[observer])
    batch = TokenBatch.run([1, 2, 3], 0, 1, "last")
    with pytest.raises(StreamError, match="The disk is gone"):
        context.decode(batch)
    context.clear()
    context.decode(batch)
    found = context.logits().copy()
    model.close()
    model = Model(short_path)
    context = Context(model, **sizes)
    context.decode(batch)
    assert (context.logits() == found).all()
    model.close()
    assert "Exception ignored" not in capfd.readouterr().err


def test_an_error_while_a_model_is_loaded_ends_that_and_is_raised_after_it(short_path: Path) -> None:
    def report(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model(short_path, on_progress=report)


def test_an_interrupt_while_a_context_is_made_arrives(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python handles it in whatever it executes next, which may be a callback for llama.cpp's log."""
    add = LogLines.add

    def interrupted(lines: LogLines, level: int, text: str) -> None:
        monkeypatch.setattr(LogLines, "add", add)
        signal.raise_signal(signal.SIGINT)
        add(lines, level, text)

    with Model(short_path) as model:
        sizes = {"n_cells": 64, "n_rows": 8, "n_outputs": 1, "n_sequences": 1, "n_threads": 1}
        monkeypatch.setattr(LogLines, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Context(model, **sizes)
        Context(model, **sizes).decode(TokenBatch.run([0], 0, n_sequences=1, logits="last"))


def test_nothing_is_lent_while_free_memory_is_unknown() -> None:
    done = subprocess.run([sys.executable, "-c", LENT], capture_output=True, text=True, check=True)
    assert "Exception ignored" not in done.stderr
    found = json.loads(done.stdout)
    assert found == {"free": [1 << 20, 0, 1 << 20], "told": ["no such file"] * 2, "refused": True}
