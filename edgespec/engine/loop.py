"""The loop: draft, verify, accept, commit.

A pass of the target is expensive, and takes about as long for a whole tree of tokens as for one. So a drafter
guesses how the text continues, as a tree; the target reads the tree in one pass; the path that it agrees with
is accepted, together with the target's own choice after it. Decoding without a drafter is the same loop with
trees of one node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from edgespec.engine.target import TargetPass, TextTree
from edgespec.generation.result import PassRecord
from edgespec.speculation.drafters.base import Drafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import Method
from edgespec.speculation.sizing import AdaptiveSizer, FixedSizer
from edgespec.speculation.tree import TokenTree
from edgespec.speculation.verification.base import Acceptance

Sizer = FixedSizer | AdaptiveSizer


class TreeVerifier(Protocol):
    """The part of a target that the loop uses; see `engine.target.Target`."""

    def verify(self, trees: Sequence[TextTree]) -> TargetPass: ...
    def commit(self, trees: Sequence[TextTree], paths: Sequence[Sequence[int]]) -> None: ...


class Loop:
    """Extends a text with one target and one drafter.

    Attributes:
        drafter: grows the trees.
        sizer: decides how large they are.
        plain_s: seconds of a pass over a single row, as measured lately; 0 if unknown.
        last_round: the latest tree with drafted tokens, and what was accepted of it.
    """

    def __init__(self, target: TreeVerifier, drafter: Drafter, sizer: Sizer, plain_s: float = 0.0) -> None:
        self._target = target
        self.drafter = drafter
        self.sizer = sizer
        self.plain_s = plain_s
        self.last_round: tuple[TokenTree, Acceptance] | None = None

    def passes(
        self, text: list[int], method: Method, max_tokens: int, sizer: Sizer | None = None
    ) -> Iterator[PassRecord]:
        """Append accepted tokens to `text`, and yield a record of each pass.

        The target's cache must hold all of `text` except its last token, which becomes the root of the first
        tree.

        Args:
            max_tokens: most tokens to append.
            sizer: sizes the trees of this text, instead of the loop's own.
        """
        sizer = sizer or self.sizer
        end = len(text) + max_tokens
        while len(text) < end:
            limits = sizer.limits()
            # The bonus token follows the path, so the path may be at most one shorter than what is left.
            limits = replace(limits, depth=min(limits.depth, end - len(text) - 1))
            record = self._pass(text, limits, method)
            sizer.record(record)
            if record.nodes == 1:
                self.plain_s = min(record.seconds, 1.05 * (self.plain_s or math.inf))
            yield record

    def _pass(self, text: list[int], limits: TreeLimits, method: Method) -> PassRecord:
        start = time.perf_counter()
        drafted = method.drafting.draft(self.drafter, text, limits)
        tree = drafted.tree

        draft_end = time.perf_counter()
        trees = [TextTree(text, tree)]
        result = self._target.verify(trees)

        verify_end = time.perf_counter()
        accepted = method.accept(drafted, result.verified[0].logits, text)
        self.drafter.learn(text)
        self._target.commit(trees, [accepted.path])
        if len(tree) > 1:
            self.last_round = tree, accepted
        return PassRecord(
            nodes=len(tree),
            accepted=len(accepted.path) - 1,
            promised=tree.expected_accepted,
            draft_s=draft_end - start,
            verify_s=verify_end - draft_end,
            accept_s=time.perf_counter() - verify_end,
            wait_s=result.waited_s,
            draft_steps=self.drafter.steps,
            draft_rows=self.drafter.rows,
        )
