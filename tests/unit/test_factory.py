"""Drafters made from the real SmolLM2, loaded by llama.cpp."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import gguf
import llama_cpp
import pytest

from edgespec.errors import BackendError, ModelFileError, OutputError, UsageError
from edgespec.kernels.ggml.functions import load_backends
from edgespec.llama.quantize import QUANTIZATIONS, make_drafter
from edgespec.models.gguf.header import read_header
from edgespec.processes import children
from tests.links import needs_links
from tests.tiers import slow_except
from tests.tiny import N_LAYER, finish, write_tiny
from tests.waiting import PATIENCE_S, wait_until

LAYERS = 30
PROMPT = 12  # tokens


@pytest.fixture(scope="module")
def tiny_path(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that asks for every tensor type, and takes no time."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama", smol_path)


def test_requantized_drafter_has_the_asked_type_and_all_layers(q4_drafter_path: Path) -> None:
    header = read_header(q4_drafter_path)
    types = {tensor.name: gguf.GGMLQuantizationType(tensor.type_id).name for tensor in header.tensors}
    assert types["blk.0.ffn_up.weight"] == types["blk.29.attn_q.weight"] == "Q4_0"
    assert types["output_norm.weight"] == "F32"
    assert header.block_count == LAYERS


@pytest.fixture(scope="module")
def greedy_text(smol_path: Path) -> list[int]:
    """PROMPT tokens and what the target says after them."""
    model = load(smol_path)
    text = model.tokenize(b"The sun rises in the east and sets in the west because the Earth")[:PROMPT]
    for token in model.generate(list(text), temp=0.0):
        text.append(token)
        if len(text) == 48:
            break
    model.close()
    return text


@pytest.mark.parametrize("kind", ["q4_drafter_path", "dropped_drafter_path"])
def test_drafter_guesses_what_its_target_says(
    kind: str, greedy_text: list[int], request: pytest.FixtureRequest
) -> None:
    text = greedy_text
    drafter = load(request.getfixturevalue(kind))
    drafter.eval(text)
    guesses = drafter.scores[PROMPT - 1 : len(text) - 1].argmax(axis=1)
    right = int((guesses == text[PROMPT:]).sum())
    drafter.close()
    # A broken model guesses about none of them.
    assert right >= 0.4 * (len(text) - PROMPT)


def test_every_quantization_is_known_to_llama_cpp() -> None:
    missing = [n for n in QUANTIZATIONS if not hasattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{n.upper()}")]
    assert missing == []


@pytest.mark.parametrize("quantization", slow_except(["f16", "q4_k_m", "iq4_xs", "q2_k"], QUANTIZATIONS))
def test_every_quantization_can_be_made(quantization: str, tiny_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "drafter.gguf"
    make_drafter(tiny_path, output, quantization=quantization)
    assert read_header(output).block_count == N_LAYER


def test_unknown_quantization_lists_the_known_ones(smol_path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        make_drafter(smol_path, tmp_path / "d.gguf", quantization="q9")
    assert caught.value.what == "There is no quantization 'q9'."
    assert caught.value.hint == (f"Choose one of {', '.join(QUANTIZATIONS)}.")


@needs_links
def test_output_that_is_the_target(smol_path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(smol_path)
    with pytest.raises(UsageError, match=r"The drafter would overwrite .*, from which it is made"):
        make_drafter(smol_path, link)


def test_no_target(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        make_drafter(tmp_path / "none.gguf", tmp_path / "d.gguf")
    assert caught.value.what == f"There is no model file {tmp_path / 'none.gguf'}."


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (0, "failed to read magic"),
        (5_000, "failed to read key-value pairs"),
        (
            50_000_000,
            "tensor 'blk.16.ffn_down.weight' data is not within the file bounds, "
            "model is corrupted or incomplete",
        ),
    ],
)
def test_cut_off_target(size: int, reason: str, smol_path: Path, tmp_path: Path) -> None:
    target = tmp_path / "cut.gguf"
    with smol_path.open("rb") as file:
        target.write_bytes(file.read(size))
    with pytest.raises(ModelFileError) as caught:
        make_drafter(target, tmp_path / "d.gguf")
    assert caught.value.what == f"{target} cannot be read as a GGUF model: {reason}"
    assert list(tmp_path.iterdir()) == [target]


def test_output_folder_that_does_not_exist(smol_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "none" / "d.gguf"
    with pytest.raises(OutputError) as caught:
        make_drafter(smol_path, output)
    assert caught.value.what == f"{output} cannot be written: there is no folder {output.parent}."


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on the size of a file")
def test_write_that_fails_midway_leaves_nothing(smol_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "d.gguf"
    script = f"""
        import resource
        from pathlib import Path
        from edgespec.errors import OutputError
        from edgespec.llama.quantize import make_drafter

        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))
        try:
            make_drafter(Path({str(smol_path)!r}), Path({str(output)!r}))
        except OutputError as error:
            print(error.what)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == f"{output} could not be written completely.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="sends a Unix signal")
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_quantizer_and_leaves_nothing(smol_path: Path, tmp_path: Path, number: str) -> None:
    # iq3_s takes long, so that the interrupt comes in the middle.
    script = f"""
        from pathlib import Path
        from edgespec.llama.quantize import make_drafter

        target, output = Path({str(smol_path)!r}), Path({str(tmp_path / "d.gguf")!r})
        make_drafter(target, output, quantization="iq3_s")
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        partial = tmp_path / "d.gguf.partial"
        wait_until(lambda: run.poll() is not None or (partial.exists() and partial.stat().st_size))
        run.send_signal(getattr(signal, number))
        _, errors = run.communicate(timeout=PATIENCE_S)
    if number == "SIGINT":
        assert errors.strip().endswith("KeyboardInterrupt")
    assert run.returncode == -getattr(signal, number)
    assert list(tmp_path.iterdir()) == []


def test_settings_may_differ_by_layer(tiny_path: Path, tmp_path: Path) -> None:
    target = tmp_path / "by-layer.gguf"
    with_key_value_heads_by_layer(tiny_path, target)
    output = make_drafter(target, tmp_path / "requantized.gguf")
    assert read_header(output).block_count == N_LAYER


@pytest.mark.skipif(sys.platform == "win32", reason="ends the process by a signal")
def test_quantizer_that_dies_is_reported(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_BOOT", "import os; os.abort()")
    with pytest.raises(BackendError) as caught:
        make_drafter(smol_path, tmp_path / "d.gguf")
    assert caught.value.what.startswith(
        f"llama.cpp could not make a drafter (q4_0) from {smol_path.name}: its process crashed (abort): "
    )
    assert not list(tmp_path.iterdir())


def load(path: Path) -> llama_cpp.Llama:
    load_backends()
    return llama_cpp.Llama(str(path), n_ctx=128, logits_all=True, verbose=False)


def tensors_of(model: Path) -> dict[str, tuple[int, bytes]]:
    """Type and data of each tensor."""
    data = model.read_bytes()
    return {
        tensor.name: (tensor.type_id, data[tensor.offset : tensor.offset + tensor.n_bytes])
        for tensor in read_header(model).tensors
    }


def with_key_value_heads_by_layer(source: Path, destination: Path) -> None:
    """Copy a model, its number of key-value heads written as one number for each layer."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(destination, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if key == "llama.attention.head_count_kv":
            writer.add_array(key, [value] * N_LAYER)
        else:
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, value, field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
