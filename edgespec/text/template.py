"""Chat templates: from messages to prompt text, by a program in the model file.

A GGUF file contains its chat template as Jinja source. It is untrusted, so it is rendered by
`template_worker.py` in a separate process, with limits on time, memory and output. The messages
are untrusted too: `render_segments` keeps text that looks like a control token (`<|im_end|>`)
from becoming one.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.base.placeholders import Placeholders
from edgespec.errors import TemplateError
from edgespec.text.conversation_forms import forms, in_parts, is_shown, with_whole_schemas
from edgespec.text.template_process import MAX_OUTPUT_CHARS, OTHER_FILE, TemplateProcess

WORKER_BYTES = 16 << 20  # memory of the process that renders templates, without the libraries it shares

_MAX_DETAIL_CHARS = 300

Message = Mapping[str, Any]
"""A message: its "role", its "content" (text), and for some templates more, such as "tool_calls"."""


class ChatTemplate:
    """One model's chat template, rendered in a child process that lives until `close`.

    Any thread may call any method; renders take turns.

    Attributes:
        source: the template, in Jinja.
        tools_source: the one for conversations with tools; None if the model has no such template.
    """

    def __init__(
        self, source: str, bos: str, eos: str, timeout_s: float = 5.0, *, tools_source: str | None = None
    ) -> None:
        """`source` is Jinja; `bos` and `eos` are the tokens' text, as the template will use it.

        Nothing is started yet. `timeout_s` is the limit for each rendering.
        """
        self.source = source
        self.tools_source = tools_source
        self._bos = bos
        self._eos = eos
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._worker: TemplateProcess | None = None
        self._without_tools: dict[str, Any] = {}  # what the template needs where no tools are given
        self._in_parts: bool | None = None  # it takes texts as lists of parts; None if that is not known yet

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
                self._worker = TemplateProcess()

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

        A template that refuses the messages, or does not show all of them, is asked again in other forms
        (`conversation_forms`). Gemma 2's, which knows no system messages, shows them in the first question.

        Raises:
            TemplateError: the template refuses the messages, is faulty, or exceeds a limit.
        """
        refusal: TemplateError | None = None
        incomplete: str | None = None
        for form in forms(messages):
            try:
                text = self._render_as_taken(form, add_generation_prompt, variables or {})
            except _Refused as error:
                refusal = refusal or error
                continue
            if is_shown(messages, text):
                return text
            incomplete = incomplete or text
        if incomplete is None:
            assert refusal is not None, "there is a form"
            raise refusal
        return incomplete

    def _render_as_taken(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Render messages and tools as the template takes them.

        It may take only contents in parts, only tools whose schemas have all keys, or need empty tools.
        """
        if self._in_parts is None:
            self._in_parts = self._takes_only_parts()
        if self._in_parts:
            messages = in_parts(messages)
        try:
            return self._render(messages, add_generation_prompt, self._without_tools | dict(variables))
        except _Refused as error:
            whole = with_whole_schemas(variables)
            if whole != variables and not error.by_template:
                return self._render(messages, add_generation_prompt, self._without_tools | whole)
            if self._without_tools or "tools" in variables or error.by_template:
                raise
            # It may iterate over tools without asking whether there are any.
            text = self._render(messages, add_generation_prompt, {**variables, "tools": []})
            self._without_tools = {"tools": []}
            return text

    def _takes_only_parts(self) -> bool:
        """Try whether a text is shown as a list of parts, and not as it is."""
        probe = {"role": "user", "content": str(secrets.randbits(64))}
        try:
            shown = self._shows(probe["content"], [probe])
            return not shown and self._shows(probe["content"], in_parts([probe]))
        except TemplateError:  # it exceeds a limit, which each further attempt would take as long to find
            return False

    def _shows(self, text: str, messages: Sequence[Message]) -> bool:
        choices: tuple[dict[str, Any], ...] = ({}, {"tools": []})
        for variables in choices:
            with contextlib.suppress(_Refused):
                if text in self._render(messages, True, variables):
                    return True
        return False

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        source = self.source
        if self.tools_source is not None and (variables.get("tools") or _has_calls(messages)):
            source = self.tools_source
        request = {
            "source": source,
            "bos": self._bos,
            "eos": self._eos,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "variables": dict(variables),
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
    """A part of a rendered prompt; `literal` text must not be parsed for control tokens."""

    text: str
    literal: bool
    # those that stand in the place of the text; None for those that spell it
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
    together) passes through the template as a placeholder, and comes back as a literal segment. The joined
    texts of the segments are the plain rendering; without control strings there is only one segment.

    Args:
        controls: the control-token strings that occur in a text.
        variables: as `ChatTemplate.render`; their texts are protected as those of the messages.

    Raises:
        TemplateError: as `ChatTemplate.render`.
    """
    hidden = _Hidden(controls)
    protected = [hidden.protect(message) for message in messages]
    given = {name: hidden.protect(value) for name, value in (variables or {}).items()}
    return hidden.split(template.render(protected, add_generation_prompt, variables=given))


class _Hidden:
    """Control strings of one conversation, and the placeholders that replace them."""

    def __init__(self, controls: Callable[[str], list[str]]) -> None:
        self._controls = controls
        self._placeholders = Placeholders()
        self._originals: list[str] = []

    def protect(self, value: Any, name: str = "") -> Any:
        """A message, or a part of one that has this name, with placeholders instead of control strings."""
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item, key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        # The template compares roles, which are plain words; anything else it only prints.
        if not isinstance(value, str) or (name == "role" and value.isalpha()):
            return value
        return self._hide(value)

    def _hide(self, text: str) -> str:
        longest_first = sorted(filter(None, self._controls(text)), key=len, reverse=True)
        if not longest_first:
            return text
        return re.sub("|".join(map(re.escape, longest_first)), self._replace, text)

    def split(self, text: str) -> list[PromptSegment]:
        if not self._originals:
            return [PromptSegment(text, literal=False)]
        return [
            PromptSegment(self._originals[part], literal=True)
            if isinstance(part, int)
            else PromptSegment(part, literal=False)
            for part in self._placeholders.split(text)
        ]

    def _replace(self, match: re.Match[str]) -> str:
        self._originals.append(match[0])
        return self._placeholders.of(len(self._originals) - 1)


class _Refused(TemplateError):
    """The template does not render these messages; it may render others.

    Attributes:
        by_template: the template itself called `raise_exception`.
    """

    by_template = True


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
    if kind in reasons:
        return TemplateError(reasons[kind], OTHER_FILE)
    failed = _Refused(f"The model's chat template failed: {said}.", OTHER_FILE)
    failed.by_template = False
    return failed


def _has_calls(messages: Sequence[Message]) -> bool:
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
