"""Chat templates: messages to prompt text, by a program that came with the model file.

A GGUF carries its chat template as Jinja source. Anyone can have written it, so it is rendered by
`template_worker.py` in a process of its own, with limits on time, memory and output. The other
untrusted part is the messages: `render_segments` keeps text that merely looks like a control token
(`<|im_end|>`) from becoming one.
"""

from __future__ import annotations

import importlib.util
import json
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from edgespec.errors import TemplateError

MAX_OUTPUT_CHARS = 16 * 2**20

_WORKER = Path(__file__).with_name("template_worker.py")
# A cold start reads Python and jinja2 from disk, perhaps a slow and busy one. It is waited for
# apart from the template's own time.
_START_TIMEOUT_S = 60.0
_OTHER_FILE = "Try another GGUF file of this model; the template is part of the file."

Message = Mapping[str, str]
_T = TypeVar("_T")


class ChatTemplate:
    """One model's chat template, rendered in a child process that lives until `close`.

    Any thread may call any method; renders take turns.
    """

    def __init__(self, source: str, bos: str, eos: str, timeout_s: float = 5.0) -> None:
        """`source` is Jinja; `bos` and `eos` are the tokens' text, as the template will use it.

        Nothing is started yet. `timeout_s` bounds each render.
        """
        self._source = source
        self._bos = bos
        self._eos = eos
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._worker: _Worker | None = None

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the child process, if none runs, and return at once; it warms up meanwhile.

        Raises:
            TemplateError: the process cannot be started.
        """
        with self._lock:
            if self._worker is None or not self._worker.alive:
                self.close()
                self._worker = _Worker()

    def close(self) -> None:
        """End the child process. A later render would start a new one."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt text for `messages` (each with "role" and "content").

        A template that refuses a leading system message (Gemma 2's does) is asked again with the
        system text put before the first user message, a blank line between.

        Raises:
            TemplateError: the template refuses the messages, is faulty, or passes a limit.
        """
        try:
            return self._render(messages, add_generation_prompt)
        except _Refused:
            folded = _fold_system(messages)
            if folded is None:
                raise
            refusal = sys.exc_info()[1]
        try:
            return self._render(folded, add_generation_prompt)
        except _Refused:
            assert refusal is not None
            raise refusal from None
