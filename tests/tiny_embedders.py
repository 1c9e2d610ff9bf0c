"""Tiny embedding models with random weights: BERT with any pooling, and a decoder that pools its last row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray

from tests.tiny import ARCHITECTURES, finish, write_tiny

WIDTH, HIDDEN, HEADS, LAYERS, CONTEXT = 64, 128, 2, 2, 64
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"\u2581{letter}" for letter in _LETTERS), *_LETTERS]
CLS, SEP, A = 2, 3, 4


def write_bert(path: Path, pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN) -> Path:
    """A BERT whose tokens are letters; None leaves the pooling out."""
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_eps(1e-6)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (len(WORDS) - 4))
    for add, token in (
        (writer.add_pad_token_id, 0),
        (writer.add_unk_token_id, 1),
        (writer.add_bos_token_id, CLS),
        (writer.add_sep_token_id, SEP),
    ):
        add(token)
    rng = np.random.default_rng(3)

    def add_matrix(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", (rng.standard_normal(shape) * 0.2).astype(np.float32))

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", (1 + 0.1 * rng.standard_normal(WIDTH)).astype(np.float32))
        writer.add_tensor(f"{name}.bias", (0.1 * rng.standard_normal(WIDTH)).astype(np.float32))

    add_matrix("token_embd", len(WORDS), WIDTH)
    add_matrix("position_embd", CONTEXT, WIDTH)
    add_matrix("token_types", 2, WIDTH)
    add_norm("token_embd_norm")
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add_matrix(f"blk.{layer}.{name}", WIDTH, WIDTH)
        add_matrix(f"blk.{layer}.ffn_up", HIDDEN, WIDTH)
        add_matrix(f"blk.{layer}.ffn_down", WIDTH, HIDDEN)
        add_norm(f"blk.{layer}.attn_output_norm")
        add_norm(f"blk.{layer}.layer_output_norm")
    if pooling == gguf.PoolingType.RANK:
        add_matrix("cls", WIDTH, WIDTH)
        add_matrix("cls.output", 1, WIDTH)
    finish(writer)
    return path


def write_decoder(path: Path, vocabulary_of: Path) -> Path:
    """A Qwen3 that ends every sequence with the end token, and whose embedding is the last token's state."""

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(gguf.PoolingType.LAST)
        writer.add_add_eos_token(True)

    return write_tiny(path, "qwen3", vocabulary_of, kind=replace(ARCHITECTURES["qwen3"], keys=keys))


def plain_embedding(path: Path, tokens: list[int]) -> NDArray[np.float32]:
    """The embedding by llama.cpp alone, of one sequence, not normalized; or the scores of a reranker."""
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.embeddings = True
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for row, token in enumerate(tokens):
        batch.token[row], batch.pos[row], batch.logits[row] = token, row, 1
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
    try:
        assert llama_cpp.llama_decode(context, batch) == 0
        ranks = llama_cpp.llama_pooling_type(context) == llama_cpp.LLAMA_POOLING_TYPE_RANK
        width = (llama_cpp.llama_model_n_cls_out if ranks else llama_cpp.llama_model_n_embd_out)(model)
        return np.array(llama_cpp.llama_get_embeddings_seq(context, 0)[:width], dtype=np.float32)
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
