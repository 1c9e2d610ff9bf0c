"""Published heads become GGUF files that say the same, or are refused with what is not known of them."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.cli.main import main
from edgespec.errors import ModelFileError, PairingError, UsageError
from edgespec.heads.eagle.eagle_conversion import convert_head, head_shape, head_weights, neighbouring_pairs
from edgespec.heads.eagle.eagle_file import FloatArray
from edgespec.heads.eagle.eagle_head import read_eagle_head
from edgespec.heads.shared.layer_head import drafted_tokens
from edgespec.llama.trials.tiny_hybrid import N_VOCAB
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.safetensors import StoredTensor, read_safetensors
from edgespec.models.hub.registry import PairRegistry
from tests.heads.files import N_LAYERS, SHAPE, WIDTH, write_target
from tests.heads.reference import random_weights

OFFSETS = np.arange(SHAPE.n_drafted, dtype=np.int64)  # every second token
PUBLISHED = {
    "fc.weight": "fc.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "blk.0.attn_norm.weight": "{}input_layernorm.weight",
    "blk.0.attn_norm_2.weight": "{}hidden_norm.weight",
    "blk.0.attn_q.weight": "{}self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "{}self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "{}self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "{}self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "{}post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "{}mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "{}mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "{}mlp.down_proj.weight",
}
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 1,
    "draft_vocab_size": SHAPE.n_drafted,
    "hidden_size": WIDTH,
    "intermediate_size": SHAPE.hidden,
    "num_attention_heads": SHAPE.heads,
    "num_key_value_heads": SHAPE.heads_kv,
    "head_dim": SHAPE.head,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 4096,
    "norm_before_residual": True,
}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """As the format's description has it; floats are written as BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        if values.dtype == np.int64:
            kind, raw = "I64", values.tobytes()
        elif values.dtype == np.bool_:
            kind, raw = "BOOL", values.tobytes()
        else:
            kind, raw = "BF16", (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def brief(values: FloatArray) -> FloatArray:
    """Values that BF16 holds exactly."""
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


class Published:
    """A head as it is published, and what it should become."""

    def __init__(self, folder: Path, prefix: str = "midlayer.") -> None:
        self.folder = folder / "head"
        self.folder.mkdir()
        rng = np.random.default_rng(3)
        self.weights = {name: brief(values) for name, values in random_weights(SHAPE.tensors, rng).items()}
        self.tensors: dict[str, Any] = {
            PUBLISHED[name].format(prefix): values for name, values in self.weights.items()
        }
        self.tensors |= {"d2t": OFFSETS, "t2d": np.zeros(N_VOCAB, dtype=np.bool_)}
        self.tensors["embed_tokens.weight"] = np.zeros((N_VOCAB, WIDTH), dtype=np.float32)
        self.config = dict(CONFIG)
        embedding = np.zeros((N_VOCAB, WIDTH), dtype=np.float32)
        self.target = write_target(folder / "large.gguf", embedding, rng)

    def write(self) -> Path:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        write_safetensors(self.folder / "model.safetensors", self.tensors)
        return self.folder


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path)


def test_a_head_becomes_a_gguf_file(published: Published, capsys: pytest.CaptureFixture[str]) -> None:
    # A target of four layers has no third layer from its end that is not among the first.
    published.config["eagle_aux_hidden_state_layer_ids"] = [2, N_LAYERS // 2, N_LAYERS - 3]
    command = ["draft", "convert", str(published.target), str(published.write()), "--quantization", "f16"]
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    path = Path(said["path"])
    head = read_eagle_head(read_header(path))
    assert head.layers == tuple(said["layers"]) == (2, 2, 1)
    assert head.borrows_embedding, "it is a copy of the target's"
    assert drafted_tokens(head).tolist() == list(range(0, 2 * SHAPE.n_drafted, 2))
    metadata = head.header.metadata
    assert metadata["eagle3.norm_before_residual"] is True
    assert metadata["eagle3.rope.freq_base"] == 5e5
    assert metadata["eagle3.context_length"] == 4096
    stored = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name != "d2t"]
    found = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in stored}
    for name, values in published.weights.items():
        expected = values
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            expected = neighbouring_pairs(values, values.shape[0] // SHAPE.head)
            assert not np.array_equal(expected, values)
        np.testing.assert_allclose(found[name], expected, rtol=1e-3, atol=1e-6)
    (pair,) = PairRegistry().pairs(read_header(published.target).fingerprint)
    assert (pair.path, pair.recipe) == (path, "head (EAGLE-3)")


def test_the_other_layout_and_a_nested_configuration(tmp_path: Path) -> None:
    published = Published(tmp_path, "layers.0.")
    published.config = {
        "draft_vocab_size": CONFIG["draft_vocab_size"],
        "transformer_layer_config": {k: v for k, v in CONFIG.items() if k != "draft_vocab_size"},
    }
    made = convert_head(published.write(), str(published.target), output=tmp_path / "out.gguf")
    assert made.path.stat().st_size == made.n_bytes
    assert gguf.GGUFReader(made.path).get_tensor(0).tensor_type == gguf.GGMLQuantizationType.Q8_0


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"num_hidden_layers": 2}, "has no EAGLE-3 head"),
        ({"draft_vocab_size": None}, "has no EAGLE-3 head"),
        ({"norm_before_fc": True}, "it sets norm_before_fc"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, r"it reads the layers \[1, 2, 3\]"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "it scales positions by yarn"),
        ({"hidden_size": None}, "lacks its sizes"),
        ({"intermediate_size": 64}, r"its tensor midlayer.mlp.gate_proj.weight of the shape \[96, 64\]"),
    ],
)
def test_what_is_not_known_is_refused(published: Published, changes: dict[str, Any], fault: str) -> None:
    published.config |= changes
    with pytest.raises(ModelFileError, match=fault):
        convert_head(published.write(), str(published.target))


