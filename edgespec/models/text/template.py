"""Chat templates: from messages to prompt text, by a program in the model file.

A GGUF file contains its chat template as Jinja source. It is untrusted, so it is rendered by
`template_worker.py` in a separate process, with limits on time, memory and output. The messages
are untrusted too: `render_segments` keeps text that looks like a control token (`<|im_end|>`)
from becoming one.
"""

from __future__ import annotations

import contextlib
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
from typing import Any

from edgespec.errors import TemplateError

MAX_OUTPUT_CHARS = 16 * 2**20
WORKER_BYTES = 16 << 20  # memory of the process that renders templates, without the libraries it shares

_WORKER = Path(__file__).with_name("template_worker.py")
# A cold start reads Python and jinja2 from disk, which may be slow and busy. This time does not count
# towards the template's own.
_START_TIMEOUT_S = 60.0
_MAX_ANSWER_BYTES = 12 * MAX_OUTPUT_CHARS + 1024  # JSON escapes take up to 12 bytes a character
_MAX_DETAIL_CHARS = 300
_OTHER_FILE = "Try another GGUF file of this model; the template is part of the file."

Message = Mapping[str, Any]
"""A message: its "role", its "content" (text), and for some templates more, such as "tool_calls"."""


class ChatTemplate:
    """One model's chat template, rendered in a child process that lives until `close`.

    Any thread may call any method; renders take turns.

    Attributes:
        source: the template, in Jinja.
    """

    def __init__(self, source: str, bos: str, eos: str, timeout_s: float = 5.0) -> None:
        """`source` is Jinja; `bos` and `eos` are the tokens' text, as the template will use it.

        Nothing is started yet. `timeout_s` is the limit for each rendering.
        """
        self.source = source
        self._bos = bos
        self._eos = eos
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._worker: _TemplateProcess | None = None

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the child process unless it is running, and return at once; it warms up in the meantime.

        Raises:
            TemplateError: the process cannot be started.
        """
        with self._lock:
            if self._worker is None or not self._worker.alive:
                self.close()
                self._worker = _TemplateProcess()

    def close(self) -> None:
        """End the child process. Rendering again would start a new one."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages` (each with "role" and "content").

        Args:
            variables: further variables for the template, such as "tools" or "enable_thinking".

        A template that refuses a leading system message (Gemma 2's does) is asked again with the
        system text before the first user message, separated by a blank line.

        Raises:
            TemplateError: the template refuses the messages, is faulty, or exceeds a limit.
        """
        try:
            return self._render(messages, add_generation_prompt, variables)
        except _Refused:
            folded = _fold_system(messages)
            if folded is None:
                raise
        return self._render(folded, add_generation_prompt, variables)

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> str:
        request = {
            "source": self.source,
            "bos": self._bos,
            "eos": self._eos,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "variables": dict(variables or {}),
            "max_chars": MAX_OUTPUT_CHARS,
            "timeout_s": self._timeout_s,
        }
        with self._lock:
            self.start()
            assert self._worker is not None
            try:
                answer = self._worker.ask(request, self._timeout_s)
            except BaseException:
                # Also on Ctrl-C: a late answer would be mistaken for that of the next request.
                self.close()
                raise
        if "text" in answer:
            return str(answer["text"])
        raise _failure(str(answer.get("kind")), str(answer.get("error")))


@dataclass(frozen=True)
class PromptSegment:
    """A part of a rendered prompt; `literal` text must not be parsed for control tokens.

    Attributes:
        tokens: those that stand in the place of the text; None for those that spell it.
    """

    text: str
    literal: bool
    tokens: tuple[int, ...] | None = None


def render_segments(
    template: ChatTemplate,
    messages: Sequence[Message],
    controls: Callable[[str], list[str]],
    add_generation_prompt: bool = True,
    *,
    variables: Mapping[str, Any] | None = None,
) -> list[PromptSegment]:
    """Render `messages` so that control tokens come from the template alone.

    Each control string in a message (the leftmost of two that overlap, the longest of two that start
    together) passes through the template as a random number, and comes back as a literal segment.
    Numbers are used because filters such as trim and upper leave digits alone. The joined texts of the
    segments are the plain rendering; without control strings there is only one segment.

    Args:
        controls: the control-token strings that occur in a text.
        variables: as `ChatTemplate.render`; their texts are protected as those of the messages.

    Raises:
        TemplateError: as `ChatTemplate.render`.
    """
    hidden = _Hidden()

    def protect(value: Any, name: str = "") -> Any:
        if isinstance(value, Mapping):
            return {protect(key): protect(item, key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [protect(item) for item in value]
        # The template compares roles, which are plain words; anything else it only prints.
        if not isinstance(value, str) or (name == "role" and value.isalpha()):
            return value
        return hidden.hide(value, controls(value))

    protected = [protect(message) for message in messages]
    given = {name: protect(value) for name, value in (variables or {}).items()}
    return hidden.split(template.render(protected, add_generation_prompt, variables=given))


class _Hidden:
    """Control strings of one conversation, and the numbers that replace them."""

    def __init__(self) -> None:
        self._key = str(10**31 + secrets.randbelow(9 * 10**31))
        self._originals: list[str] = []

    def hide(self, text: str, controls: list[str]) -> str:
        longest_first = sorted(filter(None, controls), key=len, reverse=True)
        if not longest_first:
            return text
        return re.sub("|".join(map(re.escape, longest_first)), self._replace, text)

    def split(self, text: str) -> list[PromptSegment]:
        if not self._originals:
            return [PromptSegment(text, literal=False)]
        parts = re.split(rf"{self._key}(\d{{8}})", text)  # text, index, text, index, ..., text
        segments = [
            PromptSegment(self._originals[int(part)], literal=True)
            if position % 2
            else PromptSegment(part, literal=False)
            for position, part in enumerate(parts)
        ]
        return [segment for segment in segments if segment.text]

    def _replace(self, match: re.Match[str]) -> str:
        self._originals.append(match[0])
        return f"{self._key}{len(self._originals) - 1:08d}"


class _Refused(TemplateError):
    """The template itself called `raise_exception`."""


class _TemplateProcess:
    """The child process: one line of JSON in, one out."""

    def __init__(self) -> None:
        jinja = importlib.util.find_spec("jinja2")
        # An isolated interpreter skips the user's site-packages, and jinja2 may be installed there.
        folder = [str(Path(jinja.origin).parents[1])] if jinja and jinja.origin else []
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER), *folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise _not_started(str(error)) from error
        self._ready = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to `request`. After any exception this worker must be closed."""
        if not self._ready:
            self._await_ready()
        line = json.dumps(request).encode() + b"\n"
        try:
            answer = _decoded(_within(timeout_s, lambda: self._exchange(line)))
        except TimeoutError:
            raise TemplateError(
                f"The model's chat template did not finish within {timeout_s:g} s.", _OTHER_FILE
            ) from None
        if answer is None:
            raise TemplateError(
                "The process that renders the model's chat template crashed.",
                _OTHER_FILE,
            )
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # it may not have read everything
                if pipe is not None:
                    pipe.close()

    def _await_ready(self) -> None:
        try:
            answer = _decoded(_within(_START_TIMEOUT_S, lambda: self._exchange(b"")))
        except TimeoutError:
            raise _not_started(f"no answer within {_START_TIMEOUT_S:g} s") from None
        if answer is None or not answer.get("ready"):
            raise _not_started(str((answer or {}).get("error", "it exited at once")))
        self._ready = True

    def _exchange(self, line: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        return self._process.stdout.readline(_MAX_ANSWER_BYTES)


def _within(seconds: float, action: Callable[[], bytes]) -> bytes:
    """Return the result of `action`, or b"" if a pipe broke. A thread, as not every system can poll pipes.

    Raises:
        TimeoutError: it took longer; ending the process ends the action too.
    """
    results: list[bytes] = []

    def run() -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the pipe was closed
            results.append(action())

    thread = threading.Thread(target=run, name="chat-template", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError
    return results[0] if results else b""


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _fold_system(messages: Sequence[Message]) -> list[Message] | None:
    """The messages with the system text before the first user message; None if there is nothing to fold."""
    if not messages or messages[0].get("role") != "system":
        return None
    system, *rest = messages
    for index, message in enumerate(rest):
        if message.get("role") == "user":
            content = f"{system['content']}\n\n{message['content']}"
            return [*rest[:index], {**message, "content": content}, *rest[index + 1 :]]
    return None


def _failure(kind: str, detail: str) -> TemplateError:
    # The text comes from the template: keep it short, and keep control characters off the terminal.
    printable = "".join(c if c.isprintable() else " " for c in detail[:_MAX_DETAIL_CHARS])
    said = " ".join(printable.split()).rstrip(".")
    if kind == "refused":
        return _Refused(f"The model's chat template refused the messages: {said}.")
    reasons = {
        "syntax": f"The model's chat template is not valid Jinja: {said}.",
        "too_long": f"The model's chat template produced more than {MAX_OUTPUT_CHARS:,} characters.",
        "memory": "The model's chat template exceeded its memory limit.",
    }
    return TemplateError(reasons.get(kind, f"The model's chat template failed: {said}."), _OTHER_FILE)


def _not_started(why: str) -> TemplateError:
    return TemplateError(
        f"The process that renders chat templates did not start: {why}.",
        "Check this Python installation: python -c 'import jinja2'.",
    )
