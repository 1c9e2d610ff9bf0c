"""Answers of tiny targets that heads draft for: the questions, and what must hold whatever head drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.base.progress import no_progress
from edgespec.cli.main import main
from edgespec.config import Config
from edgespec.engine.engine import Engine
from edgespec.engine.target import Target
from edgespec.errors import BackendError
from edgespec.generation.config import GenerationConfig
from edgespec.measure.full_profile import measure_full_profile
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.planning.memory.needs import ContextShape, PairSizes
from edgespec.planning.memory.rows import streamed_needs
from edgespec.planning.pass_costs import expected_prefill
from edgespec.profiles.store import ProfileStore
from tests.tiny import N_EMBD

OPTIONS: dict[str, Any] = {"context": 384, "threads": 1, "tree_budget": 12, "drafter": "model", "exact": True}

PROMPT = [40 + 7 * i % 101 for i in range(70)]
GREEDY = GenerationConfig(max_tokens=32)
SAMPLED = GREEDY.with_(temperature=0.7, seed=5)

UNDRAFTED: dict[str, Any] = {"draft": "none", "drafter": None, "tree_budget": None}
"""Changes the options of a drafting engine to those of the target alone."""

Texts = Mapping[GenerationConfig, list[int]]
"""The text of the target alone for each configuration, longer than an answer."""


def opened(target: Path, load: Callable[..., Engine] = edgespec.load, **changes: Any) -> Engine:
    """An engine for short texts, which decodes exactly if no change says otherwise."""
    try:
        return load(target, **{**OPTIONS, **changes})
    except BackendError as error:
        if "No row rule" in error.what:
            pytest.skip("no kernel of this machine decodes the model exactly")
        raise


def texts_of(target: Path, max_tokens: int = 64) -> Texts:
    """The target's answers without drafts."""
    with opened(target, **UNDRAFTED) as engine:
        return {c: engine.generate(PROMPT, c.with_(max_tokens=max_tokens)).tokens for c in (GREEDY, SAMPLED)}


def check_own_text(engine: Engine, texts: Texts, config: GenerationConfig) -> None:
    """A question asked twice, another one, and one that continues the first have the target's own answers."""
    for _ in range(2):
        answer = engine.generate(PROMPT, config)
        assert answer.tokens == texts[config][: len(answer.tokens)]
        assert answer.tokens_per_pass > 1.3
    engine.generate([*PROMPT[:40], 5, 6, 7], config)
    longer = engine.generate([*PROMPT, *texts[config][:20]], config)
    assert longer.tokens == texts[config][20 : 20 + len(longer.tokens)]
    assert longer.tokens_per_pass > 1.3


def check_cancelled_answer(engine: Engine, texts: Texts) -> None:
    """An answer that was cancelled is drafted for again from where it ended."""
    engine.target.rewind(0)
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    engine.cancel()
    (*_, last) = stream
    assert last.generation is not None
    said = last.generation.tokens
    rest = engine.generate([*PROMPT, *said], GREEDY)
    assert rest.tokens == texts[GREEDY][len(said) : len(said) + 32]
    assert rest.tokens_per_pass > 1.3


