"""After an interruption anywhere, an engine answers as one that was never interrupted."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.engine.engine import Engine
from edgespec.engine.sequence import TextSequence
from edgespec.errors import BackendError, UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.drafters.base import NoDrafter
from tests.interrupting import Intruder, Intrusion
from tests.least_memory import load_in_least_memory
from tests.tiers import examples, slow_except
from tests.tiny import write_tiny
from tests.tiny_heads import write_pair
from tests.tiny_hybrids import HYBRIDS
from tests.tiny_mamba import write_mamba

MIB = 1 << 20
PROMPT = [40 + i % 7 for i in range(70)]  # more than one piece in exact mode
TOKENS = 24
GREEDY = GenerationConfig(max_tokens=TOKENS)
SAMPLED = GenerationConfig(max_tokens=TOKENS, temperature=0.8, seed=3)
POINTS = examples(20)  # lines at which an engine is interrupted

# How engines differ in what an interruption can leave behind: the model, and how it is loaded. Where decoding
# is not exact, the model's choices must be clear ones: rounding differs with what was read together.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("clear", {"draft": "none", "exact": False}),
    "model": ("clear", {"draft": "itself", "exact": False, "tree_budget": 16}),
    "head": ("headed", {"draft": "head", "exact": False, "tree_budget": 16}),
    "lookup-exact": ("short", {"draft": "lookup", "exact": True, "tree_budget": 12}),
    "model-exact": ("short", {"draft": "itself", "exact": True, "tree_budget": 16}),
    "streamed": ("short", {"draft": "lookup", "offload": "stream", "exact": True, "tree_budget": 12}),
    "streamed-model": ("short", {"draft": "itself", "offload": "stream", "exact": True, "tree_budget": 16}),
    "recurrent": ("recurrent", {"draft": "none"}),
    "recurrent-model": ("recurrent", {"draft": "itself", "tree_budget": 8}),
    "hybrid-exact": ("hybrid", {"draft": "clear", "exact": True, "tree_budget": 12}),
    "hybrid-streamed": ("hybrid", {"draft": "lookup", "offload": "stream", "exact": True, "tree_budget": 12}),
    "hybrid-experts": (
        "hybrid-experts",
        {"draft": "lookup", "offload": "stream", "exact": True, "tree_budget": 8},
    ),
}


@pytest.fixture(scope="session")
def models(smol_path: Path, short_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that take milliseconds a pass."""
    folder = tmp_path_factory.mktemp("models")
    pair = write_pair(folder, smol_path, "headed")
    return {
        "clear": write_tiny(folder / "clear.gguf", "llama", smol_path),
        "short": short_path,
        "recurrent": write_mamba(folder / "recurrent.gguf", smol_path),
        **{
            name: write_tiny(folder / f"{name}.gguf", kind, smol_path, kind=HYBRIDS[kind])
            for name, kind in (("hybrid", "qwen35"), ("hybrid-experts", "qwen35moe"))
        },
        "headed": pair.target,
        "head": pair.head,
    }


def open_engine(models: Mapping[str, Path | str], kind: str) -> Engine:
    """An engine for short texts, with as little memory as a streamed one can do with.

    Raises:
        BackendError: no kernels of this machine decode the model exactly.
    """
    name, wishes = KINDS[kind]
    path = Path(models[name])
    draft = path if wishes["draft"] == "itself" else models.get(wishes["draft"], wishes["draft"])
    options = {**wishes, "draft": draft, "context": 192, "threads": 1}
    if options.get("offload") != "stream":
        return edgespec.load(path, **options)
    return load_in_least_memory(path, **options)


# Each of the ways to draft, to stream and to keep states; the others combine them.
QUICK = ("model", "hybrid-streamed")


@pytest.fixture(scope="module", params=slow_except(QUICK, KINDS))
def engine(models: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Engine]:
    try:
        engine = open_engine(models, request.param)
    except BackendError as error:
        if "No row rule" in error.what:
            pytest.skip("no kernel of this machine decodes the model exactly")
        raise
    with engine:
        yield engine


