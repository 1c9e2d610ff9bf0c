"""The scheduler: which sequences the next pass extends, and which prompts it reads beside them.

Sequences join and leave between passes (continuous batching).

A sequence's tokens are the same, bit for bit, in any company: its rows attend to its own cells only, a row
rule keeps the number of rows from choosing the kernels, and its random numbers come from its own seed. So
sequences are scheduled by speed alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from edgespec.engine.answer import AnswerInProgress
from edgespec.engine.pass_plan import CellBudget, PassLimits, PrefillLimiter, plan_pass
from edgespec.engine.passes import CachedSequence, PromptChunk
from edgespec.engine.requests import Event, Request, RequestSource
from edgespec.engine.scoring import PromptScores
from edgespec.engine.sequence import Batch
from edgespec.engine.target import Target
from edgespec.files.cache_kind import CacheKind
from edgespec.generation.result import Chunk, FinishReason, PassRecord
from edgespec.llama.cache.kv_cache import common_prefix
from edgespec.llama.cache.state_file import StateFile
from edgespec.llama.row_rule import MOST_PADDED_ROWS
from edgespec.models.gguf.footprint import USUAL_NODES
from edgespec.speculation.drafters.base import Drafter

_STREAMED_ROWS = 128  # of a shared pass that reads weights: more take long while a prompt is read
_SHARED_PREFIX = 16  # tokens that are worth waiting for while another sequence reads them
_MOST_DRAFTED = 16  # sequences whose states in the drafter's cache wait to be written
_DONE = object()


@dataclass(eq=False)
class _InFlight:
    """A request that has begun.

    Attributes:
        started: whether any of its tokens were read for it alone.
        read: tokens of its prompt that were read for it.
        to_read: tokens of its prompt that were not known when it began.
        state: what the cache had of its sequence, while it waits for room there.
    """

    request: Request
    answer: AnswerInProgress
    started: bool = False
    read: int = 0
    to_read: int = 0
    state: StateFile | None = None

    @property
    def prompt(self) -> list[int]:
        """The tokens that must be in the cache before the sequence is extended."""
        return self.answer.sequence.tokens[:-1]

    @property
    def place(self) -> CachedSequence:
        """The place of the sequence in the cache."""
        cached = self.answer.sequence.cached
        assert cached is not None, "only waiting sequences are not in the cache"
        return cached

    @property
    def has_nothing_to_add(self) -> bool:
        """True if the prompt was read, and no token is to follow it."""
        return self.answer.missing <= 0 and self.answer.is_full

    def discard_state(self) -> None:
        """Free the disk space of what was set aside."""
        if self.state is not None:
            self.state.close()
            self.state = None

    @property
    def scores(self) -> PromptScores | None:
        """The log-probabilities of its prompt, if they are wanted."""
        return self.answer.scores

    def readable(self, logits: int) -> int:
        """The number of tokens of its prompt that a pass with so many rows of logits can read next."""
        missing = self.answer.missing
        if self.scores is None:
            return missing
        return min(missing, max(self.scores.covered - len(self.place.tokens), 0) + logits)

    def tell_progress(self) -> None:
        """Say how much of the prompt was read, to whom it may concern."""
        if self.request.on_prefill is not None:
            self.request.on_prefill(self.to_read - max(self.answer.missing, 0), self.to_read)


class Scheduler:
    """Chooses the batches in which the requests of a source are answered, as many at once as fit.

    Args:
        begin: starts an answer: encodes the prompt, checks it, and sets up its method.
        finish: ends an answer.
        most_texts: most answers at once.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        source: RequestSource,
        *,
        begin: Callable[[Request], AnswerInProgress],
        finish: Callable[[AnswerInProgress, FinishReason], Chunk],
        most_sequences: int,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._source = source
        self._begin = begin
        self._finish = finish
        sequences = min(most_sequences, target.max_sequences - 1, target.max_nodes)
        self._limits = PassLimits(max(sequences, 1), _most_rows(target))
        self._prefill_limiter = PrefillLimiter(self._limits.rows)
        self._most_idle = max(target.max_sequences - 1 - self._limits.sequences, 0)
        self._cells = CellBudget(target.context.n_cells, spare=4 * target.max_nodes)
        self._in_flight: list[_InFlight] = []
        self._extended: list[_InFlight] = []  # by the latest batch
        self._read: list[_InFlight] = []  # those of whose prompts the latest batch reads a chunk
        self._waiting: deque[_InFlight] = deque()
        self._idle: deque[CachedSequence] = deque()  # of finished answers, for requests that begin alike
        self._storing: dict[CachedSequence, Iterator[None]] = {}  # what is left to be written of sequences
        self._drafted: deque[Sequence[int]] = deque(maxlen=_MOST_DRAFTED)  # finished, not yet written

    @property
    def is_idle(self) -> bool:
        """True if nothing is being answered."""
        return not self._in_flight

    def join_and_leave(self) -> Generator[Event, None, None]:
        """End what was cancelled, and let waiting and new requests begin, as long as there is room."""
        yield from self._drop_cancelled()
        while True:
            yield from self._admit()
            read = [running for running in self._in_flight if running.has_nothing_to_add]
            if not read:
                return
            self._share_prefixes()  # before they are forgotten
            for running in read:
                running.answer.prompt_was_read(running.read)
                yield Event(running.request, self._close(running, "length"))

    def schedule(self) -> Batch | None:
        """The batch of the next pass; None if that pass went to a long prompt alone, which it has read."""
        self._make_room()
        self._share_prefixes()
        reading = [running for running in self._in_flight if running.answer.missing > 0]
        ready = [running for running in self._in_flight if running.answer.missing <= 0]
        for running in ready:
            running.answer.prompt_was_read(running.read)
        reading = [
            running for index, running in enumerate(reading) if not _is_being_read(running, reading[:index])
        ]
        if reading and self._reads_alone(ready, reading):
            reading[0].started = True
            reading[0].read += self._target.read_chunk(reading[0].prompt, reading[0].place)
            reading[0].tell_progress()
            return None
        missing = self._readable(reading, self._target.max_nodes - min(len(ready), self._limits.sequences))
        limits = self._limits_with(len(ready), missing)
        plan = plan_pass(len(ready), missing, limits)
        self._extended = ready[: plan.extended]
        self._read = [running for running, size in zip(reading, plan.chunks, strict=True) if size]
        chunks = [_chunk(running, size) for running, size in zip(reading, plan.chunks, strict=True) if size]
        return Batch([running.answer.sequence for running in self._extended], chunks, limits.rows)

    def _readable(self, reading: Sequence[_InFlight], logits: int) -> list[int]:
        """The number of tokens of each prompt that the next pass can read.

        Args:
            logits: rows of logits that it can give for prompts.
        """
        sizes = []
        for running in reading:
            sizes.append(size := running.readable(logits))
            logits -= len(_chunk_of(running, size).scored)
        return sizes

    def passed(self, records: Sequence[PassRecord], batch: Batch) -> Generator[Event, None, None]:
        """Take note of the pass over the latest batch, and yield what it adds to each answer.

        Args:
            records: one for each sequence that was extended.
        """
        for running in self._read:
            running.tell_progress()
        if records:
            rows = sum(record.nodes for record in records) + batch.other_rows
            self._prefill_limiter.passed(rows, records[0].verify_s)
        extended = self._extended
        self._extended = self._read = []  # an answer that ends now is not kept until the next pass
        for running, record in zip(extended, records, strict=True):
            yield from self._add(running, record)

    def write_state(self) -> bool:
        """Write a block of the state of a finished sequence, where states are kept; False if all are written.

        While nothing is answered, the drafter's are written too.
        """
        return self._store_a_block() or (self.is_idle and self._store_a_drafted_block())

    def write_all(self) -> None:
        """Write the states of all sequences, finished or not: everything has been stopped."""
        if not self._target.closed:
            self._storing |= {
                running.place: self._target.storing(running.place) for running in self._in_flight
            }
            while self._store_a_block():
                pass

    def close(self) -> list[tuple[Request, AnswerInProgress]]:
        """Give all cells back, and remove what was set aside; returns what was not finished."""
        unfinished = [*self._in_flight, *self._waiting]
        self._forget_everything()
        return [(running.request, running.answer) for running in unfinished]

    def _admit(self) -> Generator[Event, None, None]:
        """Resume waiting sequences and start new ones while there is room."""
        while self._waiting:
            first = self._waiting[0]
            tokens = first.answer.sequence.tokens
            if not self._has_room(len(tokens), tokens, first.scores, left=first.answer.left):
                return
            self._open(self._waiting.popleft())
        while len(self._in_flight) < self._limits.sequences:
            if not self._has_room(self._target.max_nodes):
                return
            request = self._source.pop()
            if request is None:
                return
            try:
                running = _InFlight(request, self._begin(request))
                if request.on_accept is not None:
                    running.answer.sequence.on_accept = request.on_accept
            except Exception as error:  # a bug, too: the target has no part in how an answer begins
                yield Event(request, error=error)
                continue
            running.answer.sequence.traced = request.traced
            left = running.answer.left
            if not self._has_room(len(running.prompt), running.prompt, running.scores, left=left):
                self._waiting.append(running)
                return
            self._open(running)

    def _has_room(
        self,
        wanted: int,
        tokens: Sequence[int] = (),
        scores: PromptScores | None = None,
        *,
        left: int = 0,
    ) -> bool:
        """True if another sequence may begin, after forgetting finished ones if need be.

        Args:
            wanted: cells that it needs if it shares none.
            tokens: its prompt, of which it shares what another sequence has in the cache.
            scores: of the prompt, if they are wanted.
            left: tokens that it may get; 0 if it is not known yet.
        """
        others = [running.answer.left for running in self._in_flight]
        while True:
            source, shared = self._target.longest_prefix(tokens or [], scores=scores)
            if not self._target.cache.ordered:
                shared = 0  # cells in use are counted for each sequence there
            if self._cells.admits(self._held, wanted - shared, [left, *others]):
                return True
            if not self._forget_finished(last=source):
                return False

    @property
    def _held(self) -> int:
        """Cells in use, and those that prompts will take."""
        return self._target.n_live + sum(max(running.answer.missing, 0) for running in self._in_flight)

    def _forget_finished(self, last: CachedSequence | None = None) -> bool:
        """Give up the least recent of the finished sequences; False if there is none.

        Args:
            last: the one that is given up after all others.
        """
        own = self._target.own
        finished = list(self._idle)
        if own.tokens and all(running.place is not own for running in self._in_flight):
            finished.insert(0, own)
        if not finished:
            return False
        self._forget(next((running for running in finished if running is not last), finished[0]))
        return True

    def _forget(self, cached: CachedSequence) -> None:
        """Give up a finished sequence, whose state is written first."""
        for _ in self._storing.pop(cached, ()):
            pass
        if cached is self._target.own:
            self._target.rewind(0)
        else:
            self._idle.remove(cached)
            self._target.close_sequence(cached)

    def _store_a_block(self) -> bool:
        """Write a block of a finished sequence's state; False if all are written."""
        while self._storing:
            cached = next(iter(self._storing))
            if next(self._storing[cached], _DONE) is not _DONE:
                return True
            del self._storing[cached]
        return False

    def _store_a_drafted_block(self) -> bool:
        """Write a block of the drafter's state of a finished sequence; False if all are written."""
        while self._drafted:
            if self._drafter.store_block(self._drafted[0]):
                return True
            self._drafted.popleft()
        return False

    def _open(self, running: _InFlight) -> None:
        """Give a sequence its place in the cache, with what is known of it already."""
        tokens, scores = running.prompt, running.scores
        if self._target.max_sequences == 1:  # the sequence that it takes the place of is still to be written
            while self._store_a_block():
                pass
        cached = self._target.open_sequence(tokens, scores)
        running.answer.sequence.cached = cached
        self._in_flight.append(running)
        while self._cells.overflows(self._held):  # only now, as it may share cells of a finished sequence
            if not self._forget_finished():
                break
        self._target.recall(tokens if scores is None else tokens[: scores.covered], cached, running.state)
        running.discard_state()
        running.started = False
        running.to_read = max(running.answer.missing, 0)

    def _reads_alone(self, ready: Sequence[_InFlight], reading: Sequence[_InFlight]) -> bool:
        """True if the oldest prompt that is being read gets the next pass to itself, in the longest piece."""
        if self._target.max_sequences == 1:
            return not ready
        if not self._streamed or reading[0].answer.missing <= self._limits.rows:
            return False
        # Pieces of a length that shared passes may have are tried alone, once.
        return self._target.must_try(reading[0].answer.missing) or not (ready or reading[1:])

    @property
    def _streamed(self) -> bool:
        return self._target.model.weights.streamed_bytes > 0

    def _limits_with(self, ready: int, unread: Sequence[int]) -> PassLimits:
        """Limits of the next pass.

        Only where weights are streamed does it matter into how many pieces prompts are cut. They are then
        read in pieces as large as possible, but so that a sequence that is being answered waits no more than
        twice as long for its next token.

        Args:
            ready: sequences that are being answered.
            unread: tokens of each prompt that is being read.
        """
        if not (self._streamed and unread):
            return self._limits
        wanted = min(ready, self._limits.sequences) + sum(unread)
        if ready:
            wanted = min(wanted, self._prefill_limiter.rows)
        return replace(self._limits, rows=max(self._limits.rows, self._target.shared_rows(wanted)))

    def _share_prefixes(self) -> None:
        """Share prefixes that others have prefilled with sequences that have read nothing yet."""
        for running in self._in_flight:
            if not running.started and running.answer.missing > 0:
                known = len(running.place.tokens)
                prompt, scores = running.prompt, running.scores
                if self._target.longest_prefix(prompt, running.place, scores)[1] > known:
                    self._target.close_sequence(running.place)
                    running.answer.sequence.cached = self._target.open_sequence(prompt, scores)
                    running.to_read = max(running.answer.missing, 0)

    def _add(self, running: _InFlight, record: PassRecord) -> Generator[Event, None, None]:
        answer, chunk, error = running.answer, None, running.answer.sequence.error
        if error is None:
            try:
                chunk = answer.add(record)
                if answer.sequence.traced:
                    vocabulary = self._target.model.vocabulary
                    chunk = replace(chunk, tree=answer.sequence.pass_tree(record.nodes, vocabulary))
            except Exception as bug:  # in how its text is read
                error = bug
        if error is not None:
            self._close(running, "error")
            yield Event(running.request, error=error)
            return
        yield Event(running.request, chunk)
        if answer.builder.ended or answer.is_full:
            yield Event(running.request, self._close(running, "length"))

    def _drop_cancelled(self) -> Generator[Event, None, None]:
        for running in [running for running in self._in_flight if running.request.cancelled]:
            yield Event(running.request, self._close(running, "cancelled"))
        for running in [running for running in self._waiting if running.request.cancelled]:
            self._waiting.remove(running)
            running.discard_state()
            yield Event(running.request, self._finish(running.answer, "cancelled"))

    def _close(self, running: _InFlight, reason: FinishReason) -> Chunk:
        """End an answer; its sequence stays in the cache until the room is needed."""
        cached = running.place
        last = self._finish(running.answer, reason)
        self._in_flight.remove(running)
        running.answer.sequence.cached = None
        if running.scores is None:  # scored prompts hardly come again, and their scores are not stored
            self._storing[cached] = self._target.storing(cached)
            self._drafted.append(list(cached.tokens))
        if cached is not self._target.own:
            self._idle.append(cached)
        if len(self._idle) > self._most_idle:
            self._forget(self._idle[0])
        return last

    def _make_room(self) -> None:
        """Forget finished sequences, and set the youngest aside, until the next pass will find free cells."""
        while self._cells.overflows(self._target.n_live):
            if self._forget_finished():
                continue
            if len(self._in_flight) < 2:
                return
            self._set_aside(self._in_flight[-1])

    def _set_aside(self, running: _InFlight) -> None:
        """Move a sequence's state to disk until there is room for it again."""
        running.state = self._target.set_aside(running.place, CacheKind.PROMPTS.folder)
        running.answer.sequence.cached = None
        self._in_flight.remove(running)
        self._waiting.appendleft(running)

    def _forget_everything(self) -> None:
        """Give all cells back, and remove what was set aside."""
        for running in self._waiting:
            running.discard_state()
        if not self._target.closed:
            for cached in tuple(self._target.sequences):
                self._target.close_sequence(cached)
        for running in self._in_flight:
            running.answer.sequence.cached = None
        self._in_flight, self._idle, self._waiting = [], deque(), deque()
        self._storing.clear()


