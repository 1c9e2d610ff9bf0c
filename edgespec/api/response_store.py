"""The responses that are kept in memory: conversations to continue, and items to refer to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from edgespec.api.conversations import Conversations
from edgespec.api.messages import Message
from edgespec.api.refusals import Refusal
from edgespec.base.latest import LatestValues
from edgespec.errors import UsageError

_MAX_RESPONSES = 1024
_MAX_BYTES = 64 << 20  # the images of a conversation are kept with it
_MAX_ITEMS = 1 << 15

Event = dict[str, Any]


class ResponseStore:
    """Responses by their ids; any thread may use it. The least recently used is dropped first.

    Attributes:
        conversations: which requests may continue, too.
    """

    def __init__(self) -> None:
        self._kept: LatestValues[bytes] = LatestValues(_MAX_BYTES, _MAX_RESPONSES)
        self._places: LatestValues[str] = LatestValues(_MAX_ITEMS, _MAX_ITEMS)  # response of each item
        self.conversations = Conversations()

    def keep(self, response: Event, asked: bytes, answer: Mapping[str, Any]) -> None:
        """Keep a response.

        Args:
            asked: the conversation before it, as JSON: "messages", and the items of the request, "input".
            answer: the message that ends the conversation.
        """
        held = json.loads(asked)
        held = {"messages": [*held["messages"], answer], "input": held["input"], "response": response}
        identifier, text = str(response["id"]), json.dumps(held).encode()
        self._kept.put(identifier, text, len(text))
        for item in (*held["input"], *response["output"]):
            self._places.put(item["id"], identifier, 1)

    def response(self, identifier: str) -> Event:
        response: Event = self._read(identifier)["response"]
        return response

    def input_items(self, identifier: str) -> list[Event]:
        """The items of the request for a response."""
        items: list[Event] = self._read(identifier)["input"]
        return items

    def remove(self, identifier: str) -> None:
        """Forget a response; those that continue it are kept."""
        self._read(identifier)
        self._kept.remove(identifier)

    def conversation(self, identifier: str) -> list[Message]:
        """The messages up to the answer of a response."""
        advice = "Send the whole conversation as 'input'."
        messages: list[Message] = self._read(identifier, advice)["messages"]
        return messages

    def items(self, identifiers: Iterable[str]) -> dict[str, Event]:
        """Items of requests and responses, by their ids.

        Raises:
            UsageError: one is named twice, so that a small request could stand for a large one.
            Refusal: one is not kept.
        """
        found: dict[str, Event] = {}
        read: dict[str | None, dict[str, Event]] = {}
        for identifier in identifiers:
            if identifier in found:
                raise UsageError(f"The item {identifier[:80]!r} is referred to twice.", "Refer to it once.")
            place = self._places.get(identifier)
            if place not in read:
                held = None if place is None else self._kept.get(place)
                read[place] = {} if held is None else _items_in(json.loads(held))
            if identifier not in read[place]:
                text = f"The item {identifier[:80]!r} is not kept. Send it as it was."
                raise Refusal(404, text, "item_not_found")
            found[identifier] = read[place][identifier]
        return found

    def _read(self, identifier: str, advice: str = "It was removed, or never stored.") -> Any:
        """A response and all that is kept with it.

        Raises:
            Refusal: nothing is.
        """
        held = self._kept.get(identifier)
        if held is None:
            text = f"The response {identifier[:80]!r} is not kept. {advice}"
            raise Refusal(404, text, "previous_response_not_found")
        return json.loads(held)


def _items_in(held: Mapping[str, Any]) -> dict[str, Event]:
    return {item["id"]: item for item in (*held["input"], *held["response"]["output"])}
