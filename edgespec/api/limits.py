"""Limits on what clients may send to the server, and how long they may take."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_COUNT = 2**31 - 1
"""The largest count a request may name, such as `max_tokens`."""


@dataclass(frozen=True)
class Limits:
    """Bounds that are checked before the work is done. Sizes in bytes, times in seconds."""

    body: int = 32 << 20  # the body of one request
    bodies: int = 0  # all bodies being received or prepared, over all connections; 0 means twice `body`
    # The first bytes of each body, which do not count towards `bodies`, so that ordinary requests get through
    # while large ones wait
    small_body: int = 64 << 10
    # Values in the JSON of a body, not counting keys; the context adds one for each token
    values: int = 200_000
    depth: int = 128  # how deep objects and lists may be nested
    messages: int = 4096  # messages in a conversation
    images: int = 64  # images in a conversation
    stops: int = 64  # stop strings, or sequence breakers
    stop_length: int = 1024  # characters in each stop string
    banned: int = 1024  # banned strings
    banned_length: int = 16 << 10  # characters in all of them
    grammar: int = 128 << 10  # a grammar or JSON schema
    tools: int = 2 << 20  # the definitions of all tools
    tool_count: int = 512  # tools in a request
    # Bytes of text per token of the context; longer prompts are refused before they are tokenized
    text_per_token: int = 32
    small_text: int = 64 << 10  # a prompt of this size is tokenized whatever the context
    body_s: float = 60.0  # time to receive the body
    connections: int = 512  # connections that are open when a request arrives

    @property
    def all_bodies(self) -> int:
        """Bytes that all bodies together may take."""
        return self.bodies or 2 * self.body
