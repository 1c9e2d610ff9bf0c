"""Text to tokens and back, by the tokenizer in the GGUF file.

llama.cpp splits a text into words by regular expressions, most of them with std::regex, which recurses for
every character: 27 kB of letters without a space overflow a stack of 8 MiB. Some expressions also scan the
rest of a run from each of its characters. So the tokenizer gets a few thousand characters at a time.

A text is split where every pre-tokenizer of llama.cpp ends a word whatever the context, so that the tokens
are those of the whole text: after a single line break, between two words, before a comma. Where thousands of
characters have no such place, as in a run of one character, it is split between kinds of characters, or after
a fixed number of them; the tokens next to that split may then differ from those of the whole text. They may
also differ for the few pre-tokenizers whose words reach across spaces (superbpe, exaone-moe).
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.base.option import named
from edgespec.errors import BackendError, ContextLengthError
from edgespec.kernels.bindings import llama_cpp

Result = TypeVar("Result")

_BYTES = 16 << 20  # of address space; only what is used of it takes memory
_lock = threading.Lock()


def on_deep_stack(action: Callable[[], Result]) -> Result:
    """Run `action` in a thread of its own with a stack of 16 MiB, and return what it returns.

    The usual stack sizes differ between systems and with `ulimit -s`. An exception that interrupts the
    calling thread is raised when the action has ended, because the action uses what the caller might free.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="deep-stack", daemon=True)
    with _lock:
        before = threading.stack_size(_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    interrupted: BaseException | None = None
    while thread.is_alive():
        try:
            thread.join()
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
    if errors:
        raise errors[0]
    return results[0]


MAX_CHARS = 4096
_LONGEST_RUN = 1024  # of digits or of whitespace

_LONG_RUN = re.compile(rf"(?<!\s)\s{{{_LONGEST_RUN + 1},}}|(?<!\d)\d{{{_LONGEST_RUN + 1},}}")
_LETTER = r"[^\W\d_]"
# A text is split after a match. The first three are ends of words for llama.cpp.
_SPLITS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\S\n(?={_LETTER})",
        rf"{_LETTER}(?= {_LETTER})",
        r"[^\W_](?=[.,!?…。，、।۔،])",  # noqa: RUF001
        r"[^\W_](?=[^\w\s'’])",  # noqa: RUF001
        rf"{_LETTER}(?=\d)",
        r"\S(?=\s)",
    )
)


def split(text: str, joined: Container[str] = ()) -> Iterator[str]:
    """The chunks of a text, of at most MAX_CHARS characters each; joined, they are the text.

    Args:
        joined: pairs of characters not to be split if possible, because they occur in tokens that llama.cpp
            looks for before it splits the text into words.
    """
    start = 0
    for run in _LONG_RUN.finditer(text):
        for end in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
            yield from _chunks(text, start, end, joined)
            start = end
    yield from _chunks(text, start, len(text), joined)


def _chunks(text: str, start: int, end: int, joined: Container[str]) -> Iterator[str]:
    while end - start > MAX_CHARS:
        at = _split_point(text, start, start + MAX_CHARS, joined)
        yield text[start:at]
        start = at
    if start < end:
        yield text[start:end]


def _split_point(text: str, start: int, end: int, joined: Container[str]) -> int:
    """The last place before `end` to split at, of the best kind that occurs."""
    for pattern in _SPLITS:
        # Lookahead needs one character more than the chunk may have.
        places = [match.end() for match in pattern.finditer(text, start, end + 1)]
        for at in reversed(places):
            if start < at < end and text[at - 1 : at + 1] not in joined:
                return at
    return end


_BYTE_PAIR = 2  # llama_vocab_type: the only one that splits texts by regular expressions
_WORD_PIECE = 3
_COVERING = (1, 2, 5)  # kinds whose tokens cover every byte of a text: SentencePiece, byte-pair, RWKV
_FOUND_FIRST = (
    1 | 8 | 16
)  # llama_token_attr: unknown, control and user-defined tokens, looked for before words
_USUAL_PIECE = 128  # bytes
_SHALLOW_CHARS = 256  # fit any stack
_LIKELY_TOKEN_BYTES = 16  # more than the tokens of any real text have on average


def _closed() -> BackendError:
    return BackendError("The model is closed.", "Load it again.")


