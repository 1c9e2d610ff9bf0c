"""Tuning drafters: the network in torch is llama.cpp's, and what it learns arrives in the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

pytest.importorskip("torch")
import torch

import edgespec
from benchmarks.pruning import write_pruned
from edgespec.cli.main import main
from edgespec.drafting.tuning import training
from edgespec.drafting.tuning import tune as tuning
from edgespec.drafting.tuning.answers import (
    TOP,
    AnswerFile,
    PromptSplit,
    TargetAnswer,
    bundled_prompts,
    collect_answers,
)
from edgespec.drafting.tuning.network.network import Network
from edgespec.drafting.tuning.network.shape import ARCHITECTURES, TrainedExtent, extent_for
from edgespec.drafting.tuning.network.weights import check_tunable, load_weights, write_weights
from edgespec.drafting.tuning.options import TuneOptions
from edgespec.drafting.tuning.training import Trainer, TrainingBudget, TrainingMethod
from edgespec.drafting.tuning.tune import tune
from edgespec.errors import BackendError, MemoryLimitError, PairingError, UsageError
from edgespec.llama.quantize import make_drafter
from edgespec.llama.runtime.batch import TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.header import read_header
from edgespec.models.hub.registry import MADE, DrafterPair, PairRegistry, drafters_folder
from tests.tiny import N_VOCAB, write_tiny

QUICK = TuneOptions(steps=6, answers=12, tokens=16, threads=1, pass_s=1.0)


def steps_of(count: int) -> TrainingBudget:
    """Training for so many steps."""
    return lambda steps, _seconds: steps / count


@pytest.fixture(scope="module")
def target(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tuning") / "target.gguf", "llama", smol_path)


@pytest.fixture(scope="module")
def start(target: Path) -> Path:
    """The target without its last two layers."""
    path = target.with_name("start.gguf")
    return write_pruned(target, path, (4, 5))


@pytest.fixture(scope="module")
def answers(target: Path, shared_cache: Path) -> list[TargetAnswer]:
    with edgespec.load(target, draft="none", context=1024) as engine:
        return list(collect_answers(engine, bundled_prompts().training[:6], 16))


@pytest.fixture
def measured_by_what_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model's answers teach nothing about its other answers."""
    some = bundled_prompts().training[:12]
    monkeypatch.setattr(tuning, "bundled_prompts", lambda: PromptSplit(some, some))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def logits_of(path: Path, tokens: list[int]) -> np.ndarray:
    """llama.cpp's logits after every token, (tokens, n_vocab)."""
    with Model(path, repack=False) as model:
        context = Context(model, n_cells=256, n_rows=256, n_outputs=256, n_sequences=1, n_threads=1)
        context.decode(TokenBatch.run(tokens, 0, n_sequences=1, logits="all"))
        logits = context.logits().copy()
        context.close()
    return logits


