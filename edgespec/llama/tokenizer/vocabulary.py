"""Text to tokens and back, by the tokenizer in the GGUF file."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BackendError, ContextLengthError
from edgespec.llama.tokenizer.deep_stack import on_deep_stack
from edgespec.llama.tokenizer.text_chunks import split
from edgespec.option import named

_BYTE_PAIR = 2  # llama_vocab_type: the only one that splits texts by regular expressions
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
