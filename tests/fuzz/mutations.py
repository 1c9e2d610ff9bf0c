"""Ways to damage a header: each knows the structure, and each number makes one file, always the same."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.fuzz.headers import ARRAY, CODES, STRING, Entry, Header

# Each number stays the file it was: what was thought of later is done to files of higher numbers only.
_LATER = 2_000_000
_DAMAGED_BYTES = 30_000  # from the beginning
_RANGES = {"B": 8, "H": 16, "I": 32, "Q": 64, "b": -8, "h": -16, "i": -32, "q": -64}


def mutate(base: Header, seed: int) -> bytes:
    """The file of this number."""
    head, zeros = mutated(base, seed)
    return head + bytes(zeros)


def mutated(base: Header, seed: int) -> tuple[bytes, int]:
    """The file of this number: its beginning, and how many zeros follow."""
    rng = random.Random(seed)
    header = base.copy()
    if rng.random() < 0.25:
        return _bytes_of(*header.parts(), rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if seed >= _LATER and rng.random() < 0.15:
            _kind(header, rng)
        else:
            rng.choices(_MUTATIONS, _WEIGHTS)[0](header, rng)
    parts = header.parts()
    return _bytes_of(*parts, rng) if rng.random() < 0.05 else parts


def _scalar(header: Header, rng: random.Random) -> None:
    """A number becomes another of its type, often one at an edge."""
    at = _pick(header, rng, lambda e: e.type_id in CODES)
    if at is not None:
        entry = header.entries[at]
        header.entries[at] = replace(entry, value=_number(entry.type_id, entry.value, rng))


def _retype(header: Header, rng: random.Random) -> None:
    """A value becomes one of another type."""
    at = rng.randrange(len(header.entries))
    type_id = rng.choice([*CODES, STRING])
    value: Any = b"text" if type_id == STRING else _number(type_id, 1, rng)
    header.entries[at] = Entry(header.entries[at].key, type_id, value)


def _text(header: Header, rng: random.Random) -> None:
    """A text becomes empty, long, not UTF-8, or another model's."""
    at = _pick(header, rng, lambda e: e.type_id == STRING)
    if at is not None:
        entry = header.entries[at]
        texts = [b"", b"\xff\xfe", b"a" * 70_000, b"%s%n", b"qwen2", b"gemma3", b"mamba", b"gpt2", b"llama"]
        texts += [b"bert", b"t5", b"spm", b"rwkv", b"deepseek2", b"smollm", b"default", entry.value + b"\0"]
        header.entries[at] = replace(entry, value=rng.choice(texts))


