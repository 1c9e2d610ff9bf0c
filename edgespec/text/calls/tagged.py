"""Arguments that stand between tags, one by one, as Qwen3-Coder, GLM and many others write them.

A text stands there as it is; any other value is JSON. So what may be written follows from the schema of each
argument: it is turned into a grammar (in llguidance's dialect of Lark), and read back into JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgespec.errors import GrammarError
from edgespec.generation.tools import Tool
from edgespec.text.calls.argument_rules import closing_of
from edgespec.text.calls.argument_values import (
    ANYTHING_BUT_TEXT,
    ArgumentValue,
    SchemaReader,
    read_literal,
)
from edgespec.text.calls.layout import (
    KEY,
    TEXT_TYPE,
    TaggedArguments,
    common_length,
    pattern,
)
from edgespec.text.calls.reader import CallEnd, CallName, UnquotedMark, overlap

# XML's way to put a text with any characters between tags, which models write around such texts.
_CDATA = ("<![CDATA[", "]]>")


class TaggedCallReader:
    """Reads calls between tags; see `reader.CallReader`. Texts are passed on as they come.

    Args:
        middle: the text between a call's name and its first argument.
        first, following, ends: regular expressions of the text before the first name, before each further
            one (empty if there is none), and behind the last call.
    """

    def __init__(
        self,
        tags: TaggedArguments,
        middle: str,
        tools: Sequence[Tool],
        *,
        first: str,
        following: str,
        ends: str,
    ) -> None:
        name = rf"([\w.-]+)(?=[^\w.-]){pattern(middle.rstrip())}"
        self._head = re.compile(rf"\s*{first}{name}")
        self._following = re.compile(rf"\s*{following}{name}") if following else None
        self._ends = re.compile(rf"\s*{ends}")
        self._words = tags.words
        self._nested = NestedValues(tags) if tags.item else None
        self._space, self._tag, rest = closing_of(tags.closes)
        opens = pattern(rest) + r"\s*" if rest.strip() else r"\s*"
        kinds = {text: kind for kind, text in tags.middles}  # the last of those that are written alike
        self._keys = [
            (re.compile(_key_pattern(tags.opens, text), re.DOTALL), kind if tags.types_show else None)
            for text, kind in kinds.items()
        ]
        self._rest = re.compile(opens)
        self._tools = {tool.name: tool for tool in tools}
        self._schemas = SchemaReader(Tool(""))  # of the tool that is called
        self._value: ArgumentValue | None = None  # of the argument that is being read
        self._closes = ""  # its closing tag
        self._end: _End | None = None  # finds it; None before the first characters
        self._pieces: list[str] = []  # of a value that is no text, up to here
        self._trimmed = self._space  # white space before the tag that is no part of the value
        self._count = 0
        self._named = self._ended = False

    def read(self, text: str) -> tuple[CallName | CallEnd | str, str]:
        if self._ended:
            return CallEnd(), text
        if self._value is not None:
            return self._in_value(self._value, text)
        if not self._named:
            return self._in_head(text)
        for key, kind in self._keys:
            found = key.match(text)
            if found is not None:
                return self._begin_value(found[1], kind), text[found.end() :]
        if self._following is not None and self._following.match(text):
            self._head, self._named = self._following, False
            return self._end_arguments(), text
        end = self._ends.match(text)
        if end is None:
            return "", text
        self._ended = True
        return self._end_arguments(), text[end.end() :]

    def _in_head(self, text: str) -> tuple[CallName | str, str]:
        found = self._head.match(text)
        if found is None:
            return "", text
        self._named = True
        self._count = 0
        self._schemas = SchemaReader(self._tools.get(found[1], Tool(found[1])))
        return CallName(found[1]), text[found.end() :]

    def _end_arguments(self) -> str:
        return "}" if self._count else "{}"

    def _begin_value(self, key: str, kind: str | None) -> str:
        """Begin an argument; `kind` is JSON's type of its value if the tag tells it."""
        listed = self._schemas.listed
        value = (
            self._schemas.value(listed[key])
            if key in listed
            else ArgumentValue({}, ("",), types=ANYTHING_BUT_TEXT)
        )
        if kind is not None:
            is_text = kind == TEXT_TYPE
            value = ArgumentValue({}, ("",)) if is_text else ArgumentValue({}, types=ANYTHING_BUT_TEXT)
        self._value, self._end, self._pieces = value, None, []
        self._closes, self._trimmed = self._tag.replace(KEY, key), self._space
        self._count += 1
        before = "{" if self._count == 1 else ", "
        quote = '"' if value.is_text else ""
        return f"{before}{json.dumps(key)}: {quote}"

    def _in_value(self, value: ArgumentValue, text: str) -> tuple[str, str]:
        opens, quote = _CDATA
        if self._end is None:
            if len(text) < len(opens) and opens.startswith(text):
                return "", text
            if text.startswith(opens):
                text, self._closes, self._trimmed = text[len(opens) :], quote + self._closes, ""
                self._end = _Plain(self._closes)
            elif value.is_text or (value.texts and self._nested is None):
                self._end = _Plain(self._closes)
            elif self._nested is not None:
                self._end = self._nested.end(self._closes)
            elif begun := text.lstrip():
                quotes = "\"'" if self._words else '"'
                is_json = begun[0] in '[{"'
                self._end = UnquotedMark(self._closes, quotes) if is_json else _Plain(self._closes)
            else:
                return "", text
        at = self._end.find(text)
        if at >= 0:
            said = "".join([*self._pieces, text[:at]]).removesuffix(self._trimmed)
            self._value = None
            read = f'{_inner(said)}"' if value.is_text else self._json(value, said)
            return read, text[at + len(self._closes) :]
        certain, self._end.at = self._end.at, 0
        if not value.is_text:
            self._pieces.append(text[:certain])
            return "", text[certain:]
        certain = min(certain, len(text) - overlap(text, self._trimmed + self._closes))
        return _inner(text[:certain]), text[certain:]

    def _json(self, value: ArgumentValue, said: str) -> str:
        """The JSON of a value that was written as this text."""
        if self._nested is not None:
            return self._nested.read(said, value, self._schemas)
        read = value.read(said)
        # A template that writes True writes lists and objects as Python does, too.
        if self._words and not value.is_text and read.startswith('"') and said not in value.words:
            return read_literal(said) or read
        return read


