"""The engine: turns prompts into answers, one at a time or many in shared passes.

A pass of the target is expensive, and takes about as long for a whole tree of tokens as for one. So a drafter
guesses how sequences continue, each as a tree; the target reads all trees in one pass; the path that it
agrees with is accepted, together with the target's own choice after it. That is `Engine.step`. Decoding
without a drafter is the same with trees of one node, and a single answer is a batch of one sequence.
"""

from __future__ import annotations

import secrets
import time
from collections import abc
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, aclosing, closing
from dataclasses import replace

from edgespec.arguments import checks_arguments, shown
from edgespec.costs.batches import knee_of_sequences
from edgespec.costs.pass_time import RoundCosts
from edgespec.engine.answer import Answer, AnswerObserver
from edgespec.engine.answer_plan import AnswerPlanner
from edgespec.engine.asynchronous import events_of_thread
from edgespec.engine.drafting import Drafts, draft_batch, limits_for
from edgespec.engine.observation import ObservationPolicy
from edgespec.engine.plain_passes import PlainPasses
from edgespec.engine.requests import AnswerCollector, Event, Request, RequestList, RequestSource, numbered
from edgespec.engine.scheduler import Scheduler
from edgespec.engine.scored_texts import ScoringProgress, scored_text, scored_texts
from edgespec.engine.sequence import Batch, Sequence, Sizer
from edgespec.engine.session_turn import SavedStates, SessionTurn
from edgespec.engine.target import Target, TargetPass
from edgespec.engine.usage import Usage
from edgespec.errors import ContextLengthError, EdgeSpecError, UsageError
from edgespec.files.checked import CheckedFiles
from edgespec.generation.config import GenerationConfig
from edgespec.generation.decisions import Decisions
from edgespec.generation.result import Chunk, FinishReason, Generation, MemoryUse, PassRecord
from edgespec.generation.score import Score
from edgespec.llama.runtime.abort import AbortFlag, DecodeAborted
from edgespec.option import named
from edgespec.profiles.store import ProfileKeys
from edgespec.profiles.updates import ProfileUpdates
from edgespec.speculation.drafters.base import Drafter, NoDrafter
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.methods import DecodingMethod, method_for
from edgespec.speculation.noise import NoiseCache, noise_bytes
from edgespec.speculation.policies import TreePolicy, tree_policy
from edgespec.speculation.sizing.sizers import FIRST_BUDGET, AdaptiveSizer, FixedSizer, fixed_nodes
from edgespec.speculation.tree import Acceptance, TokenTree
from edgespec.text.encoding import Encoder, Prompt

# Nodes of the first tree where every row needs experts of its own: even a small one may cost several plain
# passes there.
_FIRST_NODES_BY_EXPERT = 2


