"""A tiny model of each architecture that llama.cpp knows, made by asking it what is missing.

    python -m tests.fuzz.architectures    # which can be made, and what stands in the way of the others

llama.cpp says which setting or tensor a file lacks and which shape a tensor should have. So a maker begins
with the settings that most models have and supplies what it is told, until the file loads and computes.
It works in child processes, because some answers are aborts.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from edgespec.errors import EdgeSpecError
from edgespec.processes.exit_status import crash_fault, describe_exit
from tests.fuzz.computing import compute
from tests.fuzz.headers import ARRAY, STRING, UINT32, Entry, Header, Tensor, small_model

FLOAT32, INT32, BOOL = 6, 5, 7
_F32, _F16 = 0, 1
WIDTH, HEADS, LAYERS, HIDDEN = 64, 2, 2, 128
_MAX_ATTEMPTS = 700
_CONTINUE = "--continue"

# Settings that all files get, and those that are supplied when they are asked for.
_USUAL: dict[str, int | float] = {
    "context_length": 256,
    "embedding_length": WIDTH,
    "block_count": LAYERS,
    "feed_forward_length": HIDDEN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}
_MLA = ("key_length_mla", "value_length_mla", "q_lora_rank", "kv_lora_rank")
_ASKED: dict[str, int | float] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
    "expert_chunk_feed_forward_length": 32,
    "expert_shared_count": 1,
    "expert_gating_func": 1,
    "expert_weights_scale": 1.0,
    "expert_group_scale": 1.0,
    "experts_per_group": 2,
    "leading_dense_block_count": 1,
    "interleave_moe_layer_step": 2,
    "moe_every_n_layers": 2,
    "attention.key_length": WIDTH // HEADS,
    "attention.value_length": WIDTH // HEADS,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 32,
    "attention.decay_lora_rank": 32,
    "attention.iclr_lora_rank": 32,
    "attention.value_residual_mix_lora_rank": 32,
    "attention.gate_lora_rank": 32,
    "attention.sliding_window": 32,
    "attention.indexer.head_count": HEADS,
    "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 8,
    "attention.shared_kv_layers": 0,
    "attention.group_norm_epsilon": 1e-5,
    "attention.group_norm_groups": 2,
    "attention.relative_buckets_count": 32,
    "attention.causal": 1,
    "attention.clamp_kqv": 8.0,
    "attention.max_alibi_bias": 8.0,
    "rope.dimension_count": WIDTH // HEADS,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * WIDTH,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 1,
    "shortconv.l_cache": 3,
    "wkv.head_size": 32,
    "time_mix_extra_dim": 32,
    "time_decay_extra_dim": 32,
    "rescale_every_n_layers": 0,
    "token_shift_count": 2,
    "features_length": WIDTH,
    "posnet.embedding_length": WIDTH,
    "posnet.block_count": 1,
    "convnext.embedding_length": WIDTH,
    "convnext.block_count": 1,
    "embedding_length_per_layer_input": 32,
    "altup.num_inputs": 2,
    "altup.active_idx": 0,
    "kda.head_dim": 32,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attention.scale": 1.0,
    "attention.output_scale": 1.0,
    "decoder_start_token_id": 0,
    "pooling_type": 1,
    "use_parallel_residual": 1,
    "expert_weights_norm": 1,
    "attention.kv_lora_rank_swa": 32,
    "attention.key_length_swa": WIDTH // HEADS,
    "attention.value_length_swa": WIDTH // HEADS,
    "attention.indexer.kpool": 2,
    "attention.indexer.block_size": 16,
    "attn_res.block_size": 2,
    "attention.key_length_mla_swa": 48,
    "attention.value_length_mla_swa": 32,
    "adapters.count": 2,
    "hrm.layers_per_stack": 1,
    "hyper_connection.count": 2,
    "kda.gate_lower_bound": -5.0,
    "xielu.alpha_n": 0.5,
    "xielu.alpha_p": 0.5,
    "xielu.beta": 0.5,
    "xielu.eps": 1e-6,
}
_LISTS: dict[str, list[int]] = {
    "rope.dimension_sections": [4, 4, 4, 4],
    "attention.sliding_window_pattern": [1, 0],
    "swiglu_clamp_exp": [0, 0],
    "swiglu_clamp_shexp": [0, 0],
}
_EXPERTS: dict[str, int | float] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
}
# What sets architectures apart that load only so.
_OWN: list[tuple[str, dict[str, Any]]] = [
    (
        "deepseek2 deepseek32 glm-dsa mistral4 kimi-linear bailingmoe3 kimi-k3 hy_v4",
        {
            "attention.head_count_kv": 1,
            "attention.key_length": 48,
            "attention.value_length": 32,
            "attention.key_length_mla": 48,
            "attention.value_length_mla": 32,
            "attention.kv_lora_rank": 32,
            "attention.q_lora_rank": 32,
            "rope.dimension_count": 16,
        },
    ),
    (
        "minicpm3 plm",
        {
            "attention.key_length": 48,
            "attention.value_length": 32,
            "attention.kv_lora_rank": 32,
            "attention.q_lora_rank": 32,
            "rope.dimension_count": 16,
        },
    ),
    ("deepseek32 glm-dsa", {"attention.indexer.key_length": 64}),
    ("arwkv7 rwkv6qwen2", {"token_shift_count": 1}),
    ("plamo2", {"ssm.group_count": 0}),
    ("lfm2 lfm2moe jamba granitehybrid plamo2", {"attention.head_count_kv": [0, HEADS]}),
    ("kimi-linear kimi-k3 bailingmoe3", {"attention.head_count_kv": [0, 1]}),
    (
        "qwen35 qwen35moe qwen3next qwen4exp",
        {
            "full_attention_interval": 2,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "rope.dimension_count": 32,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 64,
            "ssm.state_size": 16,
            "ssm.time_step_rank": 4,
            "ssm.group_count": 2,
        },
    ),
    ("paddleocr", {"rope.dimension_sections": [4, 4, 4, 4]}),
    (
        "nemotron_h nemotron_h_moe",  # a layer of each kind
        {"block_count": 3, "attention.head_count_kv": [0, HEADS, 0], "feed_forward_length": [0, 0, HIDDEN]},
    ),
]
# Tensors that may be missing for llama.cpp's loader, and not when it computes.
_RECURRENT = ("ssm_conv1d.bias", "ssm_norm.weight")
_OPTIONAL = {
    "qwen35": ("blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"),
    "qwen35moe": ("blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"),
    "qwen3next": ("blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"),
    "falcon-h1": tuple(f"blk.{layer}.{name}" for layer in range(LAYERS) for name in _RECURRENT),
    "granitehybrid": tuple(f"blk.0.{name}" for name in _RECURRENT),
    "nemotron_h": tuple(f"blk.0.{name}" for name in _RECURRENT),
    "nemotron_h_moe": tuple(f"blk.0.{name}" for name in _RECURRENT),
}
# What a complaint that names no setting is about; each is tried once, in this order.
_HINTS: list[tuple[str, dict[str, int | float]]] = [
    ("expert|crashed", _EXPERTS),
    ("MLA|qk_nope|lora", {f"attention.{name}": _ASKED[f"attention.{name}"] for name in _MLA}),
    ("token type count", {"/tokenizer.ggml.token_type_count": 2}),
    ("crashed", {name: _ASKED[name] for name in _ASKED if name.startswith(("ssm.", "shortconv."))}),
    ("crashed", {name: _ASKED[name] for name in ("attention.key_length", "attention.value_length")}),
    ("crashed", {"rope.dimension_count": WIDTH // HEADS, "attention.sliding_window": 32}),
]
_CODES = {"u32": UINT32, "i32": INT32, "f32": FLOAT32, "bool": BOOL, "str": STRING, "arr": ARRAY}
_PRECISE = ("norm", "bias", "conv", "ssm_", "time_mix", "gate_inp", "sinks", "exp_probs")


def _guess(name: str) -> int | float:
    """A value for a setting that is not in `_ASKED`, by the last word of its name."""
    last = re.split(r"[._]", name)[-1]
    return {"rank": 32, "length": 32, "size": 32, "epsilon": 1e-6, "eps": 1e-6, "beta": 1.0}.get(last, 1)


class NotMade(Exception):
    """No tiny model of this architecture is known to load; the text says what stands in the way."""


def names() -> list[str]:
    """The architectures that this llama.cpp build knows: it is asked about every word in its library."""
    import llama_cpp

    library = next((Path(llama_cpp.__file__).parent / "lib").glob("*llama.*")).read_bytes()
    words = sorted(set(re.findall(rb"(?<=\0)[a-z0-9][a-z0-9_.-]{1,24}(?=\0)", library)))
    return [word.decode() for word in words if _knows(word)]


def _knows(architecture: bytes) -> bool:
    """True if llama.cpp has this architecture, by its error about a file with nothing else in it."""
    from edgespec.llama.runtime.model import Model

    header = Header([Entry(b"general.architecture", STRING, architecture)], [Tensor(b"x", (32,), _F32)])
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(header.to_bytes())
        file.flush()
        try:
            Model(Path(file.name), vetted=False).close()
        except EdgeSpecError as error:
            return "unknown model architecture" not in error.what
    return True


def make(architecture: str, vocabulary_of: Path) -> Header:
    """A tiny model that loads and computes.

    Raises:
        NotMade: there is none.
    """
    maker = _Maker(architecture, vocabulary_of)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "maker.pickle"
        while maker.attempts < _MAX_ATTEMPTS:
            state.write_bytes(pickle.dumps(vars(maker)))
            command = [sys.executable, "-m", "tests.fuzz.architectures", _CONTINUE, folder]
            # A backtrace would start a debugger.
            variables = {**os.environ, "GGML_NO_BACKTRACE": "1"}
            done = subprocess.run(command, env=variables, stderr=subprocess.PIPE, check=False)
            vars(maker).update(pickle.loads(state.read_bytes()))
            if not done.returncode:
                return maker.header
            answer = done.stderr.decode("utf-8", "replace").strip()
            if not crash_fault(done.returncode):
                raise NotMade(answer)
            # ggml's abort says why.
            asserted = re.findall(r"[^\n]*(?:GGML_ASSERT|GGML_ABORT|fatal|abort)[^\n]*", answer)
            answer = f"{describe_exit(done.returncode)}: {asserted[-1] if asserted else ''}"
            maker.supply(answer)
    raise NotMade(f"after {_MAX_ATTEMPTS} attempts: {answer}")


def _continue(folder: Path) -> str:
    """A child's part: supply what is missing until the model computes, or until llama.cpp aborts.

    Returns:
        What stands in the way; empty if nothing does.
    """
    path, state, maker = folder / "model.gguf", folder / "maker.pickle", object.__new__(_Maker)
    vars(maker).update(pickle.loads(state.read_bytes()))
    while maker.attempts < _MAX_ATTEMPTS:
        path.write_bytes(maker.header.to_bytes())
        try:
            compute(path)
            return ""
        except Exception as error:
            answer = str(getattr(error, "what", error))
        try:
            maker.supply(answer)
        except NotMade as error:
            return str(error)
        state.write_bytes(pickle.dumps(vars(maker)))
    return answer


class _Maker:
    def __init__(self, architecture: str, vocabulary_of: Path) -> None:
        self._prefix = f"{architecture}."
        base = small_model(vocabulary_of)
        self.header = Header(
            [Entry(b"general.architecture", STRING, architecture.encode())]
            + [entry for entry in base.entries if entry.key.startswith(b"tokenizer.ggml.")]
        )
        for name, value in _USUAL.items():
            self._set(name, value)
        for architectures, own in _OWN:
            if architecture in architectures.split():
                for name, value in own.items():
                    self._set(name, value)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name in _OPTIONAL.get(architecture, ()):
            self._place(name, (32,))
        self._hints = list(_HINTS)
        self._again = False
        self.attempts = 0

    def supply(self, answer: str) -> None:
        """Change what llama.cpp complained about.

        Raises:
            NotMade: it is nothing that can be supplied.
        """
        self.attempts += 1
        if match := re.search(r"array key not found in model: (\S+?)[.:]?(?:$|\s)", answer):
            self._supply_key(match[1], answer, array=True)
        elif match := re.search(r"key not found in model: (\S+?)[.:]?(?:$|\s)", answer):
            self._supply_key(match[1], answer)
        elif match := re.search(r"key (\S+) has wrong type \w+ but expected type (\w+)", answer):
            self._retype(match[1], match[2], answer)
        elif match := re.search(r"(?:key )?(\S+) has wrong array element type i32", answer):
            self._refloat(match[1], answer)
        elif match := re.search(r"key (\S+) has wrong array length; expected (\d+)", answer):
            name = match[1].removeprefix(self._prefix)
            self._set(name, [(_LISTS.get(name) or [0])[0]] * int(match[2]))
        elif match := re.search(r"(?:missing tensor '([^']+)'|tensor '([^']+)' not found)", answer):
            name = match[1] or match[2]
            if name in self._shapes:
                raise NotMade(answer)
            # Layers are mostly alike.
            self._place(name, self._shapes.get(re.sub(r"^blk\.\d+\.", "blk.0.", name), (32,)))
        elif match := re.search(r"tensor '([^']+)' has wrong shape; expected\s+([\d, ]+?), got", answer):
            shape = tuple(int(size) for size in match[2].replace(" ", "").split(",") if size)
            if self._shapes.get(match[1]) == shape:
                raise NotMade(answer)
            self._place(match[1], shape)
        elif "wrong number of tensors" in answer and self.header.tensors and not self._again:
            self._again = True  # some were for what has become another kind of layer
            self.header.tensors.clear()
            self._shapes.clear()
        else:
            self._take_hint(answer)

    def _take_hint(self, answer: str) -> None:
        for hint in self._hints:
            if re.search(hint[0], answer):
                self._hints.remove(hint)
                for name, value in hint[1].items():
                    self._set(name, value)
                return
        raise NotMade(answer)

    def _supply_key(self, key: str, answer: str, *, array: bool = False) -> None:
        name = key.removeprefix(self._prefix)
        if any(entry.key.decode() == key for entry in self.header.entries):
            raise NotMade(answer)
        value: float | list[int] | None = _LISTS.get(name, _ASKED.get(name))
        if value is None:
            value = [1] * LAYERS if array else _guess(name)
        self._set(name if name != key else f"/{key}", value)

    def _retype(self, key: str, kind: str, answer: str) -> None:
        at = self.header.index(key)
        if kind not in _CODES or self.header.entries[at].type_id == _CODES[kind]:
            raise NotMade(answer)
        entry = self.header.entries[at]
        if kind == "arr":
            self.header.entries[at] = Entry(entry.key, ARRAY, [int(entry.value)] * LAYERS, INT32)
            return
        value = float(entry.value) if kind == "f32" else int(entry.value)
        self.header.entries[at] = Entry(entry.key, _CODES[kind], value)

    def _refloat(self, key: str, answer: str) -> None:
        at = self.header.index(key)
        entry = self.header.entries[at]
        if entry.element != INT32:
            raise NotMade(answer)
        self.header.entries[at] = Entry(entry.key, ARRAY, [float(value) for value in entry.value], FLOAT32)

    def _set(self, name: str, value: float | list[int]) -> None:
        key = (name[1:] if name.startswith("/") else self._prefix + name).encode()
        kept = [entry for entry in self.header.entries if entry.key != key]
        if isinstance(value, list):
            entry = Entry(key, ARRAY, value, INT32)
        else:
            entry = Entry(key, FLOAT32 if isinstance(value, float) else UINT32, value)
        self.header.entries[:] = [*kept, entry]

    def _place(self, name: str, shape: tuple[int, ...]) -> None:
        self._shapes[name] = shape
        precise = len(shape) == 1 or any(part in name for part in _PRECISE)
        tensor = Tensor(name.encode(), shape, _F32 if precise else _F16)
        at = [i for i, known in enumerate(self.header.tensors) if known.name == tensor.name]
        if at:
            self.header.tensors[at[0]] = tensor
        else:
            self.header.tensors.append(tensor)


def main() -> int:
    from edgespec.llama.runtime.backend import start_backend
    from edgespec.models.hub import catalog

    start_backend()
    if sys.argv[1:2] == [_CONTINUE]:
        sys.exit(_continue(Path(sys.argv[2])) or 0)
    vocabulary_of, made = catalog.find(None), 0
    known = sys.argv[1:] or names()
    for name in known:
        try:
            header = make(name, vocabulary_of)
        except NotMade as error:
            print(f"{name}: {' '.join(str(error).split())[-160:]}", flush=True)
        else:
            made += 1
            print(f"{name}: {len(header.tensors)} tensors, {len(header.to_bytes()) >> 10} KiB", flush=True)
    print(f"{made} of {len(known)} made")
    return 0


if __name__ == "__main__":
    sys.exit(main())
