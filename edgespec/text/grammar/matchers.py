"""Grammars over a model's tokens: JSON schemas, GBNF, Lark and regular expressions, by llguidance."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.base.latest import LatestValues
from edgespec.errors import GrammarError, UsageError
from edgespec.generation.config import Grammar
from edgespec.llama.tokenizer.vocabulary import Vocabulary
from edgespec.processes.trial import attempt_in_child
from edgespec.speculation.constraint import Matcher
from edgespec.text.grammar.digits import BoundedDigits, DigitTokens
from edgespec.text.grammar.limits import NAMES, check, is_plain, source_of, wrong

# Limits for one grammar: compile time, and memory then and later. llguidance's own limits are four to sixteen
# times as high, and it has none for the automaton of a "multipleOf".
MAX_COMPILE_S = 5.0
MAX_COMPILED_BYTES = 64 << 20
_LIMITS = {
    "max_lexer_states": 16_000,  # 2 kB each, made while tokens are masked
    "max_grammar_size": 200_000,
    "initial_lexer_fuel": 500_000,
    "verbose_errors": False,
}

# Compiled grammars are kept, limited by bytes and number: each may still grow by its lexer's states.
_KEPT_BYTES = MAX_COMPILED_BYTES
_KEPT = 4
_PLAIN_COMPILED_BYTES = 1 << 20
_TRIED_BYTES = 4 << 20  # of the texts of grammars that were tried in a child process


@dataclass(frozen=True)
class _Compiled:
    matcher: Any
    n_bytes: int


class Grammars:
    """Compiles grammars for one vocabulary; preparing the vocabulary takes a second, once.

    Any thread may call any method. Grammars are untrusted. Unless one is plainly small, it is first compiled
    in a child process with limited memory, time and stack.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._digits = DigitTokens(vocabulary)

    def matcher(self, grammar: Grammar, quotes: str = "") -> Matcher:
        """A matcher at the beginning of the grammar.

        Args:
            quotes: what stands around texts in a grammar whose numbers shall end; empty if they need not. The
                numbers of a schema always do.

        Raises:
            UsageError: llguidance is not installed.
            GrammarError: the grammar is wrong, or exceeds the limits on memory or time while it is compiled.
            InconclusiveTrial: the child process that was to compile it first was killed or starved.
        """
        with self._lock:
            known = self._compiled.get(grammar)
        # Without the lock, so that nobody waits for a stranger's grammar.
        compiled = known or self._compile(grammar)
        with self._lock:
            self._keep(grammar, compiled)
            matcher: Matcher = compiled.matcher.deep_copy()
        quotes = '"' if grammar.kind == "json_schema" else quotes
        return BoundedDigits(matcher, self._digits, quotes.encode()) if quotes else matcher

    def forget(self, grammar: Grammar) -> None:
        """Drop the compiled grammar: copies share a lexer, and a limit that it hit stays hit."""
        with self._lock:
            self._compiled.pop(grammar, None)

    @cached_property
    def ends(self) -> NDArray[np.bool_]:
        """(n_vocab,) tokens that end an answer."""
        vocabulary = self._vocabulary
        return np.array([vocabulary.is_end(token) for token in range(vocabulary.n_tokens)], dtype=np.bool_)

    def _keep(self, grammar: Grammar, compiled: _Compiled) -> None:
        self._compiled[grammar] = compiled
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > 1 and (
            len(self._compiled) > _KEPT or sum(kept.n_bytes for kept in self._compiled.values()) > _KEPT_BYTES
        ):
            self._compiled.popitem(last=False)

    def _compile(self, grammar: Grammar) -> _Compiled:
        llguidance = _import_llguidance()
        check(grammar)
        if is_plain(grammar):
            source, n_bytes = source_of(grammar), _PLAIN_COMPILED_BYTES
        else:
            source, n_bytes = itemgetter("source", "bytes")(_try_out(grammar))
        limits = llguidance.LLParserLimits(**_LIMITS)
        try:
            matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        except ValueError as error:
            raise wrong(grammar, str(error)) from error
        if matcher.is_error():
            raise wrong(grammar, matcher.get_error())
        return _Compiled(matcher, n_bytes)

    @cached_property
    def _tokenizer(self) -> Any:
        llguidance = _import_llguidance()
        slices = llguidance.LLTokenizer.json_slices()
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(self._vocabulary)), slices=slices)


class _Tokens:
    """The tokenizer interface of llguidance. Control tokens begin with a byte that occurs in no text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = vocabulary.eos
        self.bos_token_id = vocabulary.bos if vocabulary.bos >= 0 else None
        self.special_token_ids: list[int] = []
        self.tokens = [self._bytes(token) for token in range(vocabulary.n_tokens)]

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._vocabulary.tokenize(data, control=False)

    def _bytes(self, token: int) -> bytes:
        if self._vocabulary.is_control(token) or self._vocabulary.is_end(token):
            self.special_token_ids.append(token)
            return b"\xff" + self._vocabulary.text(token)
        return self._vocabulary.piece(token)


_tried: LatestValues[Mapping[str, Any]] = LatestValues(_TRIED_BYTES)


def check_grammar(grammar: Grammar) -> bool:
    """Refuse a grammar that no model could follow, as `Grammars.matcher` does, without a vocabulary.

    Returns:
        False if parts of it are ignored, because llguidance does not implement them.

    Raises:
        UsageError: llguidance is not installed.
        GrammarError, InconclusiveTrial: as `Grammars.matcher`.
    """
    _import_llguidance()
    check(grammar)
    if not is_plain(grammar):
        return bool(_try_out(grammar)["whole"])
    from edgespec.text.grammar.trial import attempt

    request = {"kind": grammar.kind, "text": grammar.text, "limits": _LIMITS}
    return bool(_result(grammar, attempt(request))["whole"])


def _try_out(grammar: Grammar) -> Mapping[str, Any]:
    """Compile a grammar in a child process, once if that succeeds; returns what `trial.attempt` does."""
    known = _tried.get(grammar)
    if known is not None:
        return known
    name = NAMES[grammar.kind]
    verdict = attempt_in_child(
        "edgespec.text.grammar.trial",
        {"kind": grammar.kind, "text": grammar.text, "limits": _LIMITS},
        subject=f"The {name}",
        cpu_s=MAX_COMPILE_S,
        memory_bytes=MAX_COMPILED_BYTES,
    )
    if verdict.answer is None:
        reason = {
            "time": f"takes more than {MAX_COMPILE_S:g} seconds to compile",
            "memory": f"takes more than {MAX_COMPILED_BYTES >> 20} MiB of memory to compile",
            "crash": "is too deep to be compiled",
        }[verdict.why or "crash"]
        raise GrammarError(
            f"The {name} {reason}.",
            "Use shorter chains of rules and references, and smaller numbers of repetitions and multiples.",
        )
    answer = _result(grammar, verdict.answer)
    _tried.put(grammar, answer, len(grammar.text) + len(answer["source"]))
    return answer


def _result(grammar: Grammar, answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answer of a trial; raises GrammarError if it has no source."""
    if "wrong" in answer:
        raise GrammarError(answer["wrong"], answer["hint"])
    if "refused" in answer:
        raise wrong(grammar, answer["refused"])
    return answer


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise UsageError(
            "The grammar library is not installed.", "Install it: pip install 'edgespec[grammar]'"
        ) from error
    return llguidance