def check_trees_branch(engine: Engine, config: GenerationConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some trees of an answer have several leaves."""
    leaves = []
    verify = Target.verify

    def note(self: Target, trees: Any, chunks: Any = ()) -> Any:
        leaves.extend(len(each.tree.leaves) for each in trees)
        return verify(self, trees, chunks)

    monkeypatch.setattr(Target, "verify", note)
    engine.generate(PROMPT, config)
    assert max(leaves) > 1


def check_streamed(engine: Engine, texts: Texts) -> None:
    """Answers of streamed weights are the target's own, and drafted for."""
    assert engine.target.model.weights.streamed_bytes > 0
    check_answers(engine, texts)


def check_answers(engine: Engine, texts: Texts) -> None:
    """Answers are the target's own, and drafted for."""
    for config in (GREEDY, SAMPLED):
        answer = engine.generate(PROMPT, config)
        assert answer.tokens == texts[config][: len(answer.tokens)]
        assert answer.tokens_per_pass > 1.3


def check_several_texts(engine: Engine, gain: float) -> None:
    """Texts that share passes are drafted for, and have the answers that they have alone."""
    prompts = [PROMPT, PROMPT, PROMPT[:30], [9, *PROMPT]]
    expected = [engine.generate(prompt, GREEDY).tokens for prompt in prompts]
    for _ in range(2):
        answers = engine.generate_many(prompts, GREEDY)
        assert [answer.tokens for answer in answers] == expected
        assert sum(answer.tokens_per_pass for answer in answers) > gain * len(prompts)
    assert len(engine.drafter._sequences) <= len(prompts) + 1  # type: ignore[attr-defined]


def check_restored_text(
    target: Path, head: Path, before_restoring: Callable[[], None] = lambda: None
) -> None:
    """A text whose state came from disk is drafted for from there on."""
    prompt = [*PROMPT, *PROMPT, 1]  # a whole block of saved state
    with opened(target, draft=head, prompt_cache=True) as engine:
        expected = engine.generate(prompt, GREEDY).tokens
    before_restoring()
    with opened(target, draft=head, prompt_cache=True) as engine:
        answer = engine.generate(prompt, GREEDY)
        (text,) = engine.drafter._owned.values()  # type: ignore[attr-defined]
    assert answer.tokens == expected
    assert text.unread > 128, "the first tokens came from disk"
    assert answer.tokens_per_pass > 1.2


def check_unknown_text(engine: Engine, rows: tuple[int, ...]) -> None:
    """A text of which the head knows nothing gets a root, and trees from then on."""
    engine.generate(PROMPT, GREEDY)
    engine.drafter.forget()  # type: ignore[attr-defined]
    assert all(engine.drafter.step_seconds(n) > 0 for n in rows)  # type: ignore[attr-defined]
    # The target still has the text, so that nothing of it is shown again.
    again = engine.generate(PROMPT, GREEDY)
    assert again.passes[0].nodes == 1
    assert max(record.nodes for record in again.passes) > 4


def check_profile(engine: Engine, gain: float) -> None:
    """A profile counts the trees of real passes."""
    profile = measure_full_profile(engine, 1.0, no_progress, ProfileStore())
    assert profile.drafts is not None
    for yields in (profile.greedy, profile.sampled):
        assert yields is not None
        assert yields.tokens[max(yields.tokens)] > gain


def check_budget(target: Path, head: Path, *, layers: int, shown: int) -> None:
    """The memory that is planned for a pair holds the head.

    Args:
        layers: of the head, whose keys and values take half precision.
        shown: layers of the target whose inputs the head reads.
    """
    files, small = (ModelFiles.of(read_header(path)) for path in (target, head))
    shape = ContextShape(512, n_outputs=64, n_sequences=64)
    prefill = expected_prefill(files, 512, 1, ProfileStore())
    alone, both = (
        streamed_needs(PairSizes(files, drafter, shape, measured=True), files, 8 << 30, Config(), prefill)
        for drafter in (None, small)
    )
    assert both.footprints[1].weights == small.tensor_bytes
    assert both.footprints[1].cache >= layers * 512 * 2 * 2 * N_EMBD
    assert both.footprints[0].buffers >= alone.footprints[0].buffers + 2 * both.rows * shown * N_EMBD * 4


def check_commands(
    target: Path, head: Path, shown: str, listed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands that take a pair generate with it, and describe the head."""
    command = ["generate", str(target), "--draft", str(head), "-p", "one two", "--context", "256"]
    assert main([*command, "--max-tokens", "8", "--json"]) == 0
    assert '"completion_tokens": 8' in capsys.readouterr().out
    assert main(["models", "pair", str(target), str(head)]) == 0
    assert "the head was made for a target like this one" in " ".join(capsys.readouterr().out.split())
    assert main(["models", "show", str(head)]) == 0
    assert shown in capsys.readouterr().out
    assert main(["draft", "list"]) == 0
    assert f"head ({listed})" in capsys.readouterr().out