def network_logits(path: Path, tokens: list[int]) -> np.ndarray:
    loaded = load_weights(path)
    network = Network(loaded.shape, loaded.weights)
    with torch.no_grad():
        hidden = network.hidden(torch.tensor(tokens), (len(tokens),))
        logits: np.ndarray = torch.nn.functional.linear(hidden, network.output).numpy()
    return logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_network_computes_what_llama_cpp_does(architecture: str, smol_path: Path, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", architecture, smol_path)
    tokens = np.random.default_rng(5).integers(3, N_VOCAB, 40).tolist()  # longer than any window
    expected, found = logits_of(path, tokens), network_logits(path, tokens)
    # llama.cpp rounds activations to F16 before products with F16 weights.
    assert np.abs(found - expected).max() < 0.03 * expected.std()
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.9


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_packed_texts_do_not_see_each_other(architecture: str, smol_path: Path, tmp_path: Path) -> None:
    loaded = load_weights(write_tiny(tmp_path / "tiny.gguf", architecture, smol_path))
    network = Network(loaded.shape, loaded.weights, TrainedExtent(3))
    generator = torch.Generator().manual_seed(7)
    texts = [torch.randint(3, N_VOCAB, (length,), generator=generator) for length in (30, 1, 17)]
    lengths = tuple(map(len, texts))
    with torch.no_grad():
        alone = torch.cat([network.hidden(text, (len(text),)) for text in texts])
        lower = torch.cat([network.lower(text, (len(text),)) for text in texts])
        torch.testing.assert_close(network.hidden(torch.cat(texts), lengths), alone)
        torch.testing.assert_close(network.upper(lower, lengths), alone)


def test_only_what_is_trained_changes(target: Path, answers: list[TargetAnswer], tmp_path: Path) -> None:
    loaded = load_weights(target)
    before = {name: values.copy() for name, values in loaded.weights.items()}
    network = Network(loaded.shape, loaded.weights, TrainedExtent(2))
    Trainer(network, answers, tmp_path / "checkpoint", "label").train(steps_of(3), lambda what, part: None)
    changed = network.changed()
    assert {int(name.split(".")[1]) for name in changed if name.startswith("blk.")} == {2, 3, 4, 5}
    assert all((changed[name] != before[name]).any() for name in changed if changed[name].ndim > 1)
    assert all(
        (network.weights[name].detach().numpy() == before[name]).all()
        for name in before
        if name not in changed
    )


def test_checkpoints_of_other_layers_are_not_taken_up(
    target: Path, answers: list[TargetAnswer], tmp_path: Path
) -> None:
    steps = []
    for first in (2, 3, 3):
        loaded = load_weights(target)
        network = Network(loaded.shape, loaded.weights, TrainedExtent(first))
        trainer = Trainer(network, answers, tmp_path / "checkpoint", "label")
        steps.append(trainer.steps)
        trainer.train(steps_of(2), lambda what, part: None)
    assert steps == [0, 0, 2]


@pytest.mark.slow
def test_what_fills_up_rows_and_bfloat16_change_next_to_nothing(
    start: Path, answers: list[TargetAnswer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: dict[tuple[int, bool], dict[str, np.ndarray]] = {}
    loss: dict[tuple[int, bool], float] = {}
    for rows, half in ((1, False), (64, False), (64, True)):
        monkeypatch.setattr(training, "_ROUND_ROWS", rows)
        loaded = load_weights(start)
        network = Network(loaded.shape, loaded.weights, TrainedExtent(2))
        trainer = Trainer(network, answers, tmp_path / f"{rows}{half}", "label")
        trainer.half = half
        trainer.train(steps_of(4), lambda what, part: None)
        learned[rows, half], loss[rows, half] = network.changed(), trainer.loss or 0.0
    for name, values in learned[1, False].items():
        assert learned[64, False][name] == pytest.approx(values, rel=1e-2, abs=1e-3)
    assert loss[64, False] == pytest.approx(loss[1, False], rel=1e-4)
    assert loss[64, True] == pytest.approx(loss[64, False], rel=0.02)


def test_a_start_that_is_near_moves_less(start: Path, answers: list[TargetAnswer], tmp_path: Path) -> None:
    name = "blk.3.ffn_up.weight"
    moved = {}
    for far in (1e-6, 1e3):  # nats; the start is between them
        loaded = load_weights(start)
        before = loaded.weights[name].copy()
        network = Network(loaded.shape, loaded.weights, TrainedExtent(2))
        trainer = Trainer(network, answers, tmp_path / f"{far}.pt", "label", method=TrainingMethod(far=far))
        trainer.train(steps_of(3), lambda what, part: None)
        moved[far] = float(np.abs(network.changed()[name] - before).mean())
    assert 0 < moved[1e3] < 0.1 * moved[1e-6]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-3, 1e3])
def test_the_best_weights_are_kept_and_rates_that_do_harm_are_left(
    rate: float, start: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_LEAST_CHECKS": 1, "_CHECK_EVERY": 4, "_SLOWER": 100}.items():
        monkeypatch.setattr(training, name, value)
    with edgespec.load(target, draft="none", context=1024) as engine:
        answers = list(collect_answers(engine, bundled_prompts().training[:9], 16))
    loaded = load_weights(start)
    network = Network(loaded.shape, loaded.weights, TrainedExtent(2))
    trainer = Trainer(network, answers, tmp_path / "c.pt", "label", method=TrainingMethod(rate=rate))
    untrained = trainer._divergence_of_checks()
    trainer.train(steps_of(60), lambda what, part: None)
    assert trainer.checked == pytest.approx(trainer._divergence_of_checks(), rel=1e-3)
    assert trainer.checked is not None
    assert trainer.checked < untrained
    assert rate < 1 or trainer.rate < rate / 100

    loaded = load_weights(start)
    again = Trainer(
        Network(loaded.shape, loaded.weights, TrainedExtent(2)), answers, tmp_path / "c.pt", "label"
    )
    again.train(steps_of(60), lambda what, part: None)
    assert (again.steps, again.checked) == (trainer.steps, trainer.checked)
    assert {name: value.tolist() for name, value in again._network.changed().items()} == {
        name: value.tolist() for name, value in network.changed().items()
    }


def test_what_was_learned_survives_in_fine_types(target: Path, tmp_path: Path) -> None:
    coarse, path = make_drafter(target, tmp_path / "q4_0.gguf", quantization="q4_0"), tmp_path / "tuned.gguf"
    loaded = load_weights(coarse)
    rng = np.random.default_rng(3)
    name = "blk.4.ffn_up.weight"
    moved = loaded.weights[name] * (1 + 0.02 * rng.standard_normal(loaded.weights[name].shape))
    tuned = {name: moved.astype(np.float32), "output_norm.weight": loaded.weights["output_norm.weight"] * 2}
    write_weights(coarse, path, tuned, "note")
    assert load_weights(path).weights["output_norm.weight"] == pytest.approx(tuned["output_norm.weight"])
    lost = np.abs(load_weights(path).weights[name] - moved).mean()
    assert lost < 0.5 * np.abs(loaded.weights[name] - moved).mean()
    # Where nothing changed, the bytes stay.
    for one, other in zip(gguf.GGUFReader(coarse).tensors, gguf.GGUFReader(path).tensors, strict=True):
        if one.name not in tuned:
            assert one.tensor_type == other.tensor_type
            assert (one.data == other.data).all()
    assert logits_of(path, [5, 6, 7]).shape == (3, N_VOCAB)


def test_fewer_layers_are_trained_where_the_upper_half_does_not_fit(target: Path) -> None:
    header = read_header(target)
    shape = check_tunable(header)
    assert extent_for(header, shape, 1 << 50) == TrainedExtent(3)
    sizes = [TrainedExtent(first).n_bytes(header) for first in range(shape.layers)]
    assert sizes == sorted(sizes, reverse=True)
    assert extent_for(header, shape, sizes[3] - 1) == TrainedExtent(4)
    assert extent_for(header, shape, sizes[-1]) == TrainedExtent(5)
    with pytest.raises(MemoryLimitError, match=r"Tuning target.gguf needs about .* of memory"):
        extent_for(header, shape, sizes[-1] - 1)


def test_unchanged_weights_come_back_as_they_were(target: Path, tmp_path: Path) -> None:
    loaded = load_weights(target)
    whole = tmp_path / "whole.gguf"
    write_weights(target, whole, loaded.weights, "nothing")
    assert read_header(whole).metadata["edgespec.tuned"] == "nothing"
    assert read_header(whole).fingerprint != read_header(target).fingerprint
    again = load_weights(whole)
    assert again.shape == loaded.shape
    assert all((again.weights[name] == values).all() for name, values in loaded.weights.items())
    tokens = list(range(10, 40))
    assert (logits_of(whole, tokens) == logits_of(target, tokens)).all()
    # Quantized and written again, nothing else is lost: what llama.cpp reads is what the network had.
    quantized = make_drafter(whole, tmp_path / "q4_0.gguf", quantization="q4_0")
    rewritten = tmp_path / "again.gguf"
    write_weights(quantized, rewritten, {}, "nothing")
    for one, other in zip(
        gguf.GGUFReader(quantized).tensors, gguf.GGUFReader(rewritten).tensors, strict=True
    ):
        assert one.name == other.name
        assert (one.data == other.data).all()


def test_what_the_target_might_have_said_is_kept(target: Path, answers: list[TargetAnswer]) -> None:
    assert len(answers) == 6
    for answer in answers[:3]:
        said = answer.text.answer
        assert len(answer.top) - len(said) in (0, 1)
        assert tuple(answer.top[: len(said), 0]) == said  # answers are greedy
        assert (np.diff(answer.logprobs, axis=1) <= 0).all()
        tokens = [*answer.text.prompt, *said]
        logits = logits_of(target, tokens)[len(answer.text.prompt) - 1 :][: len(answer.top)].astype(
            np.float64
        )
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        expected = np.take_along_axis(logprobs, answer.top.astype(np.int64), axis=1)
        assert np.abs(expected - answer.logprobs).max() < 0.1  # other kernels, and rounded to F16
        assert answer.top.shape[1] == TOP


def test_answers_survive_in_their_file(tmp_path: Path, answers: list[TargetAnswer]) -> None:
    path = tmp_path / "answers"
    file = AnswerFile(path, "a target", 16)
    for answer in answers[:3]:
        file.add(answer)
    path.write_bytes(path.read_bytes()[:-5])  # a write that was not finished
    again = AnswerFile(path, "a target", 16)
    asked = [answer.prompt for answer in answers]
    assert [answer.text for answer in again.of(asked)] == [answer.text for answer in answers[:2]]
    assert again.unanswered(asked) == asked[2:]
    again.add(answers[3])
    (first, _, last) = AnswerFile(path, "a target", 16).of(asked)
    assert (first.top == answers[0].top).all()
    assert (last.logprobs == answers[3].logprobs).all()
    assert AnswerFile(path, "another target", 16).of(asked) == []


@pytest.mark.slow
@pytest.mark.usefixtures("measured_by_what_was_learned")
def test_a_tuned_drafter_agrees_more_and_is_registered(target: Path, start: Path) -> None:
    tuned = tune(str(target), TuneOptions(**vars(QUICK) | {"start": str(start), "steps": 120}))
    assert tuned.after.agreement.tokens == tuned.before.agreement.tokens > 100
    assert tuned.after.agreement.top1 > 1.5 * tuned.before.agreement.top1
    assert tuned.registered
    assert tuned.path is not None
    (pair,) = PairRegistry().pairs(read_header(target).fingerprint)
    assert pair.preferred
    assert (pair.path, pair.kind) == (tuned.path, MADE)
    assert "It is the best drafter known: --draft auto uses it." in tuned.description
    with edgespec.load(target, context=256) as engine:
        assert engine.notes[0].startswith(f"Drafting with {tuned.path.name}, made from this target")
    # Answers are kept for the next tuning; all else of this one is gone.
    (left,) = (drafters_folder() / "work").rglob("tuning-*")
    assert left.suffix == ".answers"


@pytest.mark.slow
@pytest.mark.usefixtures("measured_by_what_was_learned")
def test_a_better_drafter_is_not_replaced(target: Path, start: Path, tmp_path: Path) -> None:
    better = make_drafter(target, tmp_path / "better.gguf", quantization="q8_0")
    fingerprint = read_header(target).fingerprint
    PairRegistry().add(DrafterPair(fingerprint, target.name, str(better), MADE))
    output = tmp_path / "tuned.gguf"
    tuned = tune(
        str(target), TuneOptions(**vars(QUICK) | {"start": str(start), "steps": 1, "output": output})
    )
    assert not tuned.registered
    assert tuned.rival is not None
    assert tuned.rival.path == better
    assert [pair.path for pair in PairRegistry().pairs(fingerprint)] == [better]
    assert output.exists()  # as it was asked for
    assert tuned.description[-1].startswith("It is not registered: with better.gguf")


@pytest.mark.slow
@pytest.mark.usefixtures("measured_by_what_was_learned")
def test_interrupted_training_continues_to_the_same_file(target: Path, start: Path, tmp_path: Path) -> None:
    options = vars(QUICK) | {"start": str(start)}
    whole = tune(str(target), TuneOptions(**options | {"output": tmp_path / "whole.gguf"}))
    told: list[str] = []

    def stop(what: str, _part: float) -> None:
        told.append(what)
        if what.startswith("Tuning, step 4"):
            raise KeyboardInterrupt

    parts = TuneOptions(**options | {"output": tmp_path / "parts.gguf"})
    with pytest.raises(KeyboardInterrupt):
        tune(str(target), parts, stop)
    assert [what.split(",")[1] for what in told if what.startswith("Tuning")] == [
        f" step {step}" for step in (1, 2, 3, 4)
    ]
    told.clear()
    again = tune(str(target), parts, lambda what, _part: told.append(what))
    assert next(what for what in told if what.startswith("Tuning")).startswith("Tuning, step 4")
    assert again.trained.steps == 6
    assert whole.path is not None
    assert again.path is not None
    # Texts that are read together round a little otherwise, and so do products in more threads.
    one, other = (np.frombuffer(path.read_bytes(), np.uint8) for path in (whole.path, again.path))
    assert len(one) == len(other)
    assert (one == other).mean() > 0.95


@pytest.mark.slow
def test_interrupted_answering_continues(target: Path, start: Path) -> None:
    options = TuneOptions(**vars(QUICK) | {"start": str(start), "steps": 1})

    def stop(what: str, _part: float) -> None:
        if what == "The target answers, 5 so far":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(str(target), options, stop)
    (file,) = (drafters_folder() / "work").rglob("*.answers")
    before = file.read_bytes()
    told: list[str] = []
    tuned = tune(str(target), options, lambda what, _part: told.append(what))
    assert file.read_bytes().startswith(before)
    assert len(file.read_bytes()) > 2 * len(before)
    assert tuned.trained.answers == 12
    # 16 held-out answers and 12 to learn from, 5 of which were there; the last one is told by no pass.
    counts = {int(what.split()[3]) for what in told if what.startswith("The target answers")}
    assert counts == set(range(16 + 12 - 5))


def test_what_cannot_be_tuned(
    target: Path, start: Path, smol_path: Path, gemma_path: Path, tmp_path: Path
) -> None:
    mixture = write_tiny(tmp_path / "moe.gguf", "qwen3moe", smol_path)
    with pytest.raises(BackendError, match=r"moe.gguf cannot be tuned: its architecture is 'qwen3moe'."):
        tune(str(smol_path), TuneOptions(start=str(mixture)))
    with pytest.raises(PairingError, match=r"The vocabularies of .* differ"):
        tune(str(gemma_path), TuneOptions(start=str(smol_path)))
    with pytest.raises(UsageError, match="would draft for itself"):
        tune(str(target), TuneOptions(start=str(target)))
    with pytest.raises(UsageError, match="--minutes must be positive, not 0"):
        tune(str(target), TuneOptions(minutes=0))
    with pytest.raises(UsageError, match=r"would overwrite .*, from which it is made"):
        tune(str(target), TuneOptions(start=str(smol_path), output=target))
    with pytest.raises(UsageError, match=rf"would overwrite .*{start.name}, from which it is made"):
        tune(str(target), TuneOptions(start=str(start), output=start))


def test_the_command(
    target: Path,
    start: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    measured_by_what_was_learned: None,
) -> None:
    own = tmp_path / "own.txt"
    own.write_text("Say something.\n\nSay something else.\n")
    output = tmp_path / "tuned.gguf"
    command = [
        "draft",
        "tune",
        str(target),
        "--from",
        str(start),
        "--prompts",
        str(own),
        "--minutes",
        "0.02",
    ]
    assert main([*command, "-t", "1", "-o", str(output), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(output)
    assert output.exists()
    assert found["trained"]["answers"] >= 4
    assert main(["draft", "tune", str(target), "--prompts", str(tmp_path / "none")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
