"""Calls whose arguments stand between tags, one by one, as Qwen3-Coder and GLM write them.

A text stands there as it is; any other value is JSON. So what may be written follows from the schema of each
argument: it is turned into a grammar (in llguidance's dialect of Lark), and read back into JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.errors import UsageError
from edgespec.generation.tools import Tool
from edgespec.models.text.calls.argument_values import ANYTHING_BUT_TEXT, ArgumentValue, parameters_of
from edgespec.models.text.calls.reader import CallEnd, CallName, CallReader

_SPACE = {"x-guidance": {"whitespace_pattern": r"[ \n]{0,20}"}}
_OPTIONAL = r"\n?"
_BREAK = f"/{_OPTIONAL}/"


@dataclass(frozen=True)
class TagSpelling:
    """The tags around names and values; see `syntax.CallSpelling`.

    Attributes:
        name: around the function's name.
        key: around an argument's name.
        closes: after its value; the line break before it is not part of the value.
        ends: after the last argument.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    closes: str
    ends: str

    @property
    def marks(self) -> tuple[str, ...]:
        """All of them, without line breaks."""
        return tuple(mark.strip() for mark in (*self.name, *self.key, self.closes, self.ends) if mark.strip())

    def grammar(self, tools: Sequence[Tool]) -> str:
        """The grammar of a call of one of these tools.

        Raises:
            UsageError: the arguments of one cannot be written between these tags.
        """
        names = " | ".join(f"call_{n}" for n in range(len(tools)))
        lines = [f"start: {_spaced(self.name[0])} ({names}) {_spaced(self.ends)}"]
        for n, tool in enumerate(tools):
            parameters = parameters_of(tool)
            required = tool.schema.get("required", [])
            arguments = [f"arg_{n}_{m}{'' if key in required else '?'}" for m, key in enumerate(parameters)]
            lines.append(" ".join([f"call_{n}: {_spaced(tool.name + self.name[1])}", *arguments]))
            for m, (key, value) in enumerate(parameters.items()):
                if re.search(r"[<>\n]", key):
                    raise UsageError(
                        f"An argument of the tool {tool.name} is named {key!r}.",
                        "This model cannot write '<', '>' and line breaks in the names of arguments.",
                    )
                opens = _spaced(f"{self.key[0]}{key}{self.key[1].rstrip()}")
                lines.append(f"arg_{n}_{m}: {opens} value_{n}_{m} {_BREAK}")
                lines += self._value(f"value_{n}_{m}", value)
        return "\n".join(lines)

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """Returns what reads a call behind the trigger."""
        return TaggedCallReader(self, tools)

    @property
    def breaks(self) -> tuple[bool, bool]:
        """True if a line break that is no part of a value may stand before it; and the same behind it."""
        return self.key[1].endswith("\n"), self.closes.startswith("\n")

    def _value(self, rule: str, value: ArgumentValue) -> list[str]:
        """The rules of a value and of the tag that closes it."""
        tag = self.closes.strip()
        before, behind = self.breaks
        closing = f"{_BREAK} {json.dumps(tag)}" if behind else json.dumps(tag)
        ways = [f"{json.dumps(word)} {closing}" for word in value.words]
        ways += [f"%json {json.dumps(form | _SPACE)} {closing}" for form in value.forms]
        ways = [f"{_BREAK} {way}" for way in ways] if before else ways
        lines = []
        for n, pattern in enumerate(value.texts):
            terminal = f"{rule}_text_{n}".upper()
            ways.append(terminal)
            closed = re.escape(tag).replace("/", r"\/")
            whole = rf"{_OPTIONAL if before else ''}{pattern}{_OPTIONAL if behind else ''}{closed}"
            # A text ends with the first tag, so it cannot contain one.
            lines.append(rf"{terminal}: /{whole}/ & ~/(?s:.*){closed}(?s:.+)/")
        return [f"{rule}: {' | '.join(ways)}", *lines]


QWEN_CODER = TagSpelling(
    ("\n<function=", ">\n"), ("<parameter=", ">\n"), "\n</parameter>\n", "</function>\n</tool_call>"
)
GLM = TagSpelling(("", "\n"), ("<arg_key>", "</arg_key>\n<arg_value>"), "</arg_value>\n", "</tool_call>")


class TaggedCallReader:
    """Reads calls between tags; see `reader.CallReader`. Texts are passed on as they come."""

    def __init__(self, tags: TagSpelling, tools: Sequence[Tool]) -> None:
        opens, after = (re.escape(mark.strip()) for mark in tags.name)
        self._head = re.compile(rf"\s*{opens}\s*([\w.-]+)\s*{after}(?=\s*<)")
        key_opens, key_closes = (r"\s*".join(map(re.escape, mark.split())) for mark in tags.key)
        # Whether a line break follows the tag must be certain, since it is not part of the value.
        certain = r"(?:\n(?=.)|(?=[^\n]))" if tags.breaks[0] else ""
        self._key = re.compile(rf"\s*{key_opens}([^<>\n]*){key_closes}{certain}", re.DOTALL)
        self._last_break = "\n" if tags.breaks[1] else ""
        self._closes = tags.closes.strip()
        self._ends = re.compile(r"\s*" + r"\s*".join(map(re.escape, tags.ends.split())))
        self._parameters = {tool.name: parameters_of(tool) for tool in tools}
        self._known: Mapping[str, ArgumentValue] = {}
        self._value: ArgumentValue | None = None  # of the argument that is being read
        self._said = ""  # of a text
        self._count = 0
        self._named = self._ended = False

    def read(self, text: str) -> tuple[CallName | CallEnd | str, str]:
        """See `CallReader`."""
        if self._ended:
            return CallEnd(), text
        if not self._named:
            head = self._head.match(text)
            if head is None:
                return "", text
            self._named = True
            self._known = self._parameters.get(head[1], {})
            return CallName(head[1]), text[head.end() :]
        if self._value is not None:
            return self._in_value(self._value, text)
        end = self._ends.match(text)
        if end is not None:
            self._ended = True
            return "}" if self._count else "{}", text[end.end() :]
        key = self._key.match(text)
        if key is None:
            return "", text
        self._value = self._known.get(key[1], ArgumentValue({}, ("",), types=ANYTHING_BUT_TEXT))
        self._count += 1
        self._said = ""
        before = "{" if self._count == 1 else ", "
        quote = '"' if self._value.is_text else ""
        return f"{before}{json.dumps(key[1])}: {quote}", text[key.end() :]

    def _in_value(self, value: ArgumentValue, text: str) -> tuple[str, str]:
        at = text.find(self._closes)
        while at >= 0 and not value.ends_at_tag(text[:at].removesuffix(self._last_break)):
            at = text.find(self._closes, at + 1)
        if at >= 0:
            said, rest = text[:at].removesuffix(self._last_break), text[at + len(self._closes) :]
            self._value = None
            return (f'{_inner(said)}"' if value.is_text else value.read(said)), rest
        if not value.is_text:
            return "", text
        end = len(text)
        sizes = range(min(len(self._closes) - 1, end), 0, -1)
        end -= next((n for n in sizes if self._closes.startswith(text[end - n :])), 0)
        end -= bool(self._last_break) and text[:end].endswith(self._last_break)
        return _inner(text[:end]), text[end:]


def _inner(text: str) -> str:
    """A part of a text as JSON has it between its quotes."""
    return json.dumps(text)[1:-1]


def _spaced(mark: str) -> str:
    """A mark in a grammar; its line breaks may be left out."""
    lines = [json.dumps(line) if line else "" for line in mark.split("\n")]
    return f" {_BREAK} ".join(lines).strip()
