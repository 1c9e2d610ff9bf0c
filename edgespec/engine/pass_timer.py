"""The times of the parts of a pass, from which its record is made."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from edgespec.engine.drafting import Drafts
from edgespec.engine.sequence import Batch
from edgespec.engine.target import Target, TargetPass
from edgespec.generation.result import PassRecord

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
