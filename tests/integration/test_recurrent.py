"""Models that keep a running state: chains instead of trees, and the same text."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import edgespec
from edgespec.errors import BackendError
from edgespec.generation import GenerationConfig

EMBEDDING, INNER, STATE, RANK, CONV, LAYERS = 32, 64, 16, 4, 4, 2


@pytest.fixture(scope="module")
def mamba_path(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mamba with random weights and the default model's vocabulary: a real recurrent model."""
    path = tmp_path_factory.mktemp("models") / "tiny-mamba.gguf"
    source = gguf.GGUFReader(smol_path)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, field in source.fields.items():
        if name.startswith("tokenizer.ggml."):
            kind = field.types[0]
            sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=sub_type)
    n_vocab = len(source.fields["tokenizer.ggml.tokens"].data)
    rng = np.random.default_rng(1)

    def add(name: str, *shape: int, scale: float = 0.3) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) * scale).astype(np.float32))

    add("token_embd.weight", n_vocab, EMBEDDING, scale=1.0)
    add("output_norm.weight", EMBEDDING, scale=1.0)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", EMBEDDING, scale=1.0)
        add(f"blk.{i}.ssm_in.weight", 2 * INNER, EMBEDDING)
        add(f"blk.{i}.ssm_conv1d.weight", INNER, CONV)
        add(f"blk.{i}.ssm_conv1d.bias", INNER)
        add(f"blk.{i}.ssm_x.weight", RANK + 2 * STATE, INNER)
        add(f"blk.{i}.ssm_dt.weight", INNER, RANK)
        add(f"blk.{i}.ssm_dt.bias", INNER)
        writer.add_tensor(f"blk.{i}.ssm_a", -np.abs(rng.standard_normal((INNER, STATE))).astype(np.float32))
        add(f"blk.{i}.ssm_d", INNER)
        add(f"blk.{i}.ssm_out.weight", EMBEDDING, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_chains_give_the_text_of_plain_decoding(mamba_path: Path, draft: str) -> None:
    config = GenerationConfig(max_tokens=40)
    prompt = "one two three one two three one two"
    with edgespec.load(mamba_path, draft="none", context=256) as engine:
        plain = engine.generate(prompt, config, raw=True)
    drafter = mamba_path if draft == "itself" else draft
    with edgespec.load(mamba_path, draft=drafter, tree_budget=8, context=256) as engine:
        answer = engine.generate(prompt, config, raw=True)
        again = engine.generate(prompt, config, raw=True)
        assert any("running state" in note for note in engine.notes)
    assert answer.tokens == again.tokens == plain.tokens
    assert max(record.nodes for record in answer.passes) > 1


def test_exact_is_refused_with_the_reason(mamba_path: Path) -> None:
    with pytest.raises(BackendError, match="keeps a running state") as error:
        edgespec.load(mamba_path, exact=True)
    assert error.value.hint == "Use --no-exact."
