"""The loop: draft, verify, accept, commit.

A pass of the target is expensive, and takes about as long for a whole tree of tokens as for one. So a drafter
guesses how the text continues, as a tree; the target reads the tree in one pass; the path that it agrees with
is accepted, together with the target's own choice after it. Decoding without a drafter is the same loop with
trees of one node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from edgespec.engine.observing import Observing
from edgespec.engine.passes import CachedText, PromptChunk, TargetPass, TextTree, Verified
from edgespec.errors import EdgeSpecError
from edgespec.generation.decisions import Decisions
from edgespec.generation.result import PassRecord
from edgespec.speculation.drafters.base import Drafter, ProposedBy
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import Method
from edgespec.speculation.sizing.sizers import AdaptiveSizer, FixedSizer, PassRoom
from edgespec.speculation.tree import Acceptance, FloatArray, TokenTree
from edgespec.speculation.verification.base import DraftedTree

Sizer = FixedSizer | AdaptiveSizer


class TreeVerifier(Protocol):
    """The part of a target that the loop uses; see `engine.target.Target`."""

    max_nodes: int

    @property
    def most_unread(self) -> int: ...
    @property
    def reading_s(self) -> float: ...
    @property
    def n_free_leaves(self) -> int: ...
    @property
    def n_pending(self) -> int: ...
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
        unread: tokens before the last one that the target's cache lacks; the next pass reads them.
        last_round: its latest tree with drafted tokens, and what was accepted of it.
        error: what went wrong with this text alone in its latest round.
        traced: note who proposes its tokens.
        proposed_by: who proposed the nodes of its latest tree below the root, if it is traced.
        on_accept: called with the target's logits (nodes, n_vocab), the tree and what was accepted of it.
    """

    tokens: list[int]
    method: Method
    end: int
    sizer: Sizer
    cached: CachedText | None = None
    unread: int = 0
    last_round: tuple[TokenTree, Acceptance] | None = None
    error: EdgeSpecError | None = None
    traced: bool = False
    proposed_by: list[ProposedBy] = field(default_factory=list)
    on_accept: Callable[[FloatArray, TokenTree, Acceptance], None] | None = None

    def within(self, limits: TreeLimits) -> TreeLimits:
        """Limits of a tree that leaves room for the bonus token, which follows the accepted path."""
        return replace(limits, depth=min(limits.depth, self.end - len(self.tokens) - 1))