class Vocabulary:
    """A model's tokens. The model owns them: once it is closed, every method raises BackendError."""

    def __init__(self, handle: Any) -> None:
        self._borrowed = handle
        self._refuse: Callable[[], BackendError] = _closed
        self.n_tokens = int(llama_cpp.llama_vocab_n_tokens(handle))
        self._ends = np.full(self.n_tokens, -1, dtype=np.int8)  # -1: not looked up yet

    @property
    def _handle(self) -> Any:
        if not self._borrowed:
            raise self._refuse()
        return self._borrowed

    @property
    def _with_texts(self) -> Any:
        """The handle of a vocabulary whose tokens have texts: of another, llama.cpp ends the process."""
        if not self.kind:
            raise BackendError("The model was loaded without the texts of its tokens.")
        return self._handle

    def close(self, refuse: Callable[[], BackendError] | None = None) -> None:
        """The model is about to be freed.

        Args:
            refuse: returns the error to raise from now on; None says that the model is closed.
        """
        self._borrowed = None
        self._refuse = refuse or self._refuse

    @property
    def kind(self) -> int:
        """llama.cpp's vocabulary type: byte-pair, SentencePiece and so on."""
        return int(llama_cpp.llama_vocab_type(self._handle))

    @property
    def adds_bos(self) -> bool:
        """True if texts begin with the begin-of-text token."""
        return bool(llama_cpp.llama_vocab_get_add_bos(self._handle))

    @property
    def separates(self) -> bool:
        """True if a token stands between the end of a text and the beginning of a second one."""
        adds = bool(llama_cpp.llama_vocab_get_add_sep(self._handle))
        return adds and self.kind != _WORD_PIECE  # in which the same token ends texts

    @property
    def separator(self) -> int:
        """The token between two texts; -1 if there is none."""
        return int(llama_cpp.llama_vocab_sep(self._handle))

    @property
    def bos(self) -> int:
        """The begin-of-text token; -1 if there is none."""
        return int(llama_cpp.llama_vocab_bos(self._handle))

    @property
    def eos(self) -> int:
        """The end-of-text token; -1 if there is none."""
        return int(llama_cpp.llama_vocab_eos(self._handle))

    @property
    def eot(self) -> int:
        """The end-of-turn token; -1 if there is none."""
        return int(llama_cpp.llama_vocab_eot(self._handle))

    def is_end(self, token: int) -> bool:
        """True if the token ends an answer (end of text, end of turn)."""
        return bool(llama_cpp.llama_vocab_is_eog(self._handle, token))

    def ends(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """True for each token that ends an answer, in the shape of `tokens`.

        Each token is looked up once; asking llama.cpp about a whole vocabulary takes a tenth of a second.
        """
        tokens = tokens.clip(0, self.n_tokens - 1)
        known = self._ends[tokens]
        if (known < 0).any():
            for token in np.unique(tokens[known < 0]).tolist():
                self._ends[token] = self.is_end(token)
            known = self._ends[tokens]
        return known > 0

    def is_control(self, token: int) -> bool:
        """True if the token is a control token, which no user's text may produce."""
        return bool(llama_cpp.llama_vocab_is_control(self._handle, token))

    def text(self, token: int) -> bytes:
        """The token as it is in the file, escapes included."""
        if not 0 <= token < self.n_tokens:
            return b""
        return bytes(llama_cpp.llama_vocab_get_text(self._handle, token) or b"")

    def filled_in(self, before: Sequence[int], after: str) -> list[int] | None:
        """The prompt for what stands between two texts; None if the model knows no such prompts.

        Args:
            before: the tokens of the first text.
            after: the second text.
        """
        known = (llama_cpp.llama_vocab_fim_pre, llama_cpp.llama_vocab_fim_suf, llama_cpp.llama_vocab_fim_mid)
        first, behind, middle = (int(mark(self._handle)) for mark in known)
        if min(first, behind, middle) < 0:
            return None
        n_begin = 1 if self.adds_bos and list(before[:1]) == [self.bos] else 0
        ending = [behind, *self.tokenize(after, control=False), middle]
        return [*before[:n_begin], first, *before[n_begin:], *ending]

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """The texts that stand for control tokens, longest first."""
        texts = {
            self.text(token).decode("utf-8", "replace")
            for token in range(self.n_tokens)
            if self.is_control(token)
        }
        return tuple(sorted(texts - {""}, key=lambda text: (-len(text), text)))

    def tokenize(self, text: str, *, control: bool, bos: bool = False, most: int | None = None) -> list[int]:
        """Token ids of any text; long ones are tokenized in chunks (see text_chunks).

        Args:
            control: whether texts such as "<|im_end|>" become control tokens; only for text that a chat
                template wrote.
            bos: put the begin-of-text token first, if the model wants one.
            most: stop when there are more tokens than this.

        Raises:
            ContextLengthError: the text has more than `most` tokens.
        """
        self.refuse_longer(text, most)
        if self.kind != _BYTE_PAIR or len(text) <= _SHALLOW_CHARS:
            return self._within(self._tokenize(text, control, bos), most)
        chunks = list(split(text, self._joined))
        if len(chunks) == 1:
            return self._within(self._tokenize(text, control, bos), most)
        tokens = [self.bos] if bos and self.adds_bos else []
        for chunk in chunks:
            tokens += self._tokenize(chunk, control, False)
            self._within(tokens, most)
        if bos and self._adds_eos:
            tokens.append(self.eos)
        return tokens

    def refuse_longer(self, text: str, most: int | None) -> None:
        """Refuse a text whose length alone shows that it has more than `most` tokens.

        Raises:
            ContextLengthError: it does.
        """
        if most is None or len(text) <= most * _LIKELY_TOKEN_BYTES or self.kind not in _COVERING:
            return
        longest = most * self._longest_token
        if len(text) > longest:  # every character has at least one byte
            raise ContextLengthError(
                f"The prompt has {len(text):,} characters; {most:,} tokens hold at most {longest:,}.",
                f"Shorten it, or raise {named('context')}.",
            )

    def controls_in(self, text: str, most: int | None = None) -> list[str]:
        """The control-token texts that occur in `text`.

        Raises:
            ContextLengthError: the text has more than `most` tokens.
        """
        # Nearly always there are none, and two tokenizations show it without a walk over the vocabulary.
        if self.tokenize(text, control=True, most=most) == self.tokenize(text, control=False, most=most):
            return []
        return [control for control in self.control_texts if control in text]

    def piece(self, token: int, *, control: bool = False) -> bytes:
        """The bytes that a token adds to the text; those of control tokens only if asked for.

        Several threads may ask at once.

        Raises:
            IndexError: it is no token of this vocabulary, such as the row of an image.
        """
        if not 0 <= token < self.n_tokens:  # llama.cpp would end the process
            raise IndexError(f"there is no token {token}")
        size = _USUAL_PIECE
        while True:
            buffer = (ctypes.c_char * size)()
            n = llama_cpp.llama_token_to_piece(self._with_texts, token, buffer, size, 0, control)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def spelled(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with those of control tokens."""
        return b"".join(self.piece(token, control=True) for token in tokens).decode("utf-8", "replace")

    @property
    def _adds_eos(self) -> bool:
        return bool(llama_cpp.llama_vocab_get_add_eos(self._handle))

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token."""
        return max((len(self.piece(token, control=True)) for token in range(self.n_tokens)), default=1) or 1

    @cached_property
    def _joined(self) -> frozenset[str]:
        """Neighbouring characters in tokens that are looked for before a text is split into words."""
        pairs: set[str] = set()
        for token in range(self.n_tokens):
            if llama_cpp.llama_vocab_get_attr(self._handle, token) & _FOUND_FIRST:
                text = self.text(token).decode("utf-8", "replace")
                pairs.update(text[at : at + 2] for at in range(len(text) - 1))
        return frozenset(pairs)

    def _tokenize(self, text: str, control: bool, bos: bool) -> list[int]:
        """Call llama.cpp's tokenizer."""
        handle = self._with_texts
        data = text.encode("utf-8", "replace")  # half surrogates, from undecodable arguments, become "?"

        def tokenize(capacity: int) -> list[int] | int:
            buffer = (llama_cpp.llama_token * capacity)()
            n = llama_cpp.llama_tokenize(handle, data, len(data), buffer, capacity, bos, control)
            return list(buffer[:n]) if n >= 0 else -n

        def tokenize_all() -> list[int]:
            result = tokenize(len(data) + 8)
            if isinstance(result, int):
                result = tokenize(result)
            if isinstance(result, int):
                raise BackendError("llama.cpp could not tokenize the text.")
            return result

        return tokenize_all() if len(text) <= _SHALLOW_CHARS else on_deep_stack(tokenize_all)

    @staticmethod
    def _within(tokens: list[int], most: int | None) -> list[int]:
        if most is not None and len(tokens) > most:
            raise ContextLengthError(
                f"The prompt has more than {most:,} tokens, several times the context.",
                f"Shorten it, or raise {named('context')}.",
            )
        return tokens
