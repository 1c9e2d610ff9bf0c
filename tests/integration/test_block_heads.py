"""Block heads: they compute what NumPy does, one pass of theirs drafts a tree, and they change no text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.cli.main import main
from edgespec.engine.engine import Engine
from edgespec.engine.sessions.file import SessionFile
from edgespec.engine.sessions.session import Session
from edgespec.errors import PairingError, UsageError
from edgespec.heads.block import BlockContext, BlockKind, BlockLogits
from edgespec.heads.block_drafter import BlockHeadDrafter, BlockSequence
from edgespec.heads.hidden_states import LayerTap
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.speculation.tree import FloatArray
from tests.head_answers import (
    GREEDY,
    PROMPT,
    SAMPLED,
    UNDRAFTED,
    Texts,
    check_budget,
    check_cancelled_answer,
    check_commands,
    check_profile,
    check_restored_text,
    check_several_texts,
    check_unknown_text,
    opened,
    texts_of,
)
from tests.least_memory import load_in_least_memory
from tests.templated import now_speaking
from tests.tiers import slow_except
from tests.tiny import N_EMBD
from tests.tiny_blocks import SHAPES, TinyBlocks, tiny_block_head, write_blocks

PAIRS = [
    (BlockKind.DFLASH, "llama"),
    (BlockKind.DFLASH2, "qwen3"),
    (BlockKind.DFLASH, "qwen35"),
]
QUICK = PAIRS[:2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


@pytest.fixture(scope="module")
def pair(folder: Path, smol_path: Path) -> TinyBlocks:
    return write_blocks(folder, smol_path)


@pytest.fixture(scope="module")
def texts(pair: TinyBlocks) -> Texts:
    return texts_of(pair.target)


@pytest.fixture(scope="module")
def engine(pair: TinyBlocks) -> Iterator[Engine]:
    with opened(pair.target, draft=pair.head) as engine:
        yield engine


def drafter_of(engine: Engine) -> BlockHeadDrafter:
    assert isinstance(engine.drafter, BlockHeadDrafter)
    return engine.drafter


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], BlockLogits]]:
    """The texts that are drafted for from now on, and the logits of the blocks behind them."""
    seen: list[tuple[list[int], BlockLogits]] = []
    keep_logits = BlockSequence.keep_logits

    def note(self: BlockSequence, logits: BlockLogits) -> None:
        seen.append(([*self.known_sequence, self.root], logits))
        keep_logits(self, logits)

    monkeypatch.setattr(BlockSequence, "keep_logits", note)
    return seen


def hidden_of(pair: TinyBlocks, text: Sequence[int]) -> FloatArray:
    """The hidden states of a text that is read at once."""
    tap = LayerTap(pair.shape.layers, N_EMBD)
    with Model(pair.target, repack=False) as model:
        context = Context(
            model, n_cells=256, n_rows=256, n_outputs=4, n_sequences=1, n_threads=1, observers=[tap]
        )
        context.decode(TokenBatch.run(text, 0, 1, "last"))
        return tap.rows()


@pytest.mark.parametrize(("kind", "architecture"), slow_except(QUICK, PAIRS))
def test_blocks_are_those_of_numpy(
    kind: BlockKind,
    architecture: str,
    folder: Path,
    smol_path: Path,
    blocks: list[tuple[list[int], BlockLogits]],
) -> None:
    pair = write_blocks(folder, smol_path, kind, architecture)
    with opened(pair.target, draft=pair.head) as engine:
        answer = engine.generate(PROMPT, GREEDY.with_(max_tokens=12))
        drafted = [record for record in answer.passes if record.nodes > 1]
        assert len(blocks) == len(drafted), "a tree takes one pass of the head"
        assert all(record.draft_steps == 1 for record in drafted)
        whole = [*PROMPT, *answer.tokens]
        hidden = hidden_of(pair, whole)
        for text, logits in blocks:
            assert text == whole[: len(text)]
            tokens = [text[-1]] + [pair.shape.mask] * (pair.shape.block_size - 1)
            compare(pair, logits, hidden[: len(text) - 1], tokens)


def compare(pair: TinyBlocks, logits: BlockLogits, hidden: FloatArray, tokens: Sequence[int]) -> None:
    """Compare what a block says with NumPy, behind the root and behind two tokens at every depth."""
    if pair.shape.top_k:
        candidates, scores = pair.reference.pairs(hidden, tokens)
        (found,) = logits.after(0, np.array(tokens[:1], dtype=np.int32))
        order = np.argsort(-scores[0, 0])[:6]  # others may be no candidates of both, by rounding
        close(found[candidates[0].astype(int)[order]], scores[0, 0, order])
        return
    alone = pair.reference.block(hidden, tokens)
    for depth, row in enumerate(alone[1:]):
        for token in (5, 9) if depth else tokens[:1]:
            (found,) = logits.after(depth, np.array([token], dtype=np.int32))
            close(found, row)


def close(found: FloatArray, expected: FloatArray) -> None:
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("kind", "architecture", "load"),
    slow_except(
        [(*QUICK[0], load_in_least_memory), (*QUICK[1], edgespec.load)],
        [(*pair, load) for pair in PAIRS for load in (edgespec.load, load_in_least_memory)],
    ),
)
def test_the_text_is_the_targets_own(
    kind: BlockKind, architecture: str, load: Callable[..., Engine], folder: Path, smol_path: Path
) -> None:
    pair = write_blocks(folder, smol_path, kind, architecture)
    expected = texts_of(pair.target)
    with opened(pair.target, load, draft=pair.head) as engine:
        if load is load_in_least_memory:
            assert engine.target.model.weights.streamed_bytes > 0
        for config in (GREEDY, SAMPLED, GREEDY):
            answer = engine.generate(PROMPT, config)
            assert answer.tokens == expected[config][: len(answer.tokens)]
            assert max(record.nodes for record in answer.passes) > 4
            assert answer.tokens_per_pass > (1.3 if config.greedy else 1.0)
        # A question that continues the first.
        longer = engine.generate([*PROMPT, *expected[GREEDY][:20]], GREEDY)
        assert longer.tokens == expected[GREEDY][20 : 20 + len(longer.tokens)]


def test_trees_branch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.engine.target import Target

    shapes = []
    verify = Target.verify

    def note(self: Target, trees: Any, chunks: Any = ()) -> Any:
        shapes.extend((len(each.tree.leaves), int(each.tree.depths.max())) for each in trees)
        return verify(self, trees, chunks)

    monkeypatch.setattr(Target, "verify", note)
    engine.generate(PROMPT, GREEDY)
    assert max(leaves for leaves, _ in shapes) > 1
    assert max(depth for _, depth in shapes) > 1


def test_drawn_trees_and_the_sources_without_a_model(pair: TinyBlocks, texts: Texts) -> None:
    with opened(pair.target, draft=pair.head, drafter="merged") as merged:
        assert merged.drafter.name == "llama-DFlash, prompt lookup, token recycling"
        assert merged.generate(PROMPT, GREEDY).tokens == texts[GREEDY][:32]
    with opened(pair.target, draft=pair.head, exact=None) as free:
        drawn = free.generate(PROMPT, SAMPLED.with_(verify="block", seed=1))
        assert drawn.tokens_per_pass > 1.05


@pytest.mark.parametrize("kind", slow_except([BlockKind.DFLASH2], BlockKind))
def test_several_texts_in_a_pass(kind: BlockKind, folder: Path, smol_path: Path) -> None:
    pair = write_blocks(folder, smol_path, kind)
    with opened(pair.target, draft=pair.head) as engine:
        check_several_texts(engine, 1.2)


def test_a_head_that_drafts_some_tokens_only(
    folder: Path, smol_path: Path, texts: Texts, blocks: list[tuple[list[int], BlockLogits]]
) -> None:
    pair = write_blocks(folder, smol_path, every=2)
    with opened(pair.target, draft=pair.head) as engine:
        answer = engine.generate(PROMPT, GREEDY)
        assert answer.tokens == texts[GREEDY][:32]
        assert max(record.nodes for record in answer.passes) > 4
        for _, logits in blocks:
            for token in (4, 9):
                (found,) = logits.after(1, np.array([token], dtype=np.int32))
                assert np.isneginf(found[1::2]).all()
                assert np.isfinite(found[::2]).any()


def test_a_cancelled_answer_continues(engine: Engine, texts: Texts) -> None:
    check_cancelled_answer(engine, texts)


def test_a_head_that_is_interrupted_anywhere_continues(
    engine: Engine, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, left = Context.decode, [0]

    def interrupt(self: Context, batch: TokenBatch) -> None:
        decode(self, batch)
        if isinstance(self, BlockContext):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

    monkeypatch.setattr(Context, "decode", interrupt)
    for calls in range(1, 8):
        engine.target.rewind(0)
        drafter_of(engine).forget()
        left[0] = calls
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPT, GREEDY)
        assert engine.generate(PROMPT, GREEDY).tokens == texts[GREEDY][:32]


def test_a_text_that_was_restored_is_drafted_for_from_there_on(pair: TinyBlocks) -> None:
    check_restored_text(pair.target, pair.head)


def test_a_session_continues_after_its_file_was_read(pair: TinyBlocks, tmp_path: Path) -> None:
    answers = []
    for name, options in (("drafted", {"draft": pair.head}), ("undrafted", UNDRAFTED)):
        said = []
        for question in ("one two three", "four"):
            with opened(pair.target, **options) as engine:
                now_speaking(engine, "{% for m in messages %}{{ m['content'] }}. {% endfor %}")
                session = Session(engine)
                resumed = session.resume(SessionFile(str(tmp_path / f"{name}.json")))
                assert (resumed is None) == (not said)
                *_, last = session.ask(question, GREEDY.with_(max_tokens=12))
                assert last.generation is not None
                said.append(last.generation.tokens)
                session.close()
        answers.append(said)
    assert answers[0] == answers[1]


def test_a_text_of_which_nothing_is_known_gets_a_root(engine: Engine) -> None:
    check_unknown_text(engine, (1,))


def test_long_texts_fill_the_heads_cache(pair: TinyBlocks) -> None:
    prompt = [40 + 7 * i % 101 for i in range(300)]
    with opened(pair.target, **UNDRAFTED) as engine:
        expected = engine.generate(prompt, GREEDY.with_(max_tokens=80)).tokens
    with opened(pair.target, draft=pair.head) as engine:
        answer = engine.generate(prompt, GREEDY.with_(max_tokens=80))
    assert answer.tokens == expected
    assert answer.tokens_per_pass > 1.2


def test_a_profile_counts_the_trees_of_real_passes(engine: Engine) -> None:
    check_profile(engine, 1.1)


def test_heads_of_other_targets_are_refused(pair: TinyBlocks, smol_path: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    for changes, what in (
        ({"width": 64, "head": 16}, "it reads hidden states of 64 elements, not 256."),
        ({"layers": (1, 3, 6)}, "it reads the layers 1, 3, 6 (the first is 0), but there are 6."),
    ):
        shape = replace(SHAPES[BlockKind.DFLASH], **changes)  # type: ignore[arg-type]
        head = tiny_block_head(tmp_path / "bad.gguf", smol_path, shape)
        with pytest.raises(PairingError, match=r"was made for another target than llama\.gguf") as caught:
            edgespec.load(pair.target, draft=head, context=128)
        assert what in caught.value.what
    with pytest.raises(UsageError, match=r"llama-DFlash\.gguf is a draft head, which only works with"):
        edgespec.load(pair.head)


def test_logits_of_a_block_are_kept_when_the_next_is_read(
    engine: Engine, blocks: list[tuple[list[int], BlockLogits]]
) -> None:
    engine.target.rewind(0)
    engine.set_tree_budget(8)  # its drafts do not pay
    engine.generate(PROMPT, GREEDY.with_(max_tokens=8))
    engine.set_tree_budget(None)
    token = np.zeros(1, dtype=np.int32)
    rows = [logits.after(0, token) for _, logits in blocks]
    assert len(rows) > 1
    assert not np.array_equal(rows[0], rows[1])


def test_the_budget_counts_the_head(pair: TinyBlocks) -> None:
    check_budget(pair.target, pair.head, layers=2, shown=3)


@pytest.mark.parametrize("kind", slow_except([BlockKind.DFLASH], [BlockKind.DFLASH, BlockKind.DFLASH2]))
def test_a_block_head_from_the_command_line(
    kind: BlockKind, folder: Path, smol_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = write_blocks(folder, smol_path, kind)
    check_commands(
        pair.target, pair.head, f"{kind.value}, for the model that it was made for", kind.value, capsys
    )
    assert main(["plan", str(pair.target), "--draft", str(pair.head), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"{pair.head.name} (head)" == found["drafter"]
