"""Whether a model that was vetted computes."""

from __future__ import annotations

from pathlib import Path


def compute(path: Path, adapter: Path | None = None) -> None:
    """Load a file that was vetted, and compute the logits of some tokens, with a LoRA adapter if given.

    Raises:
        EdgeSpecError: llama.cpp cannot.
    """
    from edgespec.llama.runtime.batch import TokenBatch
    from edgespec.llama.runtime.context import Context
    from edgespec.llama.runtime.model import Model, load_adapter

    with Model(path, memory_map=True, repack=False, vetted=False) as model:
        context = Context(model, n_cells=64, n_rows=32, n_outputs=32, n_sequences=1, n_threads=1)
        try:
            if adapter is not None:
                context.adapt([(load_adapter(model, adapter), 1.0)])
            tokens = model.vocabulary.tokenize("Hello, world <|im_start|>", control=True)
            tokens = [t for t in tokens if 0 <= t < model.vocabulary.n_tokens][:8] or [0]
            context.decode(TokenBatch.run(tokens, 0, n_sequences=1, logits="last"))
            context.logits()
            for token in range(min(model.vocabulary.n_tokens, 400)):
                model.vocabulary.piece(token)
                model.vocabulary.is_end(token)
        finally:
            context.close()
