"""The engine: turns prompts into answers, one at a time or many in shared passes.

Its parts do the work: a `SequenceMaker` makes a sequence of a prompt, the `Decoder` extends it pass by pass,
the `Scheduler` decides which sequences share passes, and `ExclusiveAccess` whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from edgespec.base.option import named
from edgespec.base.progress import checked_while_waiting
from edgespec.costs.batches import knee_of_sequences
from edgespec.engine.access import Call, ExclusiveAccess
from edgespec.engine.decoding import Decoder
from edgespec.engine.drafting import Speculator
from edgespec.engine.requests import AnswerCollector, Event, Request, RequestList, RequestSource, numbered
from edgespec.engine.scheduler import Scheduler
from edgespec.engine.scored_texts import scored_texts, scores_of
from edgespec.engine.sequence import TextSequence
from edgespec.engine.sequence_maker import Loaded, SequenceMaker
from edgespec.engine.target import Target
from edgespec.engine.turn import SavedStates, Turn
from edgespec.errors import UsageError
from edgespec.files.checked import CheckedFiles
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Chunk, Generation, PassRecord
from edgespec.generation.score import Score
from edgespec.llama.runtime.abort import AbortFlag, DecodeAborted
from edgespec.speculation.drafters.base import Drafter
from edgespec.text.encoding import Encoder, Prompt


class Engine:
    """One target and one drafter, generating one answer at a time, or many in shared passes.

    Several threads may use an engine: a call waits until those that other threads made before it have ended.
    `cancel` and `close` do not wait, and end what is running. Whatever ends an answer, including
    KeyboardInterrupt and errors in callbacks, the next answer is the one that an engine without that
    interruption would give.

    Attributes:
        target: verifies the drafted trees.
        speculator: drafts them, and learns from them.
        maker: makes a sequence of a prompt.
        decoder: extends sequences by passes.
        context: most tokens of a text, prompt and answer together.
        texts: how many texts `stream_many` answers at once, where it is not told.
        load_s, keys, memory, notes, warnings: see `Loaded`.
        last_generation: the latest answer.
        prompt_files: where the states of prompts are kept for later runs; None if they are not.
    """

    def __init__(
        self,
        target: Target,
        speculator: Speculator,
        encoder: Encoder,
        abort: AbortFlag,
        *,
        context: int,
        texts: int | None = None,
        loaded: Loaded = Loaded(),  # noqa: B008 (frozen)
    ) -> None:
        self.target = target
        self.speculator = speculator
        self.context = context
        if texts is None:
            costs = speculator.costs
            texts = knee_of_sequences(costs.verify, target.max_sequences) if costs else target.max_sequences
        self.texts = texts
        self.load_s, self.keys, self.memory = loaded.load_s, loaded.keys, loaded.memory
        self.notes, self.warnings = list(loaded.notes), list(loaded.warnings)
        self.last_generation: Generation | None = None
        self.prompt_files: CheckedFiles | None = None
        self._abort = abort
        self._access = ExclusiveAccess(abort)
        self.maker = SequenceMaker(target, encoder, speculator, context, loaded)
        self.decoder = Decoder(target, speculator, self._access, abort)

    @property
    def drafter(self) -> Drafter:
        """Guesses how sequences continue, as trees."""
        return self.speculator.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        self.speculator.drafter = drafter

    @property
    def encoder(self) -> Encoder:
        """Turns prompts into tokens."""
        return self.maker.encoder

    @encoder.setter
    def encoder(self, encoder: Encoder) -> None:
        self.maker.encoder = encoder

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template, and so can hold a conversation."""
        return self.encoder.has_template

    @property
    def can_think(self) -> bool:
        """True if the model's chat template knows thoughts before answers."""
        return self.encoder.format is not None and self.encoder.format.thought is not None

    @property
    def sees_images(self) -> bool:
        """True if the model has a projector of images beside it, or one was named."""
        return self.encoder.images is not None and self.encoder.images.sees

    def not_enforced(self, config: GenerationConfig) -> tuple[str, ...]:
        """Name the schemas that the answer or its calls need not fit, in sentences.

        Raises:
            UsageError: the grammar library is missing.
            GrammarError: a reference of a schema leads back to itself, or the grammar cannot be used.
            InconclusiveTrial: a schema could not be tried.
        """
        return self.maker.planner.not_enforced(self.encoder, config)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens that the target knows."""
        return self.target.model.vocabulary.n_tokens

    @property
    def description(self) -> str:
        """Target, drafter and mode in one line."""
        mode = "exact" if self.target.rule else "not bit-exact"
        return f"{self.target.model.path.name}, drafted by {self.drafter.name}, {mode}"

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
        return self.stream_turn(lambda: Turn(prompt, raw), config, on_prefill=on_prefill)

    def stream_turn(
        self,
        prepare: Callable[[], Turn],
        config: GenerationConfig | None = None,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Generator[Chunk, None, None]:
        """`stream` for a conversation, whose state is restored before the answer and saved after it.

        Args:
            prepare: called when the iteration begins, before the turn is waited for.
        """
        return self._answer(self._access.call(), prepare, config or GenerationConfig(), on_prefill)

    def _answer(
        self,
        call: Call,
        prepare: Callable[[], Turn],
        config: GenerationConfig,
        on_prefill: Callable[[int, int], None] | None,
    ) -> Generator[Chunk, None, None]:
        try:
            with checked_while_waiting(partial(self._access.check, call)):
                turn = prepare()
                with self._access.held():
                    prompt = self.maker.encoded(turn.prompt, config, turn.raw)
        except DecodeAborted:  # while an image was read
            yield Chunk.cancelled()
            return
        with call.active, self._access.turn(call):
            with self._access.held():
                sequence = self.maker.for_prompt(prompt, config, turn.raw)
            self.last_generation = sequence.answer.generation
            yield from self.decoder.answer(sequence, turn, on_prefill)

    def restore_conversation(self, tokens: Sequence[int], states: SavedStates) -> int:
        """Restore a conversation from its saved states; returns how many tokens are in the cache then.

        Where positions depend on images (M-RoPE), these must have been read, or nothing is restored yet.

        Raises:
            UsageError: this thread has begun an answer and not ended it.
            BackendError: the engine is closed.
        """
        sequence = TextSequence(list(tokens), store=states.target)
        if min(tokens, default=0) < 0 and self.target.model.has_position_parts:
            reader = self.encoder.images
            if reader is None or not reader.knows(tokens):
                return 0
            sequence.images = reader.placed(tokens)
        return self._access.run(lambda: self.target.recall(sequence, len(tokens)))

    def save_conversation(self, tokens: Sequence[int], states: SavedStates) -> None:
        """Save what the cache has of a conversation; raises as `restore_conversation`."""
        self._access.run(lambda: self.decoder.save(tokens, states))

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
            raise UsageError(f"parallel must be 1 or more, not {parallel}.")
        requests = RequestList(source) if isinstance(source, Iterable) else source
        return self._answer_many(self._access.call(), requests, parallel, on_pass)

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

    def score(
        self,
        prompts: Iterable[Prompt],
        continuations: Iterable[str | Sequence[int]] | None = None,
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
        with self._access.held():
            texts = scored_texts(self.encoder, prompts, continuations)
        return scores_of(texts, partial(self.stream_many, parallel=parallel), top, on_prefill, on_result)

    def _answer_many(
        self,
        call: Call,
        source: RequestSource,
        parallel: int | None,
        on_pass: Callable[[Sequence[PassRecord]], None] | None,
    ) -> Generator[Event, None, None]:
        """Answer the requests of a source, waiting for more while there are none."""
        with call.active, self._access.turn(call):
            scheduler = Scheduler(
                self.target,
                self.drafter,
                source,
                self._abort,
                step=self.decoder.step,
                begin=self._begin,
                finish=self.decoder.finish,
                max_sequences=parallel or self.texts,
                on_pass=on_pass,
            )
            try:
                while not scheduler.is_done:
                    with self._access.held():
                        events = scheduler.advance()
                    self._access.check()
                    while events:
                        yield events.popleft()
                    if scheduler.is_idle and not source.wait():
                        return
            finally:
                with self._access.held_for_cleanup():
                    scheduler.close()

    def _begin(self, request: Request) -> TextSequence:
        with self._access.held(), checked_while_waiting(self._abort.check):
            sequence = self.maker.for_request(request)
        self.last_generation = sequence.answer.generation
        return sequence

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn."""
        return self._access.waiting

    def cancel(self) -> None:
        """End all answers that were asked for so far; may be called from other threads and signal handlers.

        That includes answers that wait for another one, and those of generators that nobody has iterated over
        yet. Answers that are asked for later are not affected.
        """
        self._access.cancel()

    def forget_texts(self) -> None:
        """Forget what was learned and kept of texts so far, in this engine and not on disk.

        For measurements: a repeated prompt would be drafted from its earlier answer.
        """
        self.speculator.forget_texts()

    def set_tree_budget(self, budget: int | None) -> None:
        """Set the size of trees from now on: the nodes per pass, or None to follow the measured cost.

        Raises:
            UsageError: the engine was not loaded for trees of that size.
        """
        if budget is not None and not 1 <= budget <= self.target.max_nodes:
            raise UsageError(
                f"{named('tree_budget')} must be from 1 to {self.target.max_nodes} here, or auto, "
                f"not {budget}."
            )
        self.speculator.set_budget(budget)

    def close(self) -> None:
        """Free the models and their caches; may be called from any thread, and repeatedly.

        An answer that another thread is generating is ended first; `stream` and `generate` raise BackendError
        there. In a process that was forked after loading, nothing is freed.
        """
        self._access.close(self._free)

    @property
    def closed(self) -> bool:
        """True if the engine is closed."""
        return self._access.closed

    def held(self) -> AbstractContextManager[None]:
        """A context in which no other thread can free the models, for code that uses them directly.

        Raises:
            BackendError: the engine is closed, or was loaded before this process was forked.
        """
        return self._access.held()

    def _free(self) -> None:
        with ExitStack() as stack:  # if one of these fails, the others still run
            stack.callback(self.target.close)
            stack.callback(self.drafter.close)
            stack.callback(self.encoder.close)
            self.speculator.profile_updates.save(self.target.model.weights)

    def __repr__(self) -> str:
        """Return, for example, <Engine big.gguf, drafted by small.gguf, exact; context 4096>."""
        state = "closed" if self.closed else f"context {self.context}"
        return f"<Engine {self.description}; {state}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
