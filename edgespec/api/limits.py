"""Limits on what clients may send to the server, and how long they may take."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_COUNT = 2**31 - 1
"""The largest count a request may name, such as `max_tokens`."""


@dataclass(frozen=True)
class Limits:
    """Bounds that are checked before the work is done. Sizes in bytes, times in seconds.

    Attributes:
        body: the body of one request.
        bodies: all bodies being received or prepared, over all connections; 0 means twice `body`.
        small_body: the first bytes of each body, which do not count towards `bodies`, so that ordinary
            requests get through while large ones wait.
        values: values in the JSON of a body, not counting keys; the context adds one for each token.
        depth: how deep objects and lists may be nested.
        messages: messages in a conversation.
        images: images in a conversation.
        stops: stop strings, or sequence breakers.
        stop_length: characters in each stop string.
        banned: banned strings.
        banned_length: characters in all of them.
        grammar: a grammar or JSON schema.
        tools: the definitions of all tools.
        tool_count: tools in a request.
        text_per_token: bytes of text per token of the context; longer prompts are refused before they are
            tokenized.
        small_text: a prompt of this size is tokenized whatever the context.
        body_s: time to receive the body.
        connections: connections that are open when a request arrives.
    """

    body: int = 32 << 20
    bodies: int = 0
    small_body: int = 64 << 10
    values: int = 200_000
    depth: int = 128
    messages: int = 4096
    images: int = 64
    stops: int = 64
    stop_length: int = 1024
    banned: int = 1024
    banned_length: int = 16 << 10
    grammar: int = 128 << 10
    tools: int = 2 << 20
    tool_count: int = 512
    text_per_token: int = 32
    small_text: int = 64 << 10
    body_s: float = 60.0
    connections: int = 512

    @property
    def all_bodies(self) -> int:
        """Bytes that all bodies together may take."""
        return self.bodies or 2 * self.body
