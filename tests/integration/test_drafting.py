"""Making drafters from real models, measuring them, and drafting with whatever is there."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from filelock import FileLock

import edgespec
from edgespec.cli.main import main
from edgespec.drafting.agreement import PROMPTS, AgreementMeter, SampleAnswer, write_sample_answers
from edgespec.drafting.make import MakeOptions, SavedMeasurements, make_for
from edgespec.errors import OutputError, UsageError
from edgespec.models.gguf.header import read_header
from edgespec.models.hub.registry import REGISTERED, DrafterPair, PairRegistry, drafters_folder
from edgespec.speculation.drafters.proposing import ProposingDrafter


@pytest.fixture(scope="module")
def texts(smol_path: Path) -> tuple[SampleAnswer, ...]:
    """Written with the kernels that read them below: those of other layouts round differently."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_KERNELS", "plain")
        with edgespec.load(smol_path, draft="none", context=512) as engine:
            return write_sample_answers(engine, PROMPTS[:3], 32).samples


def test_a_model_agrees_with_itself(
    smol_path: Path, texts: tuple[SampleAnswer, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_KERNELS", "plain")  # for attention too, as the texts were written
    with AgreementMeter(smol_path, texts) as reader:
        found = reader.agreement(texts)
    assert found.tokens == sum(len(text.answer) for text in texts) > 60
    # Batches round differently than single tokens, so near-ties may fall otherwise.
    assert found.top1 > 0.97
    assert found.top4 == 1.0


@pytest.mark.slow
def test_a_drafter_is_made_registered_and_taken(smol_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["draft", "make", str(smol_path), "--quantization", "q4_0", "--tokens", "16"]
    assert main([*command, "--pass-seconds", "1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["quantization"] == "q4_0"
    path = Path(made["path"])
    assert path.parent == drafters_folder()
    assert made["bytes"] == path.stat().st_size < smol_path.stat().st_size
    assert 0.5 < made["agreement"]["top1"] <= made["agreement"]["top4"] <= 1
    (pair,) = PairRegistry().pairs(read_header(smol_path).fingerprint)
    assert (pair.kind, pair.path, pair.recipe) == ("made", path, "q4_0")
    assert list((drafters_folder() / "work").rglob("*.gguf")) == []
    with edgespec.load(smol_path, context=256) as engine:
        assert engine.notes[0] == (
            f"Drafting with {path.name}, made from this target, agreement {pair.top1:.2f}."
        )
        assert engine.drafter.name.startswith(f"{path.stem}, ")
    assert main(["models", "remove", str(smol_path), "--yes", "--json"]) == 0
    removed = json.loads(capsys.readouterr().out)
    assert removed["freed_bytes"] >= made["bytes"]
    assert removed["kept"][0].startswith(f"{smol_path.name} belongs to a Python package")
    assert smol_path.exists()
    assert not path.exists()
    assert PairRegistry().pairs() == []


@pytest.mark.slow
def test_an_interrupted_choice_says_what_it_kept_and_continues(
    smol_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # With a budget of its own: what is free changes while other programs run.
    options = MakeOptions(memory=1 << 30, quantizations=("q4_0", "q2_k"), pass_s=1.0, tokens=8)
    flags = ["--memory", "1GiB", "--quantization", "q4_0", "--quantization", "q2_k"]
    flags += ["--pass-seconds", "1", "--tokens", "8"]
    save = SavedMeasurements.save

    def save_and_interrupt(state: SavedMeasurements, key: str, value: object) -> None:
        save(state, key, value)
        if key == "candidate q4_0":
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(SavedMeasurements, "save", save_and_interrupt)
        assert main(["draft", "make", str(smol_path), *flags]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "Interrupted. Kept: the target's sample text and 1 measured candidate. "
        "Run the same command to continue."
    )
    seen: list[str] = []
    made = make_for(str(smol_path), options, lambda what, _: seen.append(what))
    assert not any(what.startswith(("The target writes", "Loading")) for what in seen)
    assert made.measured.quantization in ("q4_0", "q2_k")


def test_a_second_run_for_the_same_target_is_refused(smol_path: Path) -> None:
    folder = drafters_folder() / "work" / read_header(smol_path).fingerprint[:16]
    folder.mkdir(parents=True)
    with (
        FileLock(folder / "lock"),
        pytest.raises(UsageError, match="Another 'edgespec draft' command"),
    ):
        make_for(str(smol_path), MakeOptions())


def test_wrong_wishes(smol_path: Path, tmp_path: Path) -> None:
    for options, message in (
        (MakeOptions(quantizations=("q9",)), "There is no quantization 'q9'."),
        (MakeOptions(pass_s=-1.0), "--pass-seconds must be positive, not -1."),
        (MakeOptions(tokens=1), "--tokens must be from 8 to 512, not 1."),
    ):
        with pytest.raises(UsageError) as caught:
            make_for(str(smol_path), options)
        assert caught.value.what == message
    with pytest.raises(OutputError, match="There is no folder"):
        make_for(str(smol_path), MakeOptions(output=tmp_path / "no" / "d.gguf"))
    model = tmp_path / "model.gguf"
    shutil.copyfile(smol_path, model)
    with pytest.raises(UsageError, match=r"The drafter would overwrite .*, from which it is made"):
        make_for(str(model), MakeOptions(output=tmp_path / "." / model.name))


@pytest.mark.slow
def test_pairs_are_examined_and_remembered(
    smol_path: Path, gemma_path: Path, q4_drafter_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "pair", str(smol_path), str(q4_drafter_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert all(check["passed"] for check in found["checks"])
    assert 0.6 < found["agreement"]["top1"] < 0.95
    (pair,) = PairRegistry().pairs()
    assert (pair.kind, pair.path) == (REGISTERED, q4_drafter_path)

    assert main(["models", "pair", str(gemma_path), str(smol_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "49152 differ (token 0 is '<pad>' and '<|endoftext|>';" in out
    assert re.search(r"They differ; 4\d,\d{3} tokens are in both, and agree on [2-8]\d% of tokens", out)
    other = next(pair for pair in PairRegistry().pairs() if pair.path == smol_path)
    assert other.top1 is not None
    assert other.top4 is not None
    assert 0.2 < other.top1 < other.top4 < 1

    assert main(["models", "pair", str(q4_drafter_path), str(smol_path)]) == 1
    assert f"The drafter {smol_path.name} (93.8 MiB) is larger than its target" in capsys.readouterr().err
    assert main(["models", "pair", str(smol_path), str(smol_path)]) == 2


def test_a_registered_drafter_that_was_damaged_is_passed_over(smol_path: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF but no more")
    PairRegistry().add(DrafterPair(read_header(smol_path).fingerprint, "smol", str(bad), REGISTERED))
    with edgespec.load(smol_path, context=128) as engine:
        assert isinstance(engine.drafter, ProposingDrafter), "it drafts without a model"
        assert any("No drafter for this target" in note for note in engine.notes)
