"""The scheduler: which sequences the next pass extends, and which prompts it reads beside them.

Sequences join and leave between passes (continuous batching).

A sequence's tokens are the same, bit for bit, in any company: its rows attend to its own cells only, a row
rule keeps the number of rows from choosing the kernels, and its random numbers come from its own seed. So
sequences are scheduled by speed alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from edgespec.engine.drafting import most_unread
from edgespec.engine.pass_plan import CellBudget, PassLimits, PrefillLimiter, plan_pass
from edgespec.engine.requests import Event, Request, RequestSource
from edgespec.engine.sequence import Batch, PromptChunk, Status, TextSequence
from edgespec.engine.target import Target
from edgespec.files.cache_kind import CacheKind
from edgespec.generation.result import Chunk, FinishReason, PassRecord
from edgespec.llama.row_rule import MAX_PADDED_ROWS
from edgespec.llama.runtime.abort import AbortFlag, DecodeAborted
from edgespec.models.gguf.footprint import USUAL_NODES
from edgespec.speculation.drafters.base import Drafter

_STREAMED_ROWS = 128  # of a shared pass that reads weights: more take long while a prompt is read
_SHARED_PREFIX = 16  # tokens that are worth waiting for while another sequence reads them
_MAX_DRAFTED = 16  # sequences whose states in the drafter's cache wait to be written
_DONE = object()


class Scheduler:
    """Answers the requests of a source in shared passes, as many at once as fit.

    Args:
        step: runs a pass over a batch, and returns a record for each of its sequences.
        abort: stops everything.
        begin: starts an answer: encodes the prompt, checks it, and sets up its method.
        finish: ends the answer of a sequence.
        max_sequences: maximum number of answers at once.
        on_pass: called with the records of each pass that extended sequences; None if nobody asks.

    Attributes:
        is_idle: there is nothing to do until another request comes.
        is_done: everything was stopped.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        source: RequestSource,
        abort: AbortFlag,
        *,
        step: Callable[[Batch], Sequence[PassRecord]],
        begin: Callable[[Request], TextSequence],
        finish: Callable[[TextSequence, FinishReason], Chunk],
        max_sequences: int,
        on_pass: Callable[[Sequence[PassRecord]], None] | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._source = source
        self._abort = abort
        self._step = step
        self._begin = begin
        self._finish = finish
        self._on_pass = on_pass
        sequences = min(max_sequences, target.max_sequences - 1, target.max_nodes)
        self._limits = PassLimits(max(sequences, 1), _most_rows(target))
        self._prefill_limiter = PrefillLimiter(self._limits.rows)
        self._most_idle = max(target.max_sequences - 1 - self._limits.sequences, 0)
        self._cells = CellBudget(target.context.n_cells, spare=4 * target.max_nodes)
        self.is_idle = self.is_done = False
        self._events: deque[Event] = deque()
        self._in_flight: list[TextSequence] = []
        self._waiting: deque[TextSequence] = deque()
        self._idle: deque[TextSequence] = deque()  # finished, kept for requests that begin alike
        self._read_image = False  # in the last pass
        self._storing: dict[TextSequence, Iterator[None]] = {}  # what is left to be written of sequences
        self._drafted: deque[Sequence[int]] = deque(maxlen=_MAX_DRAFTED)  # finished, not yet written

    def advance(self) -> deque[Event]:
        """Run a pass, or let requests begin or end, and return what that adds to each answer.

        When everything is stopped, what is being answered ends as cancelled.
        """
        self.is_idle = False
        try:
            self._abort.check()
            self._join_and_leave()
            if self._in_flight:
                if not self._events:
                    self._pass()
                    self._write_state()
            else:
                self.is_idle = not self._write_state()
        except DecodeAborted:
            self._cancel()
        return self._events

    def _cancel(self) -> None:
        self._write_all()
        unfinished = [*self._in_flight, *self._waiting]
        self.close()
        for sequence in unfinished:
            self._end(sequence, "cancelled")
        self.is_done = True

    def _pass(self) -> None:
        """Run a pass; nothing of it is kept afterwards."""
        batch = self._schedule()
        if batch is None:
            return
        records = self._step(batch)
        if records and self._on_pass is not None:
            self._on_pass(records)
        for chunk in batch.chunks:
            chunk.sequence.tell_progress()
        if records:
            rows = sum(record.nodes for record in records) + records[0].prompt_rows + batch.chunk_rows
            self._prefill_limiter.passed(rows, records[0].verify_s)
        for sequence, record in zip(batch.sequences, records, strict=True):
            self._add(sequence, record)

    def _join_and_leave(self) -> None:
        """End what was cancelled, and let waiting and new requests begin, as long as there is room."""
        self._drop_cancelled()
        while True:
            self._admit()
            self._share_prefixes()
            read = [s for s in self._in_flight if s.status is Status.RUNNING and s.is_full]
            if not read:
                return
            for sequence in read:
                _note_read(sequence)
                self._close(sequence, "length")

    def _schedule(self) -> Batch | None:
        """The batch of the next pass; None if that pass went to a long prompt alone, which it has read."""
        self._make_room()
        ready = [sequence for sequence in self._in_flight if sequence.status is Status.RUNNING]
        reading = [sequence for sequence in self._in_flight if sequence.status is Status.READING]
        for sequence in ready:
            _note_read(sequence)
        reading = [
            sequence
            for index, sequence in enumerate(reading)
            if not _is_being_read(sequence, reading[:index])
        ]
        if (batch := self._first_pass_alone()) is not None:
            return batch
        if (alone := self._reads_alone(ready, reading)) is not None:
            self._read_alone(alone, len(ready))
            return None
        missing = self._readable(reading, self._target.max_nodes - min(len(ready), self._limits.sequences))
        limits = self._limits_with(len(ready), missing)
        plan = plan_pass(len(ready), missing, limits)
        chunks = [_chunk(sequence, size) for sequence, size in zip(reading, plan.chunks, strict=True) if size]
        return Batch(ready[: plan.extended], chunks, limits.rows)

    def _readable(self, reading: Sequence[TextSequence], logits: int) -> list[int]:
        """The number of tokens of each prompt that the next pass can read.

        Args:
            logits: rows of logits that it can give for prompts.
        """
        sizes = []
        for sequence in reading:
            sizes.append(size := sequence.readable(logits))
            logits -= len(PromptChunk.next_of(sequence, size).scored)
        return sizes

    def _write_state(self) -> bool:
        """Write a block of the state of a finished sequence, where states are kept; False if all are written.

        While nothing is answered, the drafter's are written too.
        """
        return self._store_a_block() or (not self._in_flight and self._store_a_drafted_block())

    def _write_all(self) -> None:
        """Write the states of all sequences, finished or not: everything has been stopped."""
        if not self._target.closed:
            self._storing |= {sequence: self._target.storing(sequence) for sequence in self._in_flight}
            while self._store_a_block():
                pass

    def _admit(self) -> None:
        """Resume waiting sequences and start new ones while there is room."""
        while self._waiting:
            if not self._has_room(self._waiting[0]):
                return
            self._open(self._waiting.popleft())
        while len(self._in_flight) < self._limits.sequences:
            if not self._has_room(None):
                return
            request = self._source.pop()
            if request is None:
                return
            try:
                sequence = self._begin(request)
            except DecodeAborted:  # everything is stopped while an image is read
                self._events.append(Event(request, Chunk.cancelled()))
                return
            except Exception as error:  # a bug, too: the target has no part in how an answer begins
                self._events.append(Event(request, error=error))
                continue
            if not self._has_room(sequence):
                self._waiting.append(sequence)
                return
            self._open(sequence)

    def _has_room(self, wanted: TextSequence | None) -> bool:
        """True if another sequence may begin, after forgetting finished ones if need be.

        Args:
            wanted: the sequence; None if it is not known yet.
        """
        left = [0 if wanted is None else wanted.left, *(sequence.left for sequence in self._in_flight)]
        while True:
            cells, source = self._target.max_nodes, None
            if wanted is not None:
                source, shared = self._target.longest_prefix(wanted)
                # Where cells are not ordered, those in use are counted for each sequence.
                cells = len(wanted.tokens) - 1 - (shared if self._target.cache.ordered else 0)
            if self._cells.admits(self._held, cells, left):
                return True
            if not self._forget_finished(last=source):
                return False

    @property
    def _held(self) -> int:
        """Cells in use, and those that prompts will take."""
        return self._target.n_live + sum(sequence.missing for sequence in self._in_flight)

    def _forget_finished(self, last: TextSequence | None = None) -> bool:
        """Give up the least recent of the finished sequences; False if there is none.

        Args:
            last: the one that is given up after all others.
        """
        own = self._target.own
        finished = list(self._idle)
        if own.status is Status.FINISHED and own.n_cached:
            finished.insert(0, own)
        if not finished:
            return False
        self._forget(next((sequence for sequence in finished if sequence is not last), finished[0]))
        return True

    def _forget(self, sequence: TextSequence) -> None:
        """Give up a finished sequence, whose state is written first."""
        for _ in self._storing.pop(sequence, ()):
            pass
        if sequence is self._target.own:
            self._target.rewind(0)
        else:
            self._idle.remove(sequence)
            self._target.close_sequence(sequence)

    def _store_a_block(self) -> bool:
        """Write a block of a finished sequence's state; False if all are written."""
        while self._storing:
            sequence = next(iter(self._storing))
            if next(self._storing[sequence], _DONE) is not _DONE:
                return True
            del self._storing[sequence]
        return False

    def _store_a_drafted_block(self) -> bool:
        """Write a block of the drafter's state of a finished sequence; False if all are written."""
        while self._drafted:
            if self._drafter.store_block(self._drafted[0]):
                return True
            self._drafted.popleft()
        return False

    def _open(self, sequence: TextSequence) -> None:
        """Give a sequence its place in the cache, with what is known of it already."""
        if self._target.max_sequences == 1:  # the sequence that it takes the place of is still to be written
            while self._store_a_block():
                pass
        self._target.open_sequence(sequence)
        self._in_flight.append(sequence)
        while self._cells.overflows(self._held):  # only now, as it may share cells of a finished sequence
            if not self._forget_finished():
                break
        self._target.recall(sequence, None if sequence.scores is None else sequence.scores.covered)
        sequence.discard_state()
        sequence.started = False
        sequence.to_read = sequence.missing

    def _first_pass_alone(self) -> Batch | None:
        """The only sequence, if the pass of its first tree can read the rest of its prompt; else None."""
        sequence, *others = self._in_flight
        unread, most = sequence.missing, most_unread(sequence, self._target, self._drafter)
        if others or not 0 < unread <= most or sequence.scores is not None:
            return None
        if sequence.next_image(sequence.n_cached) is not None:
            return None
        self._make_room(unread)
        sequence.started, sequence.unread = True, unread
        sequence.read += unread
        _note_read(sequence)
        return Batch([sequence])

    def _reads_alone(
        self, ready: Sequence[TextSequence], reading: Sequence[TextSequence]
    ) -> TextSequence | None:
        """The sequence whose prompt gets the next pass to itself; None if the pass is shared.

        An image is read alone. The oldest prompt is where that is faster, in the longest piece.
        """
        if not reading:
            return None
        if self._target.max_sequences == 1:
            return None if ready else reading[0]
        at_image = next(
            (each for each in reading if each.is_at_image or self._target.readable_together(each)), None
        )
        # Those that are being answered get every second pass at least.
        if at_image is not None and not (self._read_image and ready):
            self._read_image = True
            return at_image
        self._read_image = False
        missing = reading[0].missing_text
        if not self._streamed or missing <= self._limits.rows:
            return None
        # Pieces of a length that shared passes may have are tried alone, once.
        alone = self._target.must_try(missing) or not (ready or reading[1:])
        return reading[0] if alone else None

    def _read_alone(self, sequence: TextSequence, ready: int) -> None:
        """Read an image, alone or with what is around it, or the next piece of a prompt.

        While others are being answered, an image is read in parts of as many rows as a pass has for a text.

        Args:
            ready: sequences that are being answered.
        """
        rows = self._target.readable_together(sequence)
        image = sequence.next_image(sequence.n_cached) if sequence.is_at_image else None
        if image is not None:
            rows = max(rows, image.end - sequence.n_cached)
        most = None
        if rows and ready and self._target.divides_images(sequence):
            most = self._limits_with(ready, [rows]).rows
            rows = min(rows, most)
        self._make_room(
            rows or min(sequence.missing_text, self._target.prompt_rows)
        )  # the cells that it takes
        if sequence.cache is None:
            return
        sequence.started = True
        sequence.read += self._target.read_chunk(sequence, image_rows=most)
        sequence.tell_progress()

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
        wanted = min(wanted, self._target.context.n_cells - self._target.n_live)  # each row takes a cell
        return replace(self._limits, rows=max(self._limits.rows, self._target.shared_rows(wanted)))

    def _share_prefixes(self) -> None:
        """Share prefixes that others have prefilled with sequences that have read nothing yet."""
        for sequence in self._in_flight:
            if sequence.started or not sequence.missing:
                continue
            if self._target.longest_prefix(sequence)[1] > sequence.n_cached:
                self._target.close_sequence(sequence)
                self._target.open_sequence(sequence)
                sequence.to_read = sequence.missing

    def _add(self, sequence: TextSequence, record: PassRecord) -> None:
        """Add what a pass has appended to a sequence to its answer."""
        request, chunk, error = sequence.request, None, sequence.error
        assert request is not None
        if error is None:
            try:
                chunk = sequence.add(record, self._target.model.vocabulary)
            except Exception as bug:  # in how its text is read
                error = bug
        if error is not None:
            self._close(sequence, "error", error)
            return
        self._events.append(Event(request, chunk))
        if sequence.answer.builder.ended or sequence.is_full:
            self._close(sequence, "length")

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in self._in_flight if s.request is not None and s.request.cancelled]:
            self._close(sequence, "cancelled")
        for sequence in [s for s in self._waiting if s.request is not None and s.request.cancelled]:
            self._waiting.remove(sequence)
            self._end(sequence, "cancelled")

    def _close(self, sequence: TextSequence, reason: FinishReason, error: Exception | None = None) -> None:
        """End an answer; its sequence stays in the cache until the room is needed."""
        sequence.forget_part_of_image()
        self._end(sequence, reason, error)
        self._in_flight.remove(sequence)
        if sequence.scores is None:  # scored prompts hardly come again, and their scores are not stored
            self._storing[sequence] = self._target.storing(sequence)
            self._drafted.append(sequence.text)
        if sequence is not self._target.own:
            self._idle.append(sequence)
        if len(self._idle) > self._most_idle:
            self._forget(self._idle[0])

    def _end(self, sequence: TextSequence, reason: FinishReason, error: Exception | None = None) -> None:
        """End an answer, and say so."""
        request = sequence.request
        assert request is not None
        last = None
        try:
            last = self._finish(sequence, reason)
        except Exception as bug:  # in how its text is read
            error = error or bug
        self._events.append(Event(request, last if error is None else None, error))

    def _make_room(self, rows: int = 0) -> None:
        """Forget finished sequences, and set the youngest aside, until the next pass will find free cells.

        Args:
            rows: cells that it takes beside the usual ones.
        """
        while self._cells.overflows(self._target.n_live + rows):
            if self._forget_finished():
                continue
            if len(self._in_flight) < 2:
                return
            self._set_aside(self._in_flight[-1])

    def _set_aside(self, sequence: TextSequence) -> None:
        """Move a sequence's state to disk until there is room for it again."""
        self._target.set_aside(sequence, CacheKind.PROMPTS.folder)
        self._in_flight.remove(sequence)
        self._waiting.appendleft(sequence)

    def close(self) -> None:
        """Give all cells back, and remove what was set aside."""
        for sequence in self._waiting:
            sequence.discard_state()
        if not self._target.closed:
            for sequence in tuple(self._target.sequences):
                self._target.close_sequence(sequence)
        self._in_flight, self._idle, self._waiting = [], deque(), deque()
        self._storing.clear()


def _most_rows(target: Target) -> int:
    """The maximum number of rows in a shared pass."""
    if target.rule is None:
        # Larger passes take other kernels, so their sequences would differ more; and they are hardly faster.
        return min(MAX_PADDED_ROWS, target.context.n_rows)
    # In memory every row takes time, in which the other sequences wait for those of a prompt.
    usual = _STREAMED_ROWS if target.model.weights.streamed_bytes else USUAL_NODES
    return min(target.rule.maximum, target.context.n_rows, max(usual, target.max_nodes))


def _is_being_read(sequence: TextSequence, others: Sequence[TextSequence]) -> bool:
    """True if an earlier sequence is about to read what this one needs next; its cells are then shared."""
    if sequence.started:
        return False
    return any(sequence.will_share(other) >= sequence.n_cached + _SHARED_PREFIX for other in others)


def _note_read(sequence: TextSequence) -> None:
    """Note that a prompt was read."""
    sequence.answer.prompt_was_read(sequence.read)


def _chunk(sequence: TextSequence, size: int) -> PromptChunk:
    sequence.started = True
    sequence.read += size
    return PromptChunk.next_of(sequence, size)