def test_an_exception_at_any_line_changes_no_later_answer(engine: Engine) -> None:
    long = 2 * TOKENS
    texts = {c: engine.generate(PROMPT, c.with_(max_tokens=long)).tokens for c in (GREEDY, SAMPLED)}
    assert all(len(text) == long for text in texts.values()), "the model must go on, to be compared"
    engine.target.rewind(0)
    clean = Intruder()
    assert not clean.run(lambda: engine.generate(PROMPT, GREEDY))
    rng = random.Random(5)
    for number in range(POINTS):
        config = (GREEDY, SAMPLED)[number % 2]
        text = texts[config]
        if number % 3 == 0:
            engine.target.rewind(0)  # so that the prompt is read, too
        at = rng.randrange(clean.lines * number // POINTS, clean.lines * (number + 1) // POINTS)
        intruder, before = Intruder(at + 1), engine.last_generation
        intruder.run(partial(engine.generate, PROMPT, config))
        assert engine.last_generation is not None
        # An exception while the arguments are checked comes before there is an answer.
        said = [] if engine.last_generation is before else engine.last_generation.tokens
        assert said == text[: len(said)], intruder.where
        # First continue the interrupted text: an error in the cache shows there.
        continued = engine.generate([*PROMPT, *said], config)
        assert continued.tokens == text[len(said) : len(said) + TOKENS], intruder.where
        assert engine.generate(PROMPT, config).tokens == text[:TOKENS], intruder.where


def test_two_exceptions_in_a_row_change_nothing_either(engine: Engine) -> None:
    """The second comes while the first one's traces are being removed."""
    text = engine.generate(PROMPT, GREEDY).tokens
    clean = Intruder()
    clean.run(lambda: engine.generate(PROMPT, GREEDY))
    for number in range(4):
        first = Intruder(1 + clean.lines * number // 4)
        first.run(lambda: engine.generate(PROMPT, GREEDY))
        second = Intruder(1 + 17 * number)
        second.run(lambda: engine.generate(PROMPT, GREEDY))
        assert engine.generate(PROMPT, GREEDY).tokens == text, (first.where, second.where)


def _failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_arguments: Any, **_named: Any) -> Any:
        raise error

    return fail


def test_an_error_between_verifying_and_committing_changes_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exceptions of either kind: one that `except Exception` would catch, and one that it would not."""
    text = engine.generate(PROMPT, GREEDY).tokens
    failing = [(engine.drafter, "observe"), (engine.target, "commit"), (TextSequence, "rewind")]
    if not isinstance(engine.drafter, NoDrafter):
        failing.append((engine.drafter, "learn"))
    for (owner, name), error in itertools.product(failing, (KeyboardInterrupt(), MemoryError())):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _failing(error))
            with pytest.raises(type(error)):
                engine.generate([*PROMPT[:-9], 1, 2, 3], GREEDY)
        assert engine.generate(PROMPT, GREEDY).tokens == text


def test_an_answer_that_is_left_or_thrown_into_changes_nothing(engine: Engine) -> None:
    text = engine.generate(PROMPT, GREEDY).tokens
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    stream.close()
    assert engine.generate(PROMPT, GREEDY).tokens == text
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(Intrusion):
        stream.throw(Intrusion())
    assert engine.generate(PROMPT, GREEDY).tokens == text
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(UsageError, match="The engine is busy"):
        engine.generate(PROMPT, GREEDY)
    del stream
    assert engine.generate(PROMPT, GREEDY).tokens == text


def test_an_error_of_a_callback_changes_nothing(engine: Engine) -> None:
    text = engine.generate(PROMPT, GREEDY).tokens
    engine.target.rewind(0)
    with pytest.raises(MemoryError):
        engine.generate([*PROMPT, *PROMPT], GREEDY, on_prefill=_failing(MemoryError()))
    assert engine.generate(PROMPT, GREEDY).tokens == text


def test_a_cancelled_answer_continues_as_if_it_had_not_been(engine: Engine) -> None:
    text = engine.generate(PROMPT, GREEDY.with_(max_tokens=2 * TOKENS)).tokens
    for passes in (1, 2):
        stream = engine.stream(PROMPT, GREEDY.with_(max_tokens=2 * TOKENS))
        for _ in range(passes):
            next(stream)
        engine.cancel()  # ends the next pass from inside
        (*_, last) = stream
        assert last.generation is not None
        said = last.generation.tokens
        assert last.generation.finish_reason == "cancelled"
        rest = text[len(said) :][:TOKENS]
        assert engine.generate([*PROMPT, *said], GREEDY).tokens[: len(rest)] == rest


_CTRL_C = """
import json, os, random, signal, sys, threading, time
from tests.integration.test_interruptions import PROMPT, SAMPLED, open_engine

rng = random.Random(1)
interrupted = 0
with open_engine(json.loads(sys.argv[1]), sys.argv[2]) as engine:
    text = engine.generate(PROMPT, SAMPLED).tokens
    engine.target.rewind(0)
    start = time.perf_counter()
    engine.generate(PROMPT, SAMPLED)
    seconds = time.perf_counter() - start
    for number in range(8):
        engine.target.rewind(0)
        engine.last_generation = None  # the signal may come before the next one has begun
        timer = threading.Timer(rng.random() * seconds, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            answer = engine.generate(PROMPT, SAMPLED)
            assert answer.tokens == text, f"answer {number} is wrong, and nothing was said of an interruption"
            timer.join()
            time.sleep(0)
        except KeyboardInterrupt:
            interrupted += 1
        said = engine.last_generation.tokens if engine.last_generation is not None else []
        assert said == text[:len(said)], number
        rest = text[len(said):]
        assert engine.generate([*PROMPT, *said], SAMPLED).tokens[:len(rest)] == rest, number
print(interrupted)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("kind", slow_except(["model"], ["model", "streamed-model"]))
def test_ctrl_c_in_a_program_ends_the_answer_and_spoils_nothing(models: dict[str, Path], kind: str) -> None:
    """With Python's own handler, which raises wherever the main thread happens to be."""
    paths = json.dumps({name: str(path) for name, path in models.items()})
    done = subprocess.run(
        [sys.executable, "-c", _CTRL_C, paths, kind],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "an interruption was printed and forgotten"
    assert int(done.stdout) > 0
