"""Many answers of one engine, in passes that they share."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import aclosing, closing
from dataclasses import replace

from edgespec.arguments import checks_arguments
from edgespec.engine.answer import AnswerInProgress
from edgespec.engine.loop import Loop
from edgespec.engine.many_texts.asynchronous import events_of_thread
from edgespec.engine.many_texts.shared_passes import SharedPasses
from edgespec.engine.requests import Answers, Event, Request, RequestList, RequestSource, numbered
from edgespec.engine.target import Target
from edgespec.engine.usage import Usage
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Chunk, FinishReason, Generation, PassRecord
from edgespec.models.llama.runtime.abort import AbortFlag
from edgespec.models.text.encoding import Prompt
from edgespec.profiles.updates import ProfileUpdates


class ManyAnswers(ABC):
    """The part of an engine that answers many prompts at once.

    Attributes:
        target: verifies the drafted trees.
        loop: draft, verify, accept, commit.
        texts: how many texts `stream_many` answers at once, where it is not told.
        profile_updates: what this run measures.
    """

    target: Target
    loop: Loop
    texts: int
    profile_updates: ProfileUpdates
    _usage: Usage
    _abort: AbortFlag

    @abstractmethod
    def _checked(self, prompt: Prompt, config: GenerationConfig, raw: bool) -> tuple[list[int], int]:
        """The tokens of a prompt, and the room that the context has behind them."""

    @abstractmethod
    def _begin(self, prompt: list[int], room: int, config: GenerationConfig, raw: bool) -> AnswerInProgress:
        """Begin an answer."""

    @abstractmethod
    def _finish(self, answer: AnswerInProgress, reason: FinishReason, *, settles: bool = True) -> Chunk:
        """End an answer; `settles` if its text is in the cache."""

    @checks_arguments
    def stream_many(
        self,
        source: RequestSource | Iterable[Request],
        *,
        parallel: int | None = None,
        on_pass: Callable[[Sequence[PassRecord]], None] | None = None,
    ) -> Generator[Event, None, None]:
        """Answer many requests in shared passes, yielding what each pass adds to each answer.

        Every answer is the one that `generate` would give: texts that share passes do not change each other
        in exact decoding, and otherwise differ no more than trees of other sizes would make them.

        Args:
            source: requests, taken as there is room for them.
            parallel: most answers at once; None for `texts`.
            on_pass: called after each pass that extended answers, with a record of each; all have the
                times of the whole pass.

        Raises:
            UsageError: `parallel` is not positive, or this thread has begun another answer and not ended it.
            BackendError: the engine is closed, or another thread closes it in the meantime.
        """
        if parallel is not None and parallel < 1:
            raise UsageError(f"The number of parallel texts is {parallel}.", "It must be 1 or more.")
        requests = RequestList(source) if isinstance(source, Iterable) else source
        own: list[weakref.ref[Generator[Event, None, None]]] = []
        answers = self._stream_many(own, requests, parallel, on_pass)
        own.append(weakref.ref(answers))
        return answers

    def _stream_many(
        self,
        own: Sequence[weakref.ref[Generator[Event, None, None]]],
        source: RequestSource,
        parallel: int | None,
        on_pass: Callable[[Sequence[PassRecord]], None] | None,
    ) -> Generator[Event, None, None]:
        with self._usage.turn(own[0]):
            yield from self._shared_passes(source, parallel, on_pass)

    def _shared_passes(
        self,
        source: RequestSource,
        parallel: int | None,
        on_pass: Callable[[Sequence[PassRecord]], None] | None,
    ) -> Generator[Event, None, None]:
        self._usage.clear_abort()
        threads = self.target.context.n_threads

        def count_pass(rows: int, records: Sequence[PassRecord]) -> None:
            self.profile_updates.add_pass(replace(records[0], nodes=rows), threads)
            if on_pass is not None:
                on_pass(records)

        passes = SharedPasses(
            self.target,
            self.loop,
            source,
            begin=lambda request: self._begin(
                *self._checked(request.prompt, request.config, request.raw), request.config, request.raw
            ),
            # A text that waits, or was given up, is not in the cache.
            finish=lambda answer, reason: self._finish(answer, reason, settles=answer.cached is not None),
            stopped=lambda: self._abort.is_set,
            on_pass=count_pass,
            most_texts=parallel or self.texts,
        )
        with closing(self._usage.held_steps(passes.events())) as events:
            for event in events:
                if event is not None:
                    yield event
                elif not source.wait():
                    return

    @checks_arguments
    def generate_many(
        self,
        prompts: Iterable[Prompt],
        config: GenerationConfig | None = None,
        *,
        raw: bool = False,
        parallel: int | None = None,
        on_result: Callable[[int, Generation], None] = lambda index, answer: None,
    ) -> list[Generation]:
        """Answer many prompts in shared passes; see `stream_many`.

        Args:
            on_result: called with each prompt's index and answer, as soon as it is finished.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            EdgeSpecError: a prompt cannot be answered; see `stream`.
        """
        answers = Answers(on_result)
        for event in self.stream_many(numbered(prompts, config, raw), parallel=parallel):
            answers.take(event)
        return answers.in_order

    @checks_arguments
    def stream_many_async(
        self, source: RequestSource | Iterable[Request], *, parallel: int | None = None
    ) -> AsyncGenerator[Event, None]:
        """The same as `stream_many` for asynchronous code: passes run in a thread of their own.

        Ending the iteration early, or cancelling the task that iterates, ends the answers after the pass that
        is running, and the engine is free then. If the engine still works for another call, the iteration
        ends at once, and nothing is answered. Requests may be added meanwhile through a `RequestQueue`, which
        is closed in the end.
        """
        return events_of_thread(lambda requests: self.stream_many(requests, parallel=parallel), source)

    @checks_arguments
    async def generate_many_async(
        self,
        prompts: Iterable[Prompt],
        config: GenerationConfig | None = None,
        *,
        raw: bool = False,
        parallel: int | None = None,
        on_result: Callable[[int, Generation], None] = lambda index, answer: None,
    ) -> list[Generation]:
        """The same as `generate_many` for asynchronous code; may be cancelled like `stream_many_async`."""
        answers = Answers(on_result)
        async with aclosing(
            self.stream_many_async(numbered(prompts, config, raw), parallel=parallel)
        ) as events:
            async for event in events:
                answers.take(event)
        return answers.in_order