def _most_rows(target: Target) -> int:
    """The maximum number of rows in a shared pass."""
    if target.rule is None:
        # Larger passes take other kernels, so their sequences would differ more; and they are hardly faster.
        return min(MOST_PADDED_ROWS, target.context.n_rows)
    # In memory every row takes time, in which the other sequences wait for those of a prompt.
    usual = _STREAMED_ROWS if target.model.weights.streamed_bytes else USUAL_NODES
    return min(target.rule.maximum, target.context.n_rows, max(usual, target.max_nodes))


def _is_being_read(running: _InFlight, others: Sequence[_InFlight]) -> bool:
    """True if an earlier sequence is about to read what this one needs next; its cells are then shared."""
    if running.started:
        return False
    known = len(running.place.tokens)
    for other in others:
        prefix = common_prefix(other.prompt, running.prompt)
        if running.scores is not None:
            prefix = running.scores.will_share(other.scores, prefix)
        if prefix >= known + _SHARED_PREFIX:
            return True
    return False


def _chunk(running: _InFlight, size: int) -> PromptChunk:
    running.started = True
    running.read += size
    return _chunk_of(running, size)


def _chunk_of(running: _InFlight, size: int) -> PromptChunk:
    """The next tokens of a prompt."""
    start = len(running.place.tokens)
    return PromptChunk(running.place, running.prompt[start : start + size])
