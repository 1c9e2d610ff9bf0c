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
from dataclasses import dataclass, field, replace
from typing import Protocol

from edgespec.engine.target import CachedText, PromptChunk, TargetPass, TextTree, Verified
from edgespec.errors import EdgeSpecError
from edgespec.generation.result import PassRecord
from edgespec.speculation.drafters.base import Drafter, Source
from edgespec.speculation.methods import Method
from edgespec.speculation.sizing import AdaptiveSizer, FixedSizer
from edgespec.speculation.tree import TokenTree
from edgespec.speculation.verification.base import Acceptance, DraftedTree

Sizer = FixedSizer | AdaptiveSizer


class TreeVerifier(Protocol):
    """The part of a target that the loop uses; see `engine.target.Target`."""

    def verify(self, trees: Sequence[TextTree], chunks: Sequence[PromptChunk] = ()) -> TargetPass: ...
    def commit(self, trees: Sequence[TextTree], paths: Sequence[Sequence[int]]) -> None: ...


@dataclass
class DecodingText:
    """A text that is being extended.

    Attributes:
        tokens: the text so far; accepted tokens are appended. The target's cache holds all but the last one,
            which becomes the root of the next tree.
        method: how its tokens are drafted and accepted.
        end: most tokens that it may have.
        sizer: decides how large its trees are.
        cached: where the target caches it; None for the target's own text.
        last_round: its latest tree with drafted tokens, and what was accepted of it.
        error: what went wrong with this text alone in its latest round.
        traced: note who proposes its tokens.
        sources: who proposed the nodes of its latest tree below the root, if it is traced.
    """

    tokens: list[int]
    method: Method
    end: int
    sizer: Sizer
    cached: CachedText | None = None
    last_round: tuple[TokenTree, Acceptance] | None = None
    error: EdgeSpecError | None = None
    traced: bool = False
    sources: list[Source] = field(default_factory=list)


class Loop:
    """Extends texts with one target and one drafter.

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

    def next_pass(self, text: DecodingText) -> PassRecord:
        """Extend one text by a pass of its own.

        Raises:
            EdgeSpecError: the choice of the text's tokens failed; the text is as it was.
        """
        (record,) = self.round([text])
        if text.error is not None:
            raise text.error
        return record

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
        decoding = DecodingText(text, method, len(text) + max_tokens, sizer or self.sizer)
        while len(text) < decoding.end:
            yield self.next_pass(decoding)

    def round(self, texts: Sequence[DecodingText], chunks: Sequence[PromptChunk] = ()) -> list[PassRecord]:
        """One pass: each text is extended, and chunks of prompts are read with them.

        Several texts fill the rows of a pass with tokens that are certain to be wanted, so trees are grown
        for a single text only. If the choice of a text's tokens fails, its `error` says why, nothing of its
        tree is kept, and the others go on.

        Returns:
            A record for each text. All have the times of the whole pass.
        """
        start = time.perf_counter()
        alone = len(texts) == 1 and not chunks
        drafted = [self._draft(text, alone=alone) for text in texts]

        draft_end = time.perf_counter()
        for text, d in zip(texts, drafted, strict=True):
            if text.traced:
                text.sources = self.drafter.sources(d.tree)
        trees = [TextTree(text.tokens, d.tree, text.cached) for text, d in zip(texts, drafted, strict=True)]
        result = self._target.verify(trees, chunks)

        verify_end = time.perf_counter()
        paths = [
            self._accept(text, d, verified, learns=alone)
            for text, d, verified in zip(texts, drafted, result.verified, strict=True)
        ]
        self._target.commit(trees, paths)
        accept_end = time.perf_counter()
        records = []
        for text, d, path in zip(texts, drafted, paths, strict=True):
            record = PassRecord(
                nodes=len(d.tree),
                accepted=max(len(path) - 1, 0),
                promised=d.tree.expected_accepted,
                draft_s=draft_end - start,
                verify_s=verify_end - draft_end,
                accept_s=accept_end - verify_end,
                wait_s=result.waited_s,
                draft_steps=self.drafter.steps if alone else 0,
                draft_rows=self.drafter.rows if alone else 0,
            )
            records.append(record)
            if alone:
                text.sizer.record(record)
                if record.nodes == 1:
                    self.plain_s = min(record.seconds, 1.05 * (self.plain_s or math.inf))
        return records

    def _draft(self, text: DecodingText, *, alone: bool) -> DraftedTree:
        if not alone:
            return DraftedTree(TokenTree.root_only(text.tokens[-1]))
        limits = text.sizer.limits()
        # The bonus token follows the path, so the path may be at most one shorter than what is left.
        limits = replace(limits, depth=min(limits.depth, text.end - len(text.tokens) - 1))
        return text.method.drafting.draft(self.drafter, text.tokens, limits)

    def _accept(
        self, text: DecodingText, drafted: DraftedTree, verified: Verified, *, learns: bool
    ) -> Sequence[int]:
        """The accepted path; the accepted tokens and the bonus token are appended to the text."""
        length = len(text.tokens)
        try:
            accepted = text.method.accept(drafted, verified.logits, text.tokens)
        except EdgeSpecError as error:
            del text.tokens[length:]
            text.error = error
            return ()
        if learns:
            self.drafter.learn(text.tokens)
        if len(drafted.tree) > 1:
            self.last_round = text.last_round = drafted.tree, accepted
        return accepted.path
