"""From a prompt and its settings to a sequence, whose answer is constrained and drafted as they say."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from edgespec.base.option import named
from edgespec.engine.drafting import Speculator
from edgespec.engine.embedded_images import require_readable
from edgespec.engine.requests import Request
from edgespec.engine.scored_texts import scored_text
from edgespec.engine.sequence import TextSequence
from edgespec.engine.target import Target
from edgespec.errors import ContextLengthError, UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation, MemoryUse
from edgespec.images.rows import PlacedImage
from edgespec.profiles.store import ProfileKeys
from edgespec.speculation.drafters.base import NoDrafter
from edgespec.speculation.spliced import SplicedText
from edgespec.text.encoding import Encoder, Prompt

if TYPE_CHECKING:
    from edgespec.text.answer_plan import AnswerPlanner


@dataclass(frozen=True)
class Loaded:
    """Facts about the load that answers report."""

    exact: bool = False  # whether exact decoding was asked for
    load_s: float = 0.0  # seconds that it took
    # the keys under which measurements of this pair on this machine are stored; None stores none
    keys: ProfileKeys | None = None
    memory: MemoryUse = field(default_factory=MemoryUse)  # what the loaded models take, and where layers are
    notes: Sequence[str] = ()  # explanations of decisions, in plain sentences
    # what users must know, for example that something other than requested is done
    warnings: Sequence[str] = ()


class SequenceMaker:
    """Makes the sequences of one engine.

    Args:
        context: most tokens of a sequence, prompt and answer together.
    """

    def __init__(
        self,
        target: Target,
        encoder: Encoder,
        speculator: Speculator,
        context: int,
        loaded: Loaded,
    ) -> None:
        self._target = target
        self.encoder = encoder
        self._speculator = speculator
        self._context = context
        self._exact = loaded.exact
        self._memory = loaded.memory
        self._load_s = loaded.load_s

    @cached_property
    def planner(self) -> AnswerPlanner:
        """Says how answers are constrained and taken apart."""
        from edgespec.text.answer_plan import AnswerPlanner

        return AnswerPlanner(self._target.model.vocabulary)

    def encoded(self, prompt: Prompt, config: GenerationConfig, raw: bool) -> list[int]:
        """The tokens of a prompt.

        Raises:
            ContextLengthError, TemplateError, UsageError: see `Engine.stream`.
        """
        if self._exact and not config.rule.kind.invariant:
            raise UsageError(
                f"With the rule '{config.rule.name}' the text depends on the drafter, which exact decoding "
                "rules out.",
                f"Choose another rule, or load the model without {named('exact', True)}.",
            )
        tokens = self.encoder.encode(prompt, raw=raw, config=config)
        room = self._context - len(tokens)
        if not tokens:
            raise UsageError("The prompt is empty.", "Give some text to answer or to continue.")
        if tokens[-1] < 0:
            raise UsageError("The prompt ends with an image.", "Put some text behind it.")
        if room < 0 or (room == 0 and config.max_tokens != 0):
            raise ContextLengthError(
                f"The prompt has {len(tokens)} tokens, but the context holds {self._context}.",
                f"Shorten it, or use {named('context', _round_up(len(tokens) + 512, 1024))}.",
            )
        return tokens

    def for_prompt(
        self, prompt: list[int], config: GenerationConfig, raw: bool, owner: Hashable = None
    ) -> TextSequence:
        """The sequence of a prompt that was `encoded`.

        Args:
            owner: as of a `Request`.
        """
        from edgespec.engine.answer import Answer

        seed = secrets.randbits(32) if config.seed is None else config.seed
        images = self._images_in(prompt)
        text = SplicedText(prompt) if images else prompt
        plan = self.planner.plan(self.encoder, text, config, raw=raw)
        earlier = self._speculator.earlier
        source = None if earlier is None else earlier.source(owner, text)
        own = () if source is None else (source,)
        method, sizer = self._speculator.method(config, seed, plan.constraint, len(text), own)
        generation = Generation(
            prompt_tokens=len(prompt),
            seed=seed if config.draws else 0,
            exact=self._target.rule is not None and config.rule.kind.invariant,
            verify=str(config.rule),
            lossy=config.rule.kind.lossy,
            drafts=not isinstance(self._speculator.drafter, NoDrafter),
            memory=replace(self._memory),
        )
        # The time to load counts once, for the first answer.
        generation.timings.load_s, self._load_s = self._load_s, 0.0
        room = self._context - len(prompt)
        answer = Answer(len(prompt), room, config, generation, self._target.model.vocabulary, plan)
        end = len(prompt) + answer.most
        return TextSequence(list(prompt), method, end, sizer, answer, images=images, said=source)

    def _images_in(self, prompt: Sequence[int]) -> Sequence[PlacedImage]:
        """The images in a prompt.

        Raises:
            UsageError: they cannot be read with what is loaded.
        """
        if self.encoder.images is None or min(prompt) >= 0:
            return ()
        images = self.encoder.images.placed(prompt)
        require_readable(self._target.context, images)
        return images

    def for_request(self, request: Request) -> TextSequence:
        """The sequence of a request, or of a prompt that is to be scored."""
        prompt, first = request.prompt, request.scored_from
        if request.continuation is not None:
            text = scored_text(self.encoder, prompt, request.continuation)
            prompt, first = text.tokens, text.first
        tokens = self.encoded(prompt, request.config, request.raw)
        sequence = self.for_prompt(tokens, request.config, request.raw, request.owner)
        sequence.request = request
        if request.on_accept is not None:
            sequence.answer.on_accept = request.on_accept
        if first is not None:
            sequence.score_prompt(first)
        return sequence


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
