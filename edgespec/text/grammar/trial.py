"""Tries a grammar in a child process: compiles it over single bytes, and takes some steps in it.

Run by `processes/trial.py` for `grammar.py`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import llguidance

from edgespec.errors import GrammarError
from edgespec.generation.config import Grammar
from edgespec.processes.limits import resident_bytes
from edgespec.text.grammar.limits import source_of

_END = 256
_STEPS = 64


class _Bytes:
    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Compile a grammar.

    Args:
        request: its "kind" and "text", and the "limits" of llguidance.LLParserLimits.

    Returns:
        "source" for llguidance, the "bytes" of memory taken and whether the source is "whole", that is,
        without what llguidance ignores; or what is "wrong".
    """
    before = resident_bytes()
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    try:
        source = source_of(Grammar(request["kind"], request["text"]))
    except GrammarError as error:
        return {"wrong": error.what, "hint": error.hint}
    limits = llguidance.LLParserLimits(**request["limits"])
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        return {"refused": matcher.get_error()}
    whole = not matcher.get_grammar_warnings()
    _walk(matcher.deep_copy())
    taken = max(resident_bytes() - before, 0)
    del matcher  # freeing it recurses, too
    return {"source": source, "bytes": taken, "whole": whole}


def _walk(matcher: llguidance.LLMatcher) -> None:
    rng = random.Random(0)
    for _ in range(_STEPS):
        mask = matcher.compute_logit_bias()
        permitted = [token for token in range(_END) if mask[token]]
        if matcher.is_error() or not permitted or not matcher.consume_token(rng.choice(permitted)):
            return