class Engine:
    """One target and one drafter, generating one answer at a time, or many in shared passes.

    Several threads may use an engine: a call waits until those that other threads made before it have ended.
    `cancel` and `close` do not wait, and end what is running. Whatever ends an answer, including
    KeyboardInterrupt and errors in callbacks, the next answer is the one that an engine without that
    interruption would give.

    Attributes:
        target: verifies the drafted trees.
        encoder: turns prompts into tokens.
        context: most tokens of a text, prompt and answer together.
        limits: limits that no tree may exceed.
        policy: how trees grow.
        load_s: seconds that loading took.
        keys: the keys under which measurements of this pair on this machine are stored; None stores none.
        profile_updates: what this run measures, which corrects them for the next one if it may learn.
        notes: explanations of decisions, in plain sentences.
        warnings: what users must know, for example that something other than requested is done.
        last_generation: the latest answer.
        drafter: guesses how sequences continue, as trees.
        sizer: decides how large these are.
        plain_passes: what a pass without drafts takes at present.
        last_round: the latest tree with drafted tokens of an answer, and what was accepted of it; None if the
            latest answer that had the target to itself has drafted nothing.
        memory: what the loaded models take, and where layers are.
        texts: how many texts `stream_many` answers at once, where it is not told.
        prompt_files: where the states of prompts are kept for later runs; None if they are not.
        new_observer: makes an observer from the tokens of a prompt, for each answer that begins; None for
            none. A request's own `on_accept` takes its place.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        encoder: Encoder,
        abort: AbortFlag,
        *,
        context: int,
        updates: ProfileUpdates,
        tree_budget: int | None = None,
        limits: TreeLimits | None = None,
        policy: TreePolicy | None = None,
        costs: RoundCosts | None = None,
        keys: ProfileKeys | None = None,
        notes: abc.Sequence[str] = (),
        warnings: abc.Sequence[str] = (),
        load_s: float = 0.0,
        memory: MemoryUse | None = None,
        exact: bool = False,
        texts: int | None = None,
    ) -> None:
        self.target = target
        self.encoder = encoder
        self.context = context
        self.notes = list(notes)
        self.warnings = list(warnings)
        self.last_generation: Generation | None = None
        self.prompt_files: CheckedFiles | None = None
        self.new_observer: Callable[[abc.Sequence[int]], AnswerObserver] | None = None
        self.limits = limits_for(target, limits, tree_budget)
        self.policy = policy or tree_policy()
        self.keys = keys
        self.profile_updates = updates
        self._costs = costs
        n_vocab, drafts = target.model.vocabulary.n_tokens, not isinstance(drafter, NoDrafter)
        self._noise = NoiseCache(noise_bytes(n_vocab, drafts=drafts, answers=texts or 1))
        if texts is None:
            texts = knee_of_sequences(costs.verify, target.max_sequences) if costs else target.max_sequences
        self.texts = texts
        by_expert = target.model.weights.expert_use is not None
        self._first_nodes = _FIRST_NODES_BY_EXPERT if by_expert else FIRST_BUDGET
        self.drafter = drafter
        self.sizer: Sizer = self._new_sizer(fixed=self.limits if tree_budget else None)
        self.plain_passes = PlainPasses(costs.verify if costs else None)
        self.last_round: tuple[TokenTree, Acceptance] | None = None
        self._decisions = Decisions()
        self._observation = ObservationPolicy()
        self.load_s = self._load_s = load_s
        self.memory = memory or MemoryUse()
        self._abort = abort
        self._exact = exact  # whether exact decoding was requested
        self._planner = AnswerPlanner(target.model.vocabulary)
        self._usage = Usage(abort)

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template, and so can hold a conversation."""
        return self.encoder.has_template

    @property
    def can_think(self) -> bool:
        """True if the model's chat template knows thoughts before answers."""
        return self.encoder.format is not None and self.encoder.format.thought is not None

    def not_imposed(self, config: GenerationConfig) -> tuple[str, ...]:
        """List the parts of the tools' schemas that do not bind the arguments of calls, in sentences.

        Raises:
            UsageError: the grammar library is missing.
            InconclusiveTrial: a schema could not be tried.
        """
        return self._planner.not_imposed(self.encoder, config)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens that the target knows."""
        return self.target.model.vocabulary.n_tokens

    @property
    def description(self) -> str:
        """Target, drafter and mode in one line."""
        mode = "exact" if self.target.rule else "not bit-exact"
        return f"{self.target.model.path.name}, drafted by {self.drafter.name}, {mode}"

    @property
    def decisions(self) -> Decisions:
        """Decisions that are forced instead of following from measured costs; may be set between answers."""
        return self._decisions

    @decisions.setter
    def decisions(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self._observation.forced = decisions.observing

    @checks_arguments
    def stream(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        raw: bool = False,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Generator[Chunk, None, None]:
        """Generate an answer, yielding text as soon as it is accepted; the last chunk has the whole answer.

        Args:
            prompt: a question, which is put into the model's chat template if it has one; or chat messages;
                or token ids.
            raw: continue the text as it is, without a template.
            on_prefill: called with (tokens read, tokens to read) while the prompt is read.

        Raises:
            ContextLengthError: the prompt leaves no room for an answer.
            TemplateError: messages were given and the model has no template, or a broken one.
            UsageError: the prompt is empty, the grammar is wrong, the drafter cannot serve the rule of
                `config.verify`, or under that rule the text would depend on the drafter although exact
                decoding was requested; or this thread has begun another answer and not ended it.
            BackendError: the engine is closed, or another thread closes it in the meantime.
        """
        config = config or GenerationConfig()

        def begin() -> Generator[Chunk, None, None]:
            tokens, room = self._checked(prompt, config, raw)
            return self._usage.held_steps(self._answer(tokens, room, config, raw, on_prefill))

        return self._usage.in_turn(begin)

    def stream_turn(
        self,
        prepare: Callable[[], SessionTurn],
        config: GenerationConfig | None = None,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Generator[Chunk, None, None]:
        """`stream` for a conversation, whose state is restored before the answer and saved after it.

        Args:
            prepare: called when the iteration begins, before the turn is waited for.
        """
        config = config or GenerationConfig()

        def begin() -> Generator[Chunk, None, None]:
            turn = prepare()
            tokens, room = self._checked(turn.tokens, config, turn.raw)
            return self._usage.held_steps(self._answer(tokens, room, config, turn.raw, on_prefill, turn))

        return self._usage.in_turn(begin)

    def restore_conversation(self, tokens: abc.Sequence[int], states: SavedStates) -> int:
        """Restore a conversation from its saved states; returns how many tokens are in the cache then.

        Raises:
            UsageError: this thread has begun an answer and not ended it.
            BackendError: the engine is closed.
        """
        return self._usage.run_in_turn(lambda: self._recall(tokens, states))

    def save_conversation(self, tokens: abc.Sequence[int], states: SavedStates) -> None:
        """Save what the cache has of a conversation; raises as `restore_conversation`."""
        self._usage.run_in_turn(lambda: self._save(tokens, states))

    def _recall(self, tokens: abc.Sequence[int], states: SavedStates) -> int:
        return self.target.recall(Sequence(list(tokens), store=states.target), len(tokens))

    def _save(self, tokens: abc.Sequence[int], states: SavedStates) -> None:
        if self.target.save_state(states.target, tokens):
            self.drafter.save(tokens, states.drafter)

    @checks_arguments
    def _checked(self, prompt: Prompt, config: GenerationConfig, raw: bool) -> tuple[list[int], int]:
        """The tokens of a prompt, and the room that the context has behind them."""
        if self._exact and not config.rule.kind.invariant:
            raise UsageError(
                f"With the rule '{config.rule.name}' the text depends on the drafter, which exact decoding "
                "rules out.",
                f"Choose another rule, or load the model without {named('exact', True)}.",
            )
        with self._usage.held():
            tokens = self.encoder.encode(prompt, raw=raw, config=config)
        room = self.context - len(tokens)
        if not tokens:
            raise UsageError("The prompt is empty.", "Give some text to answer or to continue.")
        if room < 0 or (room == 0 and config.max_tokens != 0):
            raise ContextLengthError(
                f"The prompt has {len(tokens)} tokens, but the context holds {self.context}.",
                f"Shorten it, or use {named('context', _round_up(len(tokens) + 512, 1024))}.",
            )
        return tokens, room

    @checks_arguments
    def generate(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        raw: bool = False,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Generate the whole answer at once; see `stream`."""
        generation = None
        for chunk in self.stream(prompt, config, raw=raw, on_prefill=on_prefill):
            generation = chunk.generation
        assert generation is not None
        return generation

    @checks_arguments
    def stream_many(
        self,
        source: RequestSource | Iterable[Request],
        *,
        parallel: int | None = None,
        on_pass: Callable[[abc.Sequence[PassRecord]], None] | None = None,
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
            raise UsageError(f"parallel must be 1 or more, not {parallel}.")
        requests = RequestList(source) if isinstance(source, Iterable) else source
        return self._usage.in_turn(lambda: self._answer_many(requests, parallel, on_pass))

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
        answers = AnswerCollector(on_result)
        for event in self.stream_many(numbered(prompts, config, raw), parallel=parallel):
            answers.add(event)
        return answers.in_order

    @checks_arguments
    def stream_many_async(
        self, source: RequestSource | Iterable[Request], *, parallel: int | None = None
    ) -> AsyncGenerator[Event, None]:
        """`stream_many` for asynchronous code: passes run in a thread of their own.

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
        """`generate_many` for asynchronous code; may be cancelled like `stream_many_async`."""
        answers = AnswerCollector(on_result)
        async with aclosing(
            self.stream_many_async(numbered(prompts, config, raw), parallel=parallel)
        ) as events:
            async for event in events:
                answers.add(event)
        return answers.in_order

    @checks_arguments
    def score(
        self,
        prompts: Iterable[Prompt],
        continuations: Iterable[str | abc.Sequence[int]] | None = None,
        *,
        top: int = 0,
        parallel: int | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        on_result: Callable[[int, Score], None] = lambda index, score: None,
    ) -> list[Score]:
        """Say how likely the target finds given texts, token by token, in shared passes.

        Log-probabilities are the log-softmax of the target's own logits, as those of answers are. Prompts
        that begin alike are read once as far as they do.

        Args:
            prompts: texts, which are not put into the chat template; or chat messages, which are; or token
                ids.
            continuations: for each prompt, the text or token ids behind it; only these are scored then. A
                token that spans the end of a prompt belongs to the continuation.
            top: how many of the likeliest tokens are recorded beside each token.
            parallel: the maximum number of texts at once; None for `texts`.
            on_prefill: called with (tokens read, tokens to read) of all prompts together.
            on_result: called with each prompt's index and score, as soon as it is known.

        Returns:
            The scores, in the order of the prompts. `cancel` ends scoring early; scores are then incomplete.

        Raises:
            ContextLengthError: a text does not fit the context.
            TemplateError, UsageError, BackendError: as `stream`; or there are more or fewer continuations
                than prompts.
        """
        with self._usage.held():
            texts = scored_texts(self.encoder, prompts, continuations)
        config, progress = GenerationConfig(max_tokens=0, logprobs=top), ScoringProgress(texts, on_prefill)
        requests = [
            Request(
                text.tokens, config, raw=True, key=index, scored_from=text.first,
                on_prefill=progress.observer(index),
            )
            for index, text in enumerate(texts)
        ]  # fmt: skip
        scores: dict[int, Score] = {}

        def add(index: int, answer: Generation) -> None:
            scores[index] = Score.of(texts[index].tokens, texts[index].first, answer)
            progress.scored(index)
            on_result(index, scores[index])

        answers = AnswerCollector(add)
        with closing(self.stream_many(requests, parallel=parallel)) as events:
            for event in events:
                answers.add(event)
        return [scores.get(index) or Score.none(text.tokens, text.first) for index, text in enumerate(texts)]

    def step(self, batch: Batch) -> list[PassRecord]:
        """Run a pass over a batch: draft, verify, accept, commit.

        Each sequence is extended, and the chunks of prompts are read. If the choice of a sequence's tokens
        fails, its `error` says why, nothing of its tree is kept, and the others are extended.

        Returns:
            A record for each sequence. All have the times of the whole pass, and divide its experts.

        Raises:
            DecodeAborted: stopped from outside; the sequences are unchanged.
        """
        start, read_s = time.perf_counter(), self.target.reading_s
        drafts = draft_batch(batch, self.drafter, self.target, self.sizer, self._decisions)

        draft_end, draft_read_s = time.perf_counter(), self.target.reading_s - read_s
        trees, prompt_rows = batch.trees(drafts.trees), sum(s.unread for s in batch.sequences)
        result = self.target.verify(trees, batch.chunks)

        verify_end = time.perf_counter()
        observe_s = self._observe(batch, drafts, result, verify_end - draft_end)
        paths = self._accept(batch, drafts, result)
        self.target.commit(trees, paths)

        asked = bool(drafts.asked)
        whole = PassRecord(
            nodes=sum(len(draft.tree) for draft in drafts.trees),
            accepted=sum(max(len(path) - 1, 0) for path in paths),
            expected_accepted=sum(draft.tree.expected_accepted for draft in drafts.trees),
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
            prompt_rows=prompt_rows,
            shared=len(batch.sequences) + len(batch.chunks) > 1,
        )
        self._learn(batch, whole)
        return _divided(whole, drafts, paths)

    def _observe(self, batch: Batch, drafts: Drafts, result: TargetPass, verify_s: float) -> float:
        """Show the pass to the drafter; returns the seconds that it took."""
        resting_s = None if drafts.asked or not batch.sequences else verify_s / len(batch.sequences)
        return sum(
            self._observation.show(self.drafter, sequence.tokens, draft.tree, logits, resting_s)
            for sequence, draft, logits in zip(batch.sequences, drafts.trees, result.logits, strict=True)
        )

    def _accept(self, batch: Batch, drafts: Drafts, result: TargetPass) -> list[abc.Sequence[int]]:
        """Extend each sequence by what the target chose; returns the accepted path of each tree."""
        paths = []
        for sequence, draft, logits in zip(batch.sequences, drafts.trees, result.logits, strict=True):
            paths.append(sequence.accept(draft, logits))
            if sequence.error is None and len(draft.tree) > 1:
                self.last_round = sequence.last_round
        for place, index in enumerate(drafts.asked):
            if batch.sequences[index].error is None:
                self.drafter.learn(batch.sequences[index].tokens, place)
        return paths

    def _learn(self, batch: Batch, record: PassRecord) -> None:
        """Adapt the next sizes to the time and yield of a pass."""
        n_sequences = len(batch.sequences)
        if not n_sequences:
            return
        other_rows = record.prompt_rows + batch.chunk_rows
        sizer = self.sizer if batch.dedicated_to is None else batch.dedicated_to.sizer
        sizer.record(record, n_sequences, other_rows)
        if n_sequences == 1 and not other_rows:
            self.plain_passes.add(record)
        by_rows = replace(record, nodes=record.nodes + batch.chunk_rows)
        self.profile_updates.add_pass(by_rows, self.target.context.n_threads)

    def _answer(
        self,
        prompt: list[int],
        room: int,
        config: GenerationConfig,
        raw: bool,
        on_prefill: Callable[[int, int], None] | None,
        turn: SessionTurn | None = None,
    ) -> Generator[Chunk, None, None]:
        """Read the prompt, then extend the text pass by pass until the answer ends."""
        sequence = self._begin(prompt, room, config, raw)
        answer, self.last_round = sequence.answer, None
        assert answer is not None
        states = turn.states if turn is not None else None
        sequence.store = states.target if states is not None else None
        reason: FinishReason = "cancelled"
        try:
            if self._abort.is_set:  # cancelled before it began
                raise DecodeAborted
            try:
                # A head drafts from hidden states of the whole prompt.
                most_unread = 0 if self.drafter.reads_target else self.target.most_unread
                sequence.unread = self.target.prefill(
                    sequence, on_progress=on_prefill, most_unread=max(most_unread - FIRST_BUDGET, 0)
                )
            finally:
                answer.prompt_was_read(len(prompt) - 1 - self.target.recalled)
            self._usage.check()  # the progress callback may have closed the engine
            if states is not None:
                self.drafter.recall(sequence.tokens, states.drafter)
            while not sequence.is_full:
                (record,) = self.step(Batch([sequence]))
                if sequence.error is not None:
                    raise sequence.error
                yield self._add_pass(sequence, record)
                if answer.builder.ended or self._abort.is_set:
                    break
            else:
                reason = "length"
        except DecodeAborted:
            pass
        except EdgeSpecError:
            reason = "error"
            raise
        finally:
            last = self._finish(sequence, reason)
            if turn is not None and answer.generation.passes:
                self._end_turn(turn, answer.generation)
        if answer.generation.finish_reason == "cancelled":
            self._usage.check()
        yield last

    def _end_turn(self, turn: SessionTurn, answer: Generation) -> None:
        """Give a conversation its answer, and save its state while it is in the cache."""
        turn.on_end(answer)
        with self._usage.held_for_cleanup() as is_open:
            if is_open and turn.states is not None and not turn.states.closed:
                self._save([*turn.tokens, *answer.tokens], turn.states)

    def _begin(self, prompt: list[int], room: int, config: GenerationConfig, raw: bool) -> Sequence:
        """Begin the answer to a prompt: how it is constrained and taken apart, drafted and accepted."""
        seed = secrets.randbits(32) if config.seed is None else config.seed
        plan = self._planner.plan(self.encoder, prompt, config, raw=raw)
        vocabulary = self.target.model.vocabulary
        method = method_for(
            config,
            vocabulary.n_tokens,
            seed,
            self.drafter,
            plan.constraint,
            policy=self.policy,
            noise=self._noise,
        )
        generation = self._new_answer(len(prompt), config, seed)
        answer = Answer(len(prompt), room, config, generation, vocabulary, plan)
        if self.new_observer is not None:
            answer.observe(self.new_observer(prompt))
        return Sequence(list(prompt), method, len(prompt) + answer.most, self._sizer_for(method), answer)

    def _sizer_for(self, method: DecodingMethod) -> Sizer:
        """The engine's own, unless the rule has trees of one size."""
        if method.nodes is None or isinstance(self.sizer, FixedSizer):
            return self.sizer
        nodes = fixed_nodes(method.nodes, self._costs, self.limits, chain=method.chain)
        return FixedSizer(replace(self.limits, budget=nodes))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Chunk:
        """End an answer, and its sequence in the cache where plain decoding would have."""
        answer = sequence.answer
        assert answer is not None
        answer.generation.plain_pass_s = self.plain_passes.seconds
        try:
            last = answer.finish(reason)
            with self._usage.held_for_cleanup() as is_open:
                if is_open and sequence.cache is not None:
                    self.target.truncate_to(sequence, answer.final_length)
            return last
        finally:
            sequence.finish()
            self.policy.save()

    def _add_pass(self, sequence: Sequence, record: PassRecord) -> Chunk:
        """Add a pass to the answer of the sequence that has the target to itself."""
        answer = sequence.answer
        assert answer is not None
        chunk, config = sequence.add(record, self.target.model.vocabulary), answer.config
        assert chunk.record is not None
        if record.nodes > 1 and config.rule.kind.invariant and not answer.constrained:
            assert sequence.last_round is not None
            tree, accepted = sequence.last_round
            path = accepted.path[: chunk.record.accepted + 1]
            self.profile_updates.add_tree(tree, path, record, config.temperature)
        return chunk

    def _answer_many(
        self,
        source: RequestSource,
        parallel: int | None,
        on_pass: Callable[[abc.Sequence[PassRecord]], None] | None,
    ) -> Generator[Event, None, None]:
        """Answer the requests of a source, waiting for more while there are none."""
        scheduler = Scheduler(
            self.target,
            self.drafter,
            source,
            step=self.step,
            begin=self._begin_request,
            finish=self._finish,
            most_sequences=parallel or self.texts,
            on_pass=on_pass,
        )
        with closing(self._usage.held_steps(scheduler.events(self._abort))) as events:
            for event in events:
                if event is not None:
                    yield event
                elif not source.wait():
                    return

    def _begin_request(self, request: Request) -> Sequence:
        """Begin the answer to a request, or the scoring of its prompt."""
        prompt, first = request.prompt, request.scored_from
        if request.continuation is not None:
            with self._usage.held():
                text = scored_text(self.encoder, prompt, request.continuation)
            prompt, first = text.tokens, text.first
        tokens, room = self._checked(prompt, request.config, request.raw)
        sequence = self._begin(tokens, room, request.config, request.raw)
        sequence.request = request
        if request.on_accept is not None and sequence.answer is not None:
            sequence.answer.on_accept = request.on_accept
        if first is not None:
            sequence.score_prompt(first)
        return sequence

    def _new_answer(self, prompt_tokens: int, config: GenerationConfig, seed: int) -> Generation:
        answer = Generation(
            prompt_tokens=prompt_tokens,
            seed=0 if config.greedy else seed,
            exact=self.target.rule is not None and config.rule.kind.invariant,
            verify=str(config.rule),
            lossy=config.rule.kind.lossy,
            memory=replace(self.memory),
        )
        # The time to load counts once, for the first answer.
        answer.timings.load_s, self._load_s = self._load_s, 0.0
        self.last_generation = answer
        return answer

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn."""
        return self._usage.waiting

    def cancel(self) -> None:
        """End all answers that were asked for so far; may be called from other threads and signal handlers.

        That includes answers that wait for another one, and those of generators that nobody has iterated over
        yet. Answers that are asked for later are not affected.
        """
        self._usage.cancel()

    def forget_texts(self) -> None:
        """Forget what was learned and kept of texts so far, in this engine and not on disk.

        For measurements: a question that was asked before is drafted for from its answer.
        """
        self.policy = tree_policy(self.policy.name)
        self.drafter.forget_sequences()

    @checks_arguments
    def set_tree_budget(self, budget: int | None) -> None:
        """Set the size of trees from now on: the nodes per pass, or None to follow the measured cost.

        Raises:
            UsageError: the engine was not loaded for trees of that size.
        """
        if budget is not None and not 1 <= budget <= self.target.max_nodes:
            raise UsageError(
                f"{named('tree_budget')} must be from 1 to {self.target.max_nodes} here, or auto, "
                f"not {shown(budget)}."
            )
        self.sizer = self._new_sizer(fixed=replace(self.limits, budget=budget) if budget else None)

    def _new_sizer(self, *, fixed: TreeLimits | None) -> Sizer:
        """Return the sizer of trees: always `fixed`, or by measured cost."""
        return FixedSizer(fixed) if fixed else AdaptiveSizer(self.limits, self._costs, self._first_nodes)

    def close(self) -> None:
        """Free the models and their caches; may be called from any thread, and repeatedly.

        An answer that another thread is generating is ended first; `stream` and `generate` raise BackendError
        there. In a process that was forked after loading, nothing is freed.
        """
        self._usage.close(self._free)

    @property
    def closed(self) -> bool:
        """True if the engine is closed."""
        return self._usage.closed

    def held(self) -> AbstractContextManager[None]:
        """A context in which no other thread can free the models, for code that uses them directly.

        Raises:
            BackendError: the engine is closed, or was loaded before this process was forked.
        """
        return self._usage.held()

    def _free(self) -> None:
        with ExitStack() as stack:  # if one of these fails, the others still run
            stack.callback(self.target.close)
            stack.callback(self.drafter.close)
            stack.callback(self.encoder.close)
            self.profile_updates.save(self.target.model.weights)

    def __repr__(self) -> str:
        """Return, for example, <Engine big.gguf, drafted by small.gguf, exact; context 4096>."""
        state = "closed" if self.closed else f"context {self.context}"
        return f"<Engine {self.description}; {state}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _divided(whole: PassRecord, drafts: Drafts, paths: abc.Sequence[abc.Sequence[int]]) -> list[PassRecord]:
    """The record of a pass for each of its sequences."""
    if len(paths) == 1:
        return [whole]
    experts = whole.experts.divided(len(paths)) if whole.experts and paths else [None] * len(paths)
    return [
        replace(
            whole,
            nodes=len(draft.tree),
            accepted=max(len(path) - 1, 0),
            expected_accepted=draft.tree.expected_accepted,
            experts=share,
        )
        for draft, path, share in zip(drafts.trees, paths, experts, strict=True)
    ]
