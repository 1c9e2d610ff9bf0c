"""The latest responses, for requests that continue one by its id."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.serving.api.refusals import Refusal

_MAX_KEPT = 1024
_MAX_BYTES = 64 << 20


class ResponseStore:
    """Conversations by the id of the response that they end with, in memory; any thread may use them.

    What was of no use for the longest time is dropped first.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    def keep(self, identifier: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Keep a conversation, its last answer included."""
        held = json.dumps(list(messages)).encode()
        with self._lock:
            self._kept[identifier] = held
            self._n_bytes += len(held)
            while len(self._kept) > _MAX_KEPT or self._n_bytes > _MAX_BYTES:
                self._n_bytes -= len(self._kept.popitem(last=False)[1])

    def get(self, identifier: str) -> list[dict[str, Any]]:
        """A conversation.

        Raises:
            Refusal: it is not kept.
        """
        with self._lock:
            held = self._kept.get(identifier)
            if held is None:
                text = (
                    f"The response {identifier[:80]!r} is not kept. Send the whole conversation as 'input'."
                )
                raise Refusal(404, text, "previous_response_not_found")
            self._kept.move_to_end(identifier)
        messages: list[dict[str, Any]] = json.loads(held)
        return messages