class Loop:
    """Extends texts with one target and one drafter.

    Attributes:
        drafter: grows the trees.
        sizer: decides how large they are.
        plain_s: seconds of a pass over a single row, as measured lately; 0 if unknown.
        last_round: the latest tree with drafted tokens, and what was accepted of it.
        decisions: which decisions are forced, instead of following from measured costs.
    """

    def __init__(self, target: TreeVerifier, drafter: Drafter, sizer: Sizer, plain_s: float = 0.0) -> None:
        self._target = target
        self.drafter = drafter
        self.sizer = sizer
        self.plain_s = plain_s
        self.last_round: tuple[TokenTree, Acceptance] | None = None
        self._observing = Observing()
        self.decisions = Decisions()

    @property
    def decisions(self) -> Decisions:
        return self._decisions

    @decisions.setter
    def decisions(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self._observing.forced = decisions.observing

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

    def round(
        self, texts: Sequence[DecodingText], chunks: Sequence[PromptChunk] = (), most_rows: int | None = None
    ) -> list[PassRecord]:
        """One pass: each text is extended, and chunks of prompts are read with them.

        The rows that neither the texts nor the chunks need go to drafted nodes, of whichever texts they are
        worth most for. If the choice of a text's tokens fails, its `error` says why, nothing of its tree is
        kept, and the others go on.

        Args:
            most_rows: most rows of the pass, if it is shared; None if a single text has it to itself.

        Returns:
            A record for each text. All have the times of the whole pass, and divide its experts among them.
        """
        start, reading_s = time.perf_counter(), self._target.reading_s
        alone = len(texts) == 1 and not chunks
        unread = texts[0].unread if alone else 0
        other_rows = unread + sum(len(chunk.tokens) for chunk in chunks)
        if alone:
            drafted, asked = self._draft(texts[0])
        else:
            nodes = min((most_rows or 0) - other_rows, self._target.max_nodes)
            drafted, asked = self._draft_together(texts, PassRoom(nodes, other_rows))

        draft_end, draft_read_s = time.perf_counter(), self._target.reading_s - reading_s
        self._note_proposers(texts, drafted, asked)
        trees = [
            TextTree(text.tokens, d.tree, text.cached, text.unread)
            for text, d in zip(texts, drafted, strict=True)
        ]
        result = self._target.verify(trees, chunks)
        for text in texts:
            text.unread = 0

        verify_end = time.perf_counter()
        resting_s = None if asked or not texts else (verify_end - draft_end) / len(texts)
        observe_s = sum(
            self._observing.show(self.drafter, text.tokens, d.tree, verified.logits, resting_s)
            for text, d, verified in zip(texts, drafted, result.verified, strict=True)
        )
        paths = [
            self._accept(text, d, verified)
            for text, d, verified in zip(texts, drafted, result.verified, strict=True)
        ]
        for place, index in enumerate(asked):
            if texts[index].error is None:
                self.drafter.learn(texts[index].tokens, place)
        self._target.commit(trees, paths)

        whole = PassRecord(
            nodes=sum(len(d.tree) for d in drafted),
            accepted=sum(max(len(path) - 1, 0) for path in paths),
            promised=sum(d.tree.expected_accepted for d in drafted),
            draft_s=draft_end - start,
            verify_s=verify_end - draft_end,
            accept_s=time.perf_counter() - verify_end,
            wait_s=result.waited_s,
            setup_s=result.setup_s,
            draft_read_s=draft_read_s,
            experts=result.experts,
            draft_steps=self.drafter.steps if asked else 0,
            draft_rows=self.drafter.rows if asked else 0,
            draft_text_s=self.drafter.text_s if asked else 0.0,
            observe_s=observe_s,
            prompt_rows=unread,
        )
        if alone:
            texts[0].sizer.record(whole, 1, unread)
            if whole.nodes == 1 and not unread:
                self.plain_s = min(whole.target_s, 1.05 * (self.plain_s or math.inf))
            return [whole]
        if texts:
            self.sizer.record(whole, len(texts), other_rows)
        experts = whole.experts.divided(len(texts)) if whole.experts else [None] * len(texts)
        return [
            replace(
                whole,
                nodes=len(d.tree),
                accepted=max(len(path) - 1, 0),
                promised=d.tree.expected_accepted,
                experts=share,
            )
            for d, path, share in zip(drafted, paths, experts, strict=True)
        ]

    def _limits(self, sizer: Sizer, texts: int = 1, room: PassRoom | None = None) -> TreeLimits:
        """Limits of the next trees, with what is forced."""
        drafting = self._decisions.drafting
        if drafting:
            sizer = FixedSizer(sizer.most)
        limits = replace(sizer.limits(texts, room), cascade=self._decisions.cascade)
        if (most := self._target.max_nodes - self._target.n_pending) < limits.budget:
            limits = replace(limits, budget=most, free=min(limits.free, most))
        return replace(limits, budget=texts) if drafting is False else limits

    def _draft(self, text: DecodingText) -> tuple[list[DraftedTree], list[int]]:
        """The tree of a text that has a pass to itself; see `_draft_together`."""
        room = PassRoom(self._target.most_unread + 1 - text.unread, text.unread) if text.unread else None
        limits = text.within(self._limits(text.sizer, 1, room))
        if not limits.allows_drafting and not self.drafter.reads_target:
            # Where a pass takes a few milliseconds, it would show what a drafter does to draft nothing.
            return [DraftedTree(TokenTree.root_only(text.tokens[-1]))], []
        return [text.method.drafting.draft(self.drafter, text.tokens, limits)], [0]

    def _draft_together(
        self, texts: Sequence[DecodingText], room: PassRoom
    ) -> tuple[list[DraftedTree], list[int]]:
        """Trees of texts that share a pass.

        Returns:
            The trees, and the indices of the texts that were drafted for.
        """
        drafted = [DraftedTree(TokenTree.root_only(text.tokens[-1])) for text in texts]
        if not texts or room.nodes <= len(texts):
            return drafted, []
        limits = self._limits(self.sizer, len(texts), room)
        # Under some rules the text depends on its trees, so others must not have a say in them.
        asked = {
            index: request
            for index, text in enumerate(texts)
            if text.method.rule.kind.invariant
            and (request := text.method.drafting.request(text.tokens, text.within(limits))) is not None
        }
        plain = len(texts) - len(asked)
        limits = replace(
            limits,
            budget=limits.budget - plain,
            free=max(limits.free - plain, 1),
            leaves=min(limits.leaves, len(asked) + self._target.n_free_leaves),
        )
        if limits.budget <= len(asked):
            return drafted, []
        trees = self.drafter.draft_together(list(asked.values()), limits)
        for index, tree in zip(asked, trees, strict=True):
            drafted[index] = texts[index].method.drafting.drafted(tree, texts[index].tokens)
        return drafted, list(asked)

    def _note_proposers(
        self, texts: Sequence[DecodingText], drafted: Sequence[DraftedTree], asked: Sequence[int]
    ) -> None:
        """Note who proposed the nodes of the trees, before the drafter learns from them and forgets it."""
        for text in texts:
            text.proposed_by = []
        for place, index in enumerate(asked):
            if texts[index].traced:
                texts[index].proposed_by = self.drafter.proposed_by(drafted[index].tree, place)

    def _accept(self, text: DecodingText, drafted: DraftedTree, verified: Verified) -> Sequence[int]:
        """The accepted path; the accepted tokens and the bonus token are appended to the text."""
        length = len(text.tokens)
        try:
            accepted = text.method.accept(drafted, verified.logits, text.tokens)
        except EdgeSpecError as error:
            del text.tokens[length:]
            text.error = error
            return ()
        if text.on_accept is not None:
            text.on_accept(verified.logits, drafted.tree, accepted)
        if len(drafted.tree) > 1:
            self.last_round = text.last_round = drafted.tree, accepted
        return accepted.path
