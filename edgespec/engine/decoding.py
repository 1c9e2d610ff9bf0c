"""The loop: sequences are extended pass by pass, from the end of their prompts to the end of their answers.

A pass of the target is expensive, and takes about as long for a whole tree of tokens as for one. So a drafter
guesses how sequences continue, each as a tree; the target reads all trees in one pass; the path that it
agrees with is accepted, together with the target's own choice after it. That is `Decoder.step`. Decoding
without a drafter is the same with trees of one node, and a single answer is a batch of one sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from edgespec.engine.access import ExclusiveAccess
from edgespec.engine.drafting import Drafts, Speculator, most_unread
from edgespec.engine.sequence import Batch, TextSequence
from edgespec.engine.target import Target, TargetPass
from edgespec.engine.turn import SavedStates, Turn
from edgespec.generation.result import Chunk, FinishReason, PassRecord
from edgespec.llama.runtime.abort import AbortFlag, DecodeAborted
from edgespec.speculation.spliced import SplicedText

Part = Literal["draft", "verify", "accept"]


class PassTimer:
    """Times the parts of one pass: each runs in the context `part`.

    Attributes:
        observed_s: seconds that the drafter looked at the pass.
    """

    def __init__(self, batch: Batch, target: Target) -> None:
        self._batch = batch
        self._target = target
        self.observed_s = 0.0
        self._seconds: dict[Part, float] = {}
        self._read_s: dict[Part, float] = {}
        self._prompt_rows = batch.prompt_rows  # of the sequences before the pass

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """A context in which a part of the pass runs."""
        start, read_s = time.perf_counter(), self._target.reading_s
        yield
        self._seconds[name] = time.perf_counter() - start
        self._read_s[name] = self._target.reading_s - read_s

    def seconds(self, name: Part) -> float:
        """Seconds that a part took."""
        return self._seconds[name]

    def records(
        self, drafts: Drafts, result: TargetPass, paths: Sequence[Sequence[int]]
    ) -> tuple[PassRecord, list[PassRecord]]:
        """The record of the whole pass, and one for each of its sequences.

        Args:
            paths: the accepted path of each tree.
        """
        trees = [draft.tree for draft in drafts.trees]
        whole = PassRecord(
            nodes=sum(map(len, trees)),
            accepted=sum(max(len(path) - 1, 0) for path in paths),
            expected_accepted=sum(tree.expected_accepted for tree in trees),
            draft_s=self._seconds["draft"],
            verify_s=self._seconds["verify"],
            accept_s=self._seconds["accept"],
            wait_s=result.waited_s,
            setup_s=result.setup_s,
            draft_read_s=self._read_s["draft"],
            experts=result.experts,
            draft_steps=drafts.steps,
            draft_rows=drafts.rows,
            draft_text_s=drafts.text_s,
            observe_s=self.observed_s,
            prompt_rows=self._prompt_rows,
            shared=len(self._batch.sequences) + len(self._batch.chunks) > 1,
        )
        if len(trees) == 1:
            return whole, [whole]
        experts = whole.experts.divided(len(trees)) if whole.experts and trees else [None] * len(trees)
        return whole, [
            replace(
                whole,
                nodes=len(tree),
                accepted=max(len(path) - 1, 0),
                expected_accepted=tree.expected_accepted,
                experts=share,
            )
            for tree, path, share in zip(trees, paths, experts, strict=True)
        ]


class Decoder:
    """Extends sequences by passes of a target, and ends their answers.

    Args:
        abort: ends a pass from outside.
    """

    def __init__(
        self, target: Target, speculator: Speculator, access: ExclusiveAccess, abort: AbortFlag
    ) -> None:
        self._target = target
        self._speculator = speculator
        self._access = access
        self._abort = abort

    def step(self, batch: Batch) -> list[PassRecord]:
        """Run a pass over a batch: draft, verify, accept, commit.

        Each sequence is extended, and the chunks of prompts are read. If the choice of a sequence's tokens
        fails, its `error` says why, nothing of its tree is kept, and the others are extended.

        Returns:
            A record for each sequence. All have the times of the whole pass, and divide its experts.

        Raises:
            DecodeAborted: stopped from outside; the sequences are unchanged.
        """
        timer = PassTimer(batch, self._target)
        with timer.part("draft"):
            drafts = self._speculator.draft(batch)
            trees = batch.trees(drafts.trees)
        with timer.part("verify"):
            result = self._target.verify(trees, batch.chunks)
        with timer.part("accept"):
            timer.observed_s = self._speculator.observe(batch, drafts, result.logits, timer.seconds("verify"))
            paths = batch.accept(drafts.trees, result.logits)
            self._speculator.learn_choices(batch, drafts)
            self._target.commit(trees, paths)
        whole, records = timer.records(drafts, result, paths)
        self._speculator.learn_times(batch, whole)
        return records

    def answer(
        self, sequence: TextSequence, turn: Turn, on_prefill: Callable[[int, int], None] | None
    ) -> Generator[Chunk, None, None]:
        """Read a prompt that has the target to itself, then extend it pass by pass until the answer ends."""
        answer, states, prompt = sequence.answer, turn.states, list(sequence.tokens)
        sequence.store = states.target if states is not None else None
        self._speculator.last_round = None
        reason: FinishReason = "cancelled"
        try:
            with self._access.held():
                if self._abort.is_set:  # cancelled before it began
                    raise DecodeAborted
                self._read(sequence, on_prefill)
                self._access.check()  # the progress callback may have closed the engine
                if states is not None:
                    self._speculator.drafter.recall(sequence.text, states.drafter)
            while not sequence.is_full:
                with self._access.held():
                    (record,) = self.step(Batch([sequence]))
                    if sequence.error is not None:
                        raise sequence.error
                    chunk = sequence.add(record, self._target.model.vocabulary)
                    assert chunk.record is not None
                    self._speculator.learn_tree(sequence, record, chunk.record.accepted)
                yield chunk
                if answer.builder.ended or self._abort.is_set:
                    break
            else:
                reason = "length"
        except DecodeAborted:
            pass
        except Exception:  # a bug, too
            reason = "error"
            raise
        finally:
            with self._access.held_for_cleanup() as is_open:
                last = self.finish(sequence, reason)
                if answer.generation.passes and reason != "error":
                    turn.on_end(answer.generation)
                    if is_open and states is not None and not states.closed:
                        self.save([*prompt, *answer.generation.tokens], states)
        if answer.generation.finish_reason == "cancelled":
            self._access.check()
        yield last

    def _read(self, sequence: TextSequence, on_prefill: Callable[[int, int], None] | None) -> None:
        """Read a prompt, up to what the pass of the first tree reads with it."""
        max_unread = most_unread(sequence, self._target, self._speculator.drafter)
        length = len(sequence.tokens) - 1
        try:
            sequence.unread = self._target.prefill(sequence, on_progress=on_prefill, max_unread=max_unread)
        finally:
            sequence.answer.prompt_was_read(length - self._target.recalled)

    def finish(self, sequence: TextSequence, reason: FinishReason) -> Chunk:
        """End an answer, and its sequence in the cache where plain decoding would have."""
        answer = sequence.answer
        answer.generation.plain_pass_s = self._speculator.plain_passes.of(answer.generation.passes)
        try:
            last = answer.finish(reason)
            with self._access.held_for_cleanup() as is_open:
                if is_open and sequence.cache is not None:
                    self._target.truncate_to(sequence, answer.final_length)
            return last
        finally:
            sequence.finish()
            self._speculator.policy.save()

    def save(self, tokens: Sequence[int], states: SavedStates) -> None:
        """Save what the caches have of a conversation; drafters read its text alone."""
        if self._target.save_state(states.target, tokens):
            self._speculator.drafter.save(SplicedText(tokens), states.drafter)
