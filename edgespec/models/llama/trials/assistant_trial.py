"""The child's part of trying assistants: a tiny Gemma 4 and its assistant are compared with NumPy.

Run by `processes.trial` for `support`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.models.llama.cache.shared_cells import SharedCells
from edgespec.models.llama.cache.tree_cache import BranchingCache
from edgespec.models.llama.heads.assistant import AssistantContext
from edgespec.models.llama.heads.comparison import near, outcome
from edgespec.models.llama.heads.last_states import LastStates
from edgespec.models.llama.heads.reference import FloatArray
from edgespec.models.llama.heads.sample import N_VOCAB, add_bytes
from edgespec.models.llama.runtime.backend import start_backend
from edgespec.models.llama.runtime.batch import TokenBatch
from edgespec.models.llama.runtime.context import Context
from edgespec.models.llama.runtime.model import Model
from edgespec.models.llama.trials.gemma_reference import AssistantReference, GemmaReference, GemmaShape
from edgespec.models.llama.trials.tiny_gemma import write_gemma

# Two layers of each kind, so that keys of another layer would show; and texts that are longer than a window.
TARGET = GemmaShape(
    width=64,
    hidden=96,
    heads=4,
    heads_kv=2,
    head=32,
    sliding_head=16,
    sliding=(True, False, True, False),
    window=5,
    n_vocab=N_VOCAB,
)
ASSISTANT = GemmaShape(
    width=48,
    hidden=80,
    heads=4,
    heads_kv=2,
    head=32,
    sliding_head=16,
    sliding=(True, True, False),
    window=5,
    n_vocab=N_VOCAB,
    target_width=64,
)
_TEXTS = ((1, 40, 50, 60, 70, 80, 90, 41, 51, 61), (1, 42, 52, 62, 72, 82, 92, 43))
_ROOTS, _CHILDREN = (71, 73), (90, 100)

start_backend()


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Try what drafting with assistants expects of the build.

    Returns:
        What is wrong as "error", or nothing.
    """
    del request
    return outcome(_compare, "an assistant")


def _compare(folder: Path) -> str:
    """Describe the differences between the build and NumPy; empty if there are none."""
    rng = np.random.default_rng(3)
    large, small = TARGET.random(rng), ASSISTANT.random(rng)
    paths = [
        write_gemma(folder / f"{shape.width}.gguf", shape, weights, add_bytes)
        for shape, weights in ((TARGET, large), (ASSISTANT, small))
    ]
    reference = GemmaReference(TARGET, large)
    drafts = AssistantReference(ASSISTANT, small, large["token_embd.weight"])
    with (  # made here, and this is a child process
        Model(paths[0], repack=False, vetted=False) as target,
        Model(paths[1], repack=False, vetted=False) as assistant,
    ):
        context = Context(target, n_cells=256, n_rows=64, n_outputs=64, n_sequences=8, n_threads=1)
        states = LastStates(TARGET.width)
        states.attach(context)
        beside = AssistantContext(assistant, context, n_sequences=8, n_threads=1)
        first = BranchingCache(SharedCells(context, ordered=True))
        caches = [first, first.another()]
        for cache, text in zip(caches, _TEXTS, strict=True):
            # Rows that are rejected leave cells behind them, which nobody may see.
            cache.append(TokenBatch.run(text[:-3], 0, cache.open_paths, "all"), 8)
            cache.try_branches(TokenBatch.run((5, 6), cache.length, 1, "all"), 8)
            cache.commit(0, 0, used_paths=1, n_rows=2)
            cache.append(TokenBatch.run(text[-3:], cache.length, cache.open_paths, "all"), 8)
            if not near(states.rows()[:3], reference.read(text).states[-3:]):
                return "a Gemma 4 computes unexpected values"
        features = np.stack([reference.read(text).states[-1] for text in _TEXTS])
        before = [cache.save(0, cache.length) for cache in caches]
        for _ in range(2):  # what was drafted leaves nothing behind
            if wrong := _drafts_otherwise(beside, caches, drafts, reference, features):
                return wrong
        after = [cache.save(0, cache.length) for cache in caches]
        if any(bytes(old) != bytes(new) for old, new in zip(before, after, strict=True)):
            return "an assistant writes to its target's cells"
    return ""


def _drafts_otherwise(
    beside: AssistantContext,
    caches: Sequence[BranchingCache],
    drafts: AssistantReference,
    reference: GemmaReference,
    features: FloatArray,
) -> str:
    """The reason why an assistant's drafts are not what NumPy computes, as a clause; empty if they are.

    Two texts are drafted for at once: the root of each, and then two tokens that may follow it.

    Args:
        features: (texts, width) of the texts' last tokens.
    """
    ids = [cache.ids[0] for cache in caches]
    logits, own = beside.draft(_ROOTS, [len(text) for text in _TEXTS], ids, features)
    roots = logits.copy(), own
    twice = np.repeat(np.arange(len(_TEXTS)), 2)
    below = beside.draft(
        [*_CHILDREN, *_CHILDREN[::-1]],
        [len(_TEXTS[at]) for at in twice],
        [ids[at] for at in twice],
        roots[1][twice],
    )
    for at, text in enumerate(_TEXTS):
        read = reference.read(text)
        root = drafts.draft(read, [_ROOTS[at]], features[at : at + 1])
        children = _CHILDREN if at == 0 else _CHILDREN[::-1]
        expected = drafts.draft(read, children, np.repeat(root[1], 2, axis=0))
        for found, wanted in (
            *((part[at : at + 1], other) for part, other in zip(roots, root, strict=True)),
            *((part[2 * at : 2 * at + 2], other) for part, other in zip(below, expected, strict=True)),
        ):
            if not near(found, wanted):
                return "an assistant computes unexpected values"
    return ""
