"""Models whose files change: in use, and between two runs. Never a crash, and never the wrong text."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import Engine, GenerationConfig, Session
from edgespec.engine.sequence import TextSequence
from edgespec.engine.sessions.file import SessionFile
from edgespec.errors import ModelFileError, StreamError
from edgespec.files import state as filestate
from edgespec.llama.quantize import make_drafter
from edgespec.llama.runtime.model import Model
from tests.conftest import made_once
from tests.least_memory import load_in_least_memory
from tests.tamper import rearrange

PROMPT = "Write a short story about a fox and a crow who share a house."
GREEDY = GenerationConfig(max_tokens=12)
MIB = 1 << 20


@pytest.fixture(scope="session")
def many_tokens_path(few_layers_path: Path) -> Path:
    """So large that a look at samples of the file misses some of its matrices."""
    return made_once(
        f"smol-few-layers-q4_0-{version('llama-cpp-python')}.gguf",
        lambda path: make_drafter(few_layers_path, path, quantization="q4_0"),
    )


@pytest.fixture
def model(many_tokens_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that may be written to, whose times count as old."""
    monkeypatch.setattr(filestate, "_COARSEST_NS", 0)
    return Path(shutil.copy(many_tokens_path, tmp_path / "model.gguf"))


USUAL = {"draft": "none", "context": 512, "exact": False, "threads": 1}


def load(model: Path, **options: Any) -> Engine:
    return edgespec.load(model, **{**USUAL, **options})


def load_streamed(model: Path, **options: Any) -> Engine:
    return load_in_least_memory(model, **{**USUAL, **options})


def tokens(engine: Engine) -> list[int]:
    engine.target.rewind(0)
    found = engine.generate(PROMPT, GREEDY).tokens
    assert len(found) > 8
    return list(found)


def text_of(model: Path, **options: Any) -> list[int]:
    with load(model, **options) as engine:
        return tokens(engine)


# --- in use --------------------------------------------------------------------------------------

TRUNCATING = """
import os, sys
import edgespec
target, drafter, offload = sys.argv[1:]
config = edgespec.GenerationConfig(max_tokens=12)
with edgespec.load(target, draft=drafter, context=512, offload=offload, threads=1, exact=True) as engine:
    before = engine.generate("A fox", config, raw=True).tokens
    for path in {target, drafter} - {"none"}:
        os.truncate(path, 4096)
    engine.target.rewind(0)
    try:
        print(engine.generate("A fox", config, raw=True).tokens == before)
    except edgespec.EdgeSpecError as error:
        print(type(error).__name__, error)
"""


def truncated_in_use(target: Path, drafter: str, offload: str) -> str:
    command = [sys.executable, "-c", TRUNCATING, str(target), drafter, offload]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, (child.returncode, child.stderr)
    return child.stdout


@pytest.mark.slow
def test_a_model_in_memory_does_not_need_its_file(
    model: Path, dropped_drafter_path: Path, tmp_path: Path
) -> None:
    drafter = shutil.copy(dropped_drafter_path, tmp_path / "drafter.gguf")
    assert truncated_in_use(model, str(drafter), "auto") == "True\n"


def test_weights_without_a_kernel_layout_are_in_memory_too(few_layers_path: Path, tmp_path: Path) -> None:
    model = Path(shutil.copy(few_layers_path, tmp_path / "model.gguf"))
    with load(model) as engine:
        expected = tokens(engine)
        rearrange(model)
        assert tokens(engine) == expected
    assert text_of(model) != expected


@pytest.mark.skipif(sys.platform == "win32", reason="a file that is mapped cannot be cut there")
def test_a_mapped_model_that_is_cut_is_an_error_and_no_crash(model: Path) -> None:
    said = truncated_in_use(model, "none", "mmap")
    assert said.startswith(
        f"ModelFileError '{model}' was changed, moved or removed while the model was in use."
    )
    assert "load the model again" in said