def test_tensors_that_are_missing_or_unknown(published: Published, tmp_path: Path) -> None:
    spare = published.tensors.pop("norm.weight")
    with pytest.raises(ModelFileError, match=r"it lacks output_norm\.weight"):
        convert_head(published.write(), str(published.target))
    published.tensors |= {"norm.weight": spare, "gate.weight": spare}
    with pytest.raises(ModelFileError, match=r"its tensor gate\.weight of the shape \[64\] is not known"):
        convert_head(published.write(), str(published.target))
    with pytest.raises(UsageError, match="There is no quantization 'q9'"):
        convert_head(published.folder, str(published.target), quantization="q9")
    with pytest.raises(ModelFileError, match=r"has no readable config\.json"):
        convert_head(tmp_path, str(published.target))


def test_a_head_of_another_model_leaves_no_file(published: Published, tmp_path: Path) -> None:
    published.config["target_hidden_size"] = 32
    published.tensors["fc.weight"] = np.zeros((WIDTH, 96), dtype=np.float32)
    with pytest.raises(PairingError, match="it reads hidden states of 32 elements, not 64"):
        convert_head(published.write(), str(published.target), output=tmp_path / "out.gguf")
    assert not list(tmp_path.glob("out.gguf*"))


def test_long_contexts_slow_the_rotation(published: Published) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    published.config["rope_scaling"] = scaling
    made = convert_head(published.write(), str(published.target))
    (factors,) = [t.data for t in gguf.GGUFReader(made.path).tensors if t.name == "rope_freqs.weight"]
    assert factors.shape == (SHAPE.head // 2,)
    assert (factors[0], factors[-1]) == (1.0, 8.0)
    assert (np.diff(factors) >= 0).all()


def test_a_head_of_another_width_keeps_its_embedding(published: Published) -> None:
    header = read_header(published.target)
    shape = head_shape({**CONFIG, "hidden_size": 32, "target_hidden_size": WIDTH}, header, published.folder)
    weights = random_weights(shape.tensors, np.random.default_rng(1))
    tensors: dict[str, Any] = {PUBLISHED[n].format("midlayer."): brief(w) for n, w in weights.items()}
    tensors["embed_tokens.weight"] = brief(np.ones((N_VOCAB, 32), dtype=np.float32))
    published.tensors = tensors
    stored = read_safetensors(published.write() / "model.safetensors")
    found = head_weights(stored, shape, None, published.folder)
    assert (found["token_embd.weight"] == 1).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 8), st.integers(0, 500))
def test_both_orders_of_rows_rotate_alike(seed: int, heads: int, half: int, position: int) -> None:
    """Rotating element i with i + half, as published heads do, gives the same products as neighbours."""
    rng = np.random.default_rng(seed)
    matrices = [rng.standard_normal((heads * 2 * half, 3)).astype(np.float32) for _ in range(2)]
    rows = [rng.standard_normal(3).astype(np.float32) for _ in range(2)]
    angles = position * 100.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)

    def apart(x: FloatArray) -> FloatArray:
        a, b = np.split(x.reshape(heads, 2 * half), 2, axis=1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    def beside(x: FloatArray) -> FloatArray:
        a, b = x.reshape(heads, -1)[:, 0::2], x.reshape(heads, -1)[:, 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(heads, -1)

    one, other = matrices
    expected = (apart(one @ rows[0]) * (other @ rows[1]).reshape(heads, -1)).sum(axis=1)
    query, key = neighbouring_pairs(one, heads) @ rows[0], neighbouring_pairs(other, heads) @ rows[1]
    found = (beside(query) * key.reshape(heads, -1)).sum(axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@given(content=st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with contextlib.suppress(ModelFileError):
        read_safetensors(path)


def test_files_that_lie_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for entry in (
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 16]},
        {"dtype": "F32"},
        7,
    ):
        text = json.dumps({"a": entry}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
        with pytest.raises(ModelFileError, match="is not a usable safetensors file"):
            read_safetensors(path)
    whole = StoredTensor(path, "I64", (2,), 0)
    with pytest.raises(ModelFileError, match="a matrix has the type I64"):
        whole.floats()
    with pytest.raises(ModelFileError, match="a table has the type F32"):
        StoredTensor(path, "F32", (2,), 0).integers()
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_safetensors(tmp_path / "none")
