"""Conversations of the Responses API that are kept in memory, for as long as the server runs."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from edgespec.api.refusals import Refusal
from edgespec.base.latest import LatestValues

_MAX_CONVERSATIONS = 1024
_MAX_BYTES = 64 << 20  # the images of conversations are kept with them
_FULL = 16 << 20  # bytes of a conversation that is continued no more

Event = dict[str, Any]


class Conversations:
    """Conversations by their ids; any thread may use it. The least recently used is dropped first."""

    def __init__(self) -> None:
        self._kept: LatestValues[bytes] = LatestValues(_MAX_BYTES, _MAX_CONVERSATIONS)
        self._changing = threading.Lock()

    def create(self, items: Sequence[Event], metadata: Event) -> Event:
        """Begin a conversation; returns its description for clients."""
        about = {
            "id": f"conv_{uuid.uuid4().hex}",
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": metadata,
        }
        self._write({"about": about, "items": list(items)})
        return about

    def about(self, identifier: str) -> Event:
        """The description of a conversation for clients."""
        about: Event = self._read(identifier)["about"]
        return about

    def items(self, identifier: str, *, to_continue: bool = False) -> list[Event]:
        """The items of a conversation, the oldest first.

        Args:
            to_continue: refuse a conversation that is full.
        """
        items: list[Event] = self._read(identifier, _FULL if to_continue else None)["items"]
        return items

    def describe(self, identifier: str, metadata: Event) -> Event:
        """Replace the metadata of a conversation."""

        def described(held: Event) -> Event:
            return {**held, "about": {**held["about"], "metadata": metadata}}

        about: Event = self._change(identifier, described)["about"]
        return about

    def add(self, identifier: str, items: Sequence[Event]) -> None:
        """Add items to the end of a conversation.

        Raises:
            Refusal: the conversation is not kept, or full.
        """
        with self._changing:
            held = self._read(identifier, _FULL)
            self._write({**held, "items": [*held["items"], *items]})

    def remove_item(self, identifier: str, item: str) -> Event:
        """Remove an item from a conversation; returns the description of the rest."""

        def shortened(held: Event) -> Event:
            items = [one for one in held["items"] if one["id"] != item]
            if len(items) == len(held["items"]):
                raise no_such_item(item)
            return {**held, "items": items}

        about: Event = self._change(identifier, shortened)["about"]
        return about

    def remove(self, identifier: str) -> None:
        self._read(identifier)
        self._kept.remove(identifier)

    def _change(self, identifier: str, change: Callable[[Event], Event]) -> Event:
        with self._changing:
            return self._write(change(self._read(identifier)))

    def _write(self, held: Event) -> Event:
        text = json.dumps(held).encode()
        self._kept.put(held["about"]["id"], text, len(text))
        return held

    def _read(self, identifier: str, most: int | None = None) -> Event:
        """A conversation.

        Args:
            most: bytes of it.

        Raises:
            Refusal: it is not kept, or larger.
        """
        text = self._kept.get(identifier)
        if text is None:
            raise Refusal(404, f"The conversation {identifier[:80]!r} is not kept.", "conversation_not_found")
        if most is not None and len(text) > most:
            raise Refusal(400, f"The conversation takes over {most >> 20} MiB. Begin a new one.")
        held: Event = json.loads(text)
        return held


def no_such_item(identifier: str) -> Refusal:
    """An item that a conversation does not have."""
    return Refusal(404, f"The conversation has no item {identifier[:80]!r}.", "item_not_found")
