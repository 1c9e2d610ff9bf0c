"""Reads lists and objects that are tags within tags, as MiniMax M3 writes them.

<city>Oslo</city><days><item>1</item><item>2</item></days><at><hour>7</hour></at>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgespec.text.calls.argument_values import ArgumentValue, properties_of, value_of
from edgespec.text.calls.layout import KEY, TEXT_TYPE, TaggedArguments

_NAME = r"([^<>\n/][^<>\n]*?)"


@dataclass
class _Element:
    """An element of a value, or the value itself, which has no key."""

    key: str
    begin: int
    end: int = -1
    children: list[_Element] = field(default_factory=list)


class NestedReader:
    """Reads values between tags that may hold tags themselves."""

    def __init__(self, tags: TaggedArguments) -> None:
        opens = re.escape(tags.opens) + _NAME + re.escape(tags.middle(TEXT_TYPE))
        closes = _NAME.join(map(re.escape, tags.closes.split(KEY)))
        self._tag = re.compile(f"{opens}|{closes}")
        self._item = tags.item

    def is_whole(self, text: str) -> bool:
        """True if every tag in a text is closed again."""
        return self._parsed(text) is not None

    def read(self, text: str, value: ArgumentValue) -> str:
        """The JSON of a value that was written as this text."""
        whole = self._parsed(text)
        if whole is None:
            return value.read(text)
        return json.dumps(self._value(text, whole, value), ensure_ascii=False)

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

    def _value(self, text: str, element: _Element, value: ArgumentValue) -> Any:
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
            items = value_of(form.get("items"), form)
            return [self._value(text, child, items) for child in children]
        listed = properties_of(form, form)
        return {
            child.key: self._value(text, child, value_of(listed.get(child.key), form)) for child in children
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
