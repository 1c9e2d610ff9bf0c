"""The latest responses, for requests that continue one by its id."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.latest import LatestValues
from edgespec.serving.api.refusals import Refusal

_MAX_KEPT = 1024
_MAX_BYTES = 12 << 20


class ResponseStore:
    """Conversations by the id of the response that they end with, in memory; any thread may use them.

    What was of no use for the longest time is dropped first.
    """

    def __init__(self) -> None:
        self._kept: LatestValues[bytes] = LatestValues(_MAX_BYTES, _MAX_KEPT)

    def keep(self, identifier: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Keep a conversation, its last answer included."""
        held = json.dumps(list(messages)).encode()
        self._kept.put(identifier, held, len(held))

    def get(self, identifier: str) -> list[dict[str, Any]]:
        """A conversation.

        Raises:
            Refusal: it is not kept.
        """
        held = self._kept.get(identifier)
        if held is None:
            text = f"The response {identifier[:80]!r} is not kept. Send the whole conversation as 'input'."
            raise Refusal(404, text, "previous_response_not_found")
        messages: list[dict[str, Any]] = json.loads(held)
        return messages