def _key_pattern(opens: str, middle: str) -> str:
    """The regular expression of an argument's name, which is group 1, and the tags around it."""
    bare = middle.rstrip()
    space = middle[len(bare) :]
    # Whether white space belongs to the tag or to the value must be certain.
    certain = rf"(?:{re.escape(space)}(?=.)|(?=[^{re.escape(space[0])}]))" if space else ""
    return rf"\s*{pattern(opens.lstrip())}([^<>\n/][^<>\n]*?){pattern(bare)}{certain}"


def _inner(text: str) -> str:
    """A part of a text as JSON has it between its quotes."""
    return json.dumps(text)[1:-1]


_NAME = r"([^<>\n/][^<>\n]*?)"


@dataclass
class _Element:
    """An element of a value, or the value itself, which has no key."""

    key: str
    begin: int
    end: int = -1
    children: list[_Element] = field(default_factory=list)


class _End(Protocol):
    """Finds the end of a value; see `reader.UnquotedMark`."""

    at: int

    def find(self, text: str) -> int: ...


class _Plain:
    """Finds a mark, wherever it stands."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.at = 0

    def find(self, text: str) -> int:
        at = text.find(self._mark, self.at)
        self.at = len(text) - overlap(text, self._mark)
        return at


class _Nested:
    """Finds a closing tag behind which every tag is closed again.

    Args:
        tags: matches any tag; group 1 is the name in an opening one.
        begins: what all tags begin with.
    """

    def __init__(self, mark: str, tags: re.Pattern[str], begins: str) -> None:
        self._mark = mark
        self._tags = tags
        self._begins = begins
        self._depth = 0
        self.at = 0

    def find(self, text: str) -> int:
        while (found := self._tags.search(text, self.at)) is not None:
            if not self._depth and found[1] is None and found[0] == self._mark:
                return found.start()
            self._depth = self._depth + 1 if found[1] is not None else max(self._depth - 1, 0)
            self.at = found.end()
        begun = text.rfind(self._begins, self.at)
        self.at = begun if begun >= 0 else len(text) - overlap(text, self._begins)
        return -1


class NestedValues:
    """Reads values between tags that may hold tags themselves."""

    def __init__(self, tags: TaggedArguments) -> None:
        opens = re.escape(tags.opens) + _NAME + re.escape(tags.middle(TEXT_TYPE))
        closes = _NAME.join(map(re.escape, tags.closes.split(KEY)))
        self._tag = re.compile(f"{opens}|{closes}")
        self._begins = tags.opens[: common_length(tags.opens, tags.closes)].strip()
        self._item = tags.item

    def end(self, mark: str) -> _End:
        """Returns what finds the end of a value before a closing tag."""
        return _Nested(mark, self._tag, self._begins)

    def read(self, text: str, value: ArgumentValue, schemas: SchemaReader) -> str:
        """The JSON of a value that was written as this text."""
        whole = self._parsed(text)
        try:
            if whole is not None:
                return json.dumps(self._value(text, whole, value, schemas), ensure_ascii=False)
        except (RecursionError, GrammarError):  # it is too deep, or its schema too large
            pass
        return value.read(text)

    def _parsed(self, text: str) -> _Element | None:
        """The elements of a text; None if one is not closed.

        A closing tag closes the latest element whatever its name, which no grammar can repeat.
        """
        stack = [_Element("", 0)]
        for found in self._tag.finditer(text):
            opened = found[1]
            if opened is not None:
                stack.append(_Element(opened, found.end()))
            elif len(stack) > 1:
                last = stack.pop()
                last.end = found.start()
                stack[-1].children.append(last)
        stack[0].end = len(text)
        return stack[0] if len(stack) == 1 else None

    def _value(self, text: str, element: _Element, value: ArgumentValue, schemas: SchemaReader) -> Any:
        said = text[element.begin : element.end]
        form = next((form for form in value.forms if kinds_of(form) & {"array", "object"}), {})
        kinds = kinds_of(form)
        children = element.children
        if not children:
            if not said.strip() and kinds and not value.texts:
                return [] if "array" in kinds else {}
            return json.loads(value.read(said))
        is_list = all(child.key == self._item for child in children)
        if is_list and (not kinds or "array" in kinds):
            items = schemas.value(form.get("items"))
            return [self._value(text, child, items, schemas) for child in children]
        listed = schemas.properties(form)
        return {
            child.key: self._value(text, child, schemas.value(listed.get(child.key)), schemas)
            for child in children
        }


def kinds_of(form: Mapping[str, Any]) -> set[str]:
    """JSON's types of what fits a schema, as far as it says."""
    kinds = form.get("type")
    found = set(kinds) if isinstance(kinds, list) else {kinds}
    if "properties" in form:
        found |= {"object"}
    if "items" in form:
        found |= {"array"}
    return {str(kind) for kind in found if kind}
