"""Prompts that are to be answered together, and what becomes of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Chunk, Generation
from edgespec.speculation.tree import Acceptance, FloatArray, TokenTree

if TYPE_CHECKING:
    from edgespec.text.encoding import Prompt

_LOOK_S = 0.2  # how often an engine that waits for requests looks whether it was cancelled or closed


@dataclass(eq=False)
class Request:
    """A prompt and how to answer it."""

    prompt: Prompt
    config: GenerationConfig = field(default_factory=GenerationConfig)
    raw: bool = False  # continue the text as it is, without a template
    key: Any = None  # whatever the caller knows it by
    cancelled: bool = False  # set by the caller, from any thread, to end the answer
    traced: bool = False  # its chunks show the trees of its passes
    # see `Answer`; called for tokens behind the end of the answer too. It takes the place of recording
    # logprobs.
    on_accept: Callable[[FloatArray, TokenTree, Acceptance], None] | None = None
    # called with (tokens read, tokens to read) while the prompt is read, in the thread that answers
    on_prefill: Callable[[int, int], None] | None = None
    # position of the first token of the prompt whose log-probability is wanted; None for none.
    # `config.logprobs` says how many of the likeliest tokens are recorded beside each.
    scored_from: int | None = None
    continuation: str | None = None  # a text behind the prompt, whose log-probability alone is wanted then
    owner: Hashable = None  # who asks: drafts come from the earlier answers to the same owner alone


@dataclass(frozen=True)
class Event:
    """A piece of an answer, or the reason why there is none."""

    request: Request
    chunk: Chunk | None = None  # None if the request failed
    # why it failed, which concerns no other request; a bug unless it is an EdgeSpecError
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        """True if the request is done."""
        return self.chunk is None or self.chunk.generation is not None


class RequestSource(Protocol):
    def pop(self) -> Request | None:
        """The next request; None if there is none now."""

    def wait(self) -> bool:
        """Wait until there may be a request; False if there will be no more."""


class RequestQueue(RequestSource):
    """Requests that are added, from any thread, while earlier ones are being answered.

    With it, several threads share passes: one of them iterates over `Engine.stream_many(queue)`, and the
    others add what they want answered.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._closed = False
        self._changed = threading.Condition()

    def put(self, request: Request) -> None:
        """Add a request.

        Raises:
            UsageError: the queue is closed.
        """
        with self._changed:
            if self._closed:
                raise UsageError("The queue of requests is closed.", "Create a new one.")
            self._requests.append(request)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop once all added requests are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def pop(self) -> Request | None:
        with self._changed:
            return self._requests.popleft() if self._requests else None

    def wait(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._requests or self._closed, _LOOK_S)
            return bool(self._requests) or not self._closed


class RequestList(RequestSource):
    """Requests that need no waiting for."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests: Iterator[Request] = iter(requests)

    def pop(self) -> Request | None:
        return next(self._requests, None)

    def wait(self) -> bool:
        return False


class AnswerCollector:
    """Collects the answers to numbered requests."""

    def __init__(self, on_result: Callable[[int, Generation], None]) -> None:
        self._on_result = on_result
        self._answers: dict[int, Generation] = {}

    def add(self, event: Event) -> None:
        """Take a piece of an answer; raises why there is none."""
        if event.error is not None:
            raise event.error
        if event.chunk is not None and event.chunk.generation is not None:
            self._answers[event.request.key] = event.chunk.generation
            self._on_result(event.request.key, event.chunk.generation)

    @property
    def in_order(self) -> list[Generation]:
        """All answers, by number."""
        return [self._answers[index] for index in sorted(self._answers)]


def refuse_text(items: object) -> None:
    """Refuse a text where a list of them belongs: it would be read character by character."""
    if isinstance(items, str):
        raise UsageError("Expected a list of texts, not a string.", "Put the text into a list.")


def numbered(prompts: Iterable[Prompt], config: GenerationConfig | None, raw: bool) -> Iterator[Request]:
    """Requests whose keys are the places of their prompts."""
    config = config or GenerationConfig()
    refuse_text(prompts)
    return (Request(prompt, config, raw, key=index) for index, prompt in enumerate(prompts))