def test_a_mapped_model_that_is_written_to_gives_no_more_tokens(model: Path) -> None:
    with load(model, offload="mmap") as engine:
        chunks = engine.stream(PROMPT, GREEDY)
        next(chunks)
        rearrange(model)
        with pytest.raises(ModelFileError, match="was changed, moved or removed while the model was in use"):
            next(chunks)
        with pytest.raises(ModelFileError):
            engine.generate(PROMPT, GREEDY)
    assert len(text_of(model)) > 8


def test_a_model_that_changes_while_it_is_loaded_is_refused(model: Path) -> None:
    def meddle(fraction: float) -> None:
        if fraction == 1.0:
            model.touch()

    with pytest.raises(ModelFileError, match="was changed while it was being loaded"):
        Model(model, on_progress=meddle)


@pytest.mark.parametrize("pack", ["never", "auto"])
def test_a_streamed_model_that_is_written_to_never_gives_other_tokens(model: Path, pack: str) -> None:
    with load_streamed(model, pack=pack) as engine:
        expected = tokens(engine)
        packed = engine.target.model.weights.packed  # type: ignore[union-attr]
        rearrange(model)
        if packed:  # it is read from the packed file, which nobody has touched
            assert tokens(engine) == expected
        else:
            with pytest.raises(StreamError, match="was changed while the model was in use"):
                tokens(engine)


def test_a_streamed_model_may_be_moved_and_removed_in_use(model: Path, tmp_path: Path) -> None:
    with load_streamed(model, pack="never") as engine:
        expected = tokens(engine)
        moved = model.rename(tmp_path / "moved.gguf")
        assert tokens(engine) == expected
        moved.unlink()
        assert tokens(engine) == expected


# --- between two runs ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pack_never_gives_the_text_of_weights_that_are_gone(model: Path) -> None:
    with load_streamed(model, pack="always", exact=True) as engine:
        old = tokens(engine)
    rearrange(model)
    with load_streamed(model, pack="always", exact=True) as engine:
        new = tokens(engine)
    assert new != old
    assert new == text_of(model, exact=True)


def test_the_prompt_cache_never_gives_the_text_of_weights_that_are_gone(model: Path) -> None:
    prompt = " ".join(f"word{i}" for i in range(60))

    def run(*, prompt_cache: bool) -> tuple[list[int], int]:
        with load(model, prompt_cache=prompt_cache, exact=True) as engine:
            restored = engine.target.recall(TextSequence(engine.encoder.encode(prompt)))
            return list(engine.generate(prompt, GREEDY).tokens), restored

    old, nothing = run(prompt_cache=True)
    again, restored = run(prompt_cache=True)
    assert (nothing, again) == (0, old)
    assert restored > 0
    rearrange(model)
    new, nothing = run(prompt_cache=True)
    assert nothing == 0
    assert new == run(prompt_cache=False)[0] != old
    assert run(prompt_cache=True)[1] > 0
    # A file that was only touched, or a copy, is read once more: slower, and never wrong.
    os.utime(model)
    assert run(prompt_cache=True) == (new, 0)


def test_a_session_outlives_its_models_file(model: Path, tmp_path: Path) -> None:
    def resumed() -> tuple[str, int, str]:
        with load(model) as engine:
            session = Session(engine)
            took_up = session.resume(SessionFile(str(tmp_path / "talk.json")))
            list(session.ask("Hi" if took_up is None else "And then?", GREEDY))
            session.close()
            reason, restored = (took_up.reason, took_up.restored) if took_up else ("", 0)
            return reason, restored, session.messages[0]["content"]

    assert resumed() == ("", 0, "Hi")
    reason, restored, _ = resumed()
    assert (reason, restored > 0) == ("", True)
    os.utime(model)
    assert resumed() == (
        "Saved with other weights of this model, or from another copy of its file",
        0,
        "Hi",
    )
    reason, restored, _ = resumed()
    assert (reason, restored > 0) == ("", True)