def _array(header: Header, rng: random.Random) -> None:
    """An array gets longer, shorter, empty, or other elements."""
    at = _pick(header, rng, lambda e: e.type_id == ARRAY)
    if at is None:
        return
    entry = header.entries[at]
    values = list(entry.value)
    match rng.randrange(5):
        case 0:
            values = values[: rng.choice((0, 1, len(values) - 1, len(values) // 2))]
        case 1:
            values += values[: rng.choice((1, 7, len(values)))]
        case 2 if entry.element == STRING:
            for _ in range(rng.choice((1, 3, 50))):
                texts = [b"", b"\xff", b"x" * 5000, b" ", b"\xe2\x96\x81", b"<0x41>", b"<|im_end|>", b"\0"]
                if values:
                    values[rng.randrange(len(values))] = rng.choice(texts)
        case 3 if entry.element == STRING:
            header.entries[at] = Entry(entry.key, ARRAY, [0] * len(values), rng.choice((0, 4, 5, 6, 12)))
            return
        case _ if entry.element in CODES and values:
            for _ in range(rng.choice((1, 3, 50))):
                values[rng.randrange(len(values))] = _number(entry.element, 1, rng)
        case _:
            rng.shuffle(values)
    header.entries[at] = replace(entry, value=values)


def _as_array(header: Header, rng: random.Random) -> None:
    """A number becomes one a layer, as some models have it."""
    at = _pick(header, rng, lambda e: e.type_id in CODES)
    if at is not None:
        entry = header.entries[at]
        length = rng.choice((0, 1, 2, 3, 40, 600))
        values = [_number(entry.type_id, entry.value, rng) for _ in range(length)]
        header.entries[at] = Entry(entry.key, ARRAY, values, entry.type_id)


def _key(header: Header, rng: random.Random) -> None:
    """An entry goes, comes twice, or is called something else."""
    at = rng.randrange(len(header.entries))
    entry = header.entries[at]
    match rng.randrange(4):
        case 0:
            del header.entries[at]
        case 1:
            header.entries.insert(rng.randrange(len(header.entries)), entry)
        case 2:
            header.entries[at] = replace(entry, key=rng.choice((b"", b"\xff", b"x" * 300, entry.key + b"x")))
        case _:
            other = rng.choice(header.entries)
            header.entries[at] = replace(entry, key=other.key)


def _extra(header: Header, rng: random.Random) -> None:
    """A setting that this model does not have, and llama.cpp may look for."""
    key = rng.choice(_EXTRA_KEYS)
    type_id = rng.choice((4, 4, 4, 5, 6, 7, 10))
    header.entries.append(Entry(_own(header, key), type_id, _number(type_id, 1, rng)))


def _own(header: Header, key: bytes) -> bytes:
    """The key of a setting, for the architecture that the file says it is."""
    named = [entry.value for entry in header.entries if entry.key == b"general.architecture"]
    own = named[0] if named and isinstance(named[0], bytes) else b"llama"
    return own + key.removeprefix(b"llama") if key.startswith(b"llama.") else key


def _kind(header: Header, rng: random.Random) -> None:
    """Another kind of vocabulary or architecture, or settings of experts."""
    match rng.randrange(4):
        case 0:
            models = [
                b"none",
                b"no_vocab",
                b"whitespace",
                b"llama",
                b"bert",
                b"t5",
                b"rwkv",
                b"plamo2",
                b"gemma4",
            ]
            _put(header, b"tokenizer.ggml.model", rng.choice(models))
        case 1:
            splits = [
                b"whitespace",
                b"gemma4",
                b"tekken",
                b"superbpe",
                b"sarvam-moe",
                b"chameleon",
                b"kimi-k2",
            ]
            _put(header, b"tokenizer.ggml.pre", rng.choice(splits))
        case 2:
            names = [
                b"smallthinker",
                b"clip",
                b"gpt2",
                b"granite",
                b"mamba2",
                b"qwen2moe",
                b"phi2",
                b"gemma",
                b"arctic",
            ]
            other = rng.choice(names)
            for at, entry in enumerate(header.entries):
                head, dot, rest = entry.key.partition(b".")
                if dot and head not in (b"general", b"tokenizer", b"split"):
                    header.entries[at] = replace(entry, key=other + dot + rest)
            _put(header, b"general.architecture", other)
        case _:
            for name in (
                b"expert_count",
                b"expert_used_count",
                b"expert_group_count",
                b"expert_group_used_count",
            ):
                if rng.random() < 0.6:
                    value = rng.choice((0, 1, 2, 3, 4, 8, 32, 1024, 2**32 - 1))
                    header.entries.append(Entry(_own(header, b"llama." + name), 4, value))


def _put(header: Header, key: bytes, text: bytes) -> None:
    kept = [entry for entry in header.entries if entry.key != key]
    header.entries[:] = [*kept, Entry(key, STRING, text)]


def _tensor(header: Header, rng: random.Random) -> None:
    """A tensor's name, shape, type or place; the file has room for what it says."""
    if not header.tensors:
        return
    at = rng.randrange(len(header.tensors))
    tensor = header.tensors[at]
    match rng.randrange(8):
        case 0:
            del header.tensors[at]
        case 1:
            header.tensors.append(tensor)
        case 2:
            names = [
                b"",
                b"\xff",
                b"y" * 70,
                b"blk.99999.attn_q.weight",
                b"output.weight",
                b"rope_freqs.weight",
            ]
            header.tensors[at] = replace(tensor, name=rng.choice([*names, rng.choice(header.tensors).name]))
        case 3:
            shape = list(tensor.shape)
            shape[rng.randrange(len(shape))] = rng.choice((0, 1, 31, 32, 64, 96, 2**31, 2**63, 2**64 - 1))
            header.tensors[at] = replace(tensor, shape=tuple(shape))
        case 4:
            other = rng.choice(((), tensor.shape[::-1], (*tensor.shape, 1), (*tensor.shape, 2), (32,) * 5))
            header.tensors[at] = replace(tensor, shape=other)
        case 5:
            header.tensors[at] = replace(tensor, type_id=rng.choice((*range(45), 2**31)))
        case 6:
            offset = rng.choice((0, 1, 32, 2**40, 2**63, 2**64 - 32))
            header.tensors[at] = replace(tensor, offset=offset)
        case _:
            rng.shuffle(header.tensors)


def _frame(header: Header, rng: random.Random) -> None:
    """The version, or how much data there is."""
    if rng.random() < 0.3:
        header.version = rng.choice((0, 1, 2, 4, 2**31, 0x03000000))
    else:
        header.data_bytes = rng.choice((0, 1, 1000, 100_000))


def _bytes_of(head: bytes, zeros: int, rng: random.Random) -> tuple[bytes, int]:
    """Damage that knows no structure: cut, flipped, put in, taken out, lengths overwritten."""
    length = len(head) + zeros
    end = min(length, rng.choice((64, 1000, _DAMAGED_BYTES)))
    out = bytearray(head)
    out += bytes(min(zeros, max(_DAMAGED_BYTES + 8 - len(out), 0)))
    zeros = length - len(out)
    match rng.randrange(5):
        case 0:
            at = rng.randrange(length)
            del out[at:]
            zeros = at - len(out)
        case 1:
            for _ in range(rng.choice((1, 4, 32))):
                out[rng.randrange(end)] ^= 1 << rng.randrange(8)
        case 2:
            at = rng.randrange(end)
            out[at:at] = bytes(rng.choice((1, 4, 8)))
        case 3:
            at = rng.randrange(end)
            del out[at : at + rng.choice((1, 4, 8))]
        case _:
            at = rng.randrange(max(end - 8, 1))
            out[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 2**16, 2**31, 2**32, 2**63, 2**64 - 1)))
    return bytes(out), zeros


def _number(type_id: int, value: Any, rng: random.Random) -> Any:
    code = CODES[type_id]
    if type_id == 7:
        return rng.choice((0, 1, 2, 255))
    if code in "fd":
        return rng.choice((0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan"), float(value or 0) * 2))
    bits = _RANGES[code]
    low, high = (0, 2**bits - 1) if bits > 0 else (-(2 ** (-bits - 1)), 2 ** (-bits - 1) - 1)
    near = [int(value) + step for step in (-1, 1, 2)] if isinstance(value, int) else []
    picked = rng.choice(
        [low, high, 0, 1, 2, 3, 7, 31, 33, 255, 1000, high // 2, rng.randint(low, high), *near]
    )
    return min(max(picked, low), high)


def _pick(header: Header, rng: random.Random, fits: Callable[[Entry], bool]) -> int | None:
    found = [at for at, entry in enumerate(header.entries) if fits(entry)]
    return rng.choice(found) if found else None


_EXTRA_KEYS = [
    *(b"llama.attention.key_length", b"llama.attention.value_length", b"llama.attention.sliding_window"),
    *(
        b"llama.rope.dimension_count",
        b"llama.rope.scaling.factor",
        b"llama.rope.freq_base",
        b"llama.vocab_size",
    ),
    *(b"llama.expert_count", b"llama.expert_used_count", b"llama.attention.layer_norm_rms_epsilon"),
    *(b"llama.attention.clamp_kqv", b"llama.logit_scale", b"llama.pooling_type", b"llama.tensor_data_layout"),
    *(b"general.alignment", b"general.file_type", b"split.count", b"split.no", b"split.tensors.count"),
    *(b"tokenizer.ggml.eos_token_id", b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.padding_token_id"),
    *(
        b"tokenizer.ggml.eot_token_id",
        b"tokenizer.ggml.unknown_token_id",
        b"tokenizer.ggml.seperator_token_id",
    ),
    *(b"tokenizer.ggml.add_bos_token", b"tokenizer.ggml.token_type_count", b"tokenizer.ggml.mask_token_id"),
    *(
        b"tokenizer.ggml.fim_pre_token_id",
        b"tokenizer.ggml.add_space_prefix",
        b"llama.leading_dense_block_count",
    ),
    *(
        b"llama.attention.causal",
        b"llama.nextn_predict_layers",
        b"llama.rope.scaling.original_context_length",
    ),
]
_MUTATIONS = [_scalar, _retype, _text, _array, _as_array, _key, _extra, _tensor, _frame]
_WEIGHTS = [6, 2, 3, 4, 2, 3, 4, 5, 1]
