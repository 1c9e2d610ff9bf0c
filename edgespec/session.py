"""A conversation with an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from edgespec.encoding import Encoded
from edgespec.engine import Engine
from edgespec.generation import Chunk, GenerationConfig


class Session:
    """Messages so far, and the tokens they were read as, so that each turn costs only its own text.

    Attributes:
        messages: {"role", "content"} of each turn, without the system prompt.
        system: the system prompt.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self.engine = engine
        self.system = system
        self.messages: list[dict[str, str]] = []
        self._known: Encoded | None = None

    def ask(
        self,
        text: str,
        config: GenerationConfig | None = None,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[Chunk]:
        """Say something and stream the answer; both become part of the conversation.

        An answer that is stopped half-way is kept as far as it came.

        Raises:
            TemplateError: the model has no chat template, or it failed; the message is not kept.
            ContextLengthError: the conversation fills the context; the message is not kept.
        """
        asked = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        encoded = self.engine.encoder.conversation([*system, *self.messages, asked], self._known)
        answered = False
        try:
            for chunk in self.engine.stream(encoded.tokens, config, on_prefill=on_prefill):
                answered = answered or bool(chunk.tokens)
                yield chunk
        finally:
            answer = self.engine.last_generation
            if answered and answer is not None:
                self.messages += [asked, {"role": "assistant", "content": answer.text}]
                self._known = self.engine.encoder.answered(encoded, answer.text, answer.tokens)

    def undo(self) -> bool:
        """Drop the last question and its answer; False if there is none."""
        if not self.messages:
            return False
        del self.messages[-2:]
        self._known = None
        return True

    def clear(self) -> None:
        """Begin anew, with the same system prompt."""
        self.messages.clear()
        self._known = None
