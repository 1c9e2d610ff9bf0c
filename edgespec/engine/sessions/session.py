"""A conversation with an engine, saved after every turn if it has a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edgespec.arguments import checks_arguments
from edgespec.engine.engine import Engine
from edgespec.engine.sessions.file import Conversation, SessionFile
from edgespec.engine.sessions.fit import misfit
from edgespec.engine.turn import SavedStates, Turn
from edgespec.errors import SessionError, UsageError
from edgespec.files.checked import CheckedFiles
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Chunk, Generation
from edgespec.text.encoding import EncodedConversation


@dataclass(frozen=True)
class ResumedSession:
    """The outcome of resuming a saved session.

    Attributes:
        turns: questions with an answer.
        tokens: tokens of the conversation.
        restored: how many of them had their state restored; the others are read with the next question.
        reason: why nothing was restored; empty if something was.
        pending: a question without an answer.
    """

    turns: int
    tokens: int
    restored: int
    reason: str
    pending: str | None


class Session:
    """The messages so far, and the tokens they were read as, so that each turn reads only its own text.

    Attributes:
        messages: {"role", "content"} of each turn, without the system prompt.
        file: where the conversation is saved after every change; None if it is not.
    """

    @checks_arguments
    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self.engine = engine
        self.messages: list[dict[str, str]] = []
        self.file: SessionFile | None = None
        self._system = system
        self._known: EncodedConversation | None = None
        self._pending: str | None = None
        self._states: SavedStates | None = None

    def __repr__(self) -> str:
        """Return, for example, <Session with big.gguf, 3 turns, saved in trip.json>."""
        turns = "1 turn" if self.turns == 1 else f"{self.turns} turns"
        saved = f", saved in {self.file.path}" if self.file is not None else ""
        return f"<Session with {self.engine.target.model.path.name}, {turns}{saved}>"

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self._system

    @system.setter
    @checks_arguments
    def system(self, text: str | None) -> None:
        self._system = text
        self._known = None
        self._save()

    @property
    def turns(self) -> int:
        """Questions with an answer."""
        return len(self.messages) // 2

    @property
    def unsaved(self) -> str:
        """The reason why the state of the cache cannot be saved; empty if it can.

        The conversation itself is saved.
        """
        return self._states.target.failure if self._states is not None else ""

    @checks_arguments
    def ask(
        self,
        text: str,
        config: GenerationConfig | None = None,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[Chunk]:
        """Ask a question and stream the answer; both become part of the conversation.

        If an answer is stopped half-way, the part so far is kept.

        The thought before an answer is not kept: templates leave out those of earlier turns.

        Raises:
            TemplateError: the model has no chat template, or it failed; the message is not kept.
            UsageError: tools are offered, whose results a conversation of texts has no place for.
            ContextLengthError: the conversation fills the context; the message is not kept.
            SessionError: the conversation cannot be saved.
        """
        if config is not None and config.offers_tools:
            raise UsageError(
                "A session cannot call tools.",
                "Give the messages to Engine.generate, results of tools included.",
            )

        def prepare() -> Turn:
            encoded = self._encoded(text, config=config)
            self._pending = text
            self._save()
            return Turn(encoded.tokens, False, self._states, lambda answer: self._add(text, answer, encoded))

        return self._stream(prepare, config, on_prefill)

    @checks_arguments
    def continue_answer(
        self,
        config: GenerationConfig | None = None,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[Chunk]:
        """Go on with the last answer, which was cut off or stopped; what comes becomes a part of it.

        The model reads its own tokens, and nothing after them, so the text is the one that it would have
        written without the interruption. The chunks have the new text alone.

        Raises:
            SessionError: there is no answer to continue, or the conversation cannot be saved.
            ContextLengthError: the conversation fills the context.
        """
        if not self.messages:
            raise SessionError("There is no answer to continue.", "Ask something first.")

        def prepare() -> Turn:
            begun, said = self._begun(config)
            raw = bool(said)  # the thought, if there was one, is over
            return Turn(begun.tokens, raw, self._states, lambda answer: self._extend(said, answer, begun))

        return self._stream(prepare, config, on_prefill)

    def _stream(
        self,
        prepare: Callable[[], Turn],
        config: GenerationConfig | None,
        on_prefill: Callable[[int, int], None] | None,
    ) -> Iterator[Chunk]:
        """Stream an answer, and save the conversation when it has ended."""
        answer = self.engine.stream_turn(prepare, config, on_prefill=on_prefill)

        def chunks() -> Iterator[Chunk]:
            try:
                yield from answer
            finally:
                self._pending = None
                self._save()

        return chunks()

    def undo(self) -> bool:
        """Drop the last question and its answer; False if there is none."""
        if not self.messages:
            return False
        del self.messages[-2:]
        self._known = None
        self._save()
        return True

    def clear(self) -> None:
        """Start a new conversation with the same system prompt.

        The session's file keeps the conversation so far; the new one is not saved until it gets a file.
        """
        self.close()
        self.messages.clear()
        self._known = None

    @checks_arguments
    def drop_oldest(self, text: str = "", room: int = 256) -> int:
        """Drop as many of the oldest turns as needed for a question and its answer to fit.

        Args:
            text: the question.
            room: tokens to leave free for the answer.

        Returns:
            How many turns were dropped; 0 if dropping turns does not help.
        """
        room = min(room, self.engine.context // 2)
        kept = list(self.messages)
        while kept:
            del kept[:2]
            if len(self._encoded(text or "?", kept).tokens) + room <= self.engine.context:
                dropped = (len(self.messages) - len(kept)) // 2
                self.messages[:] = kept
                self._known = None
                self._save()
                return dropped
        return 0

    @checks_arguments
    def save_to(self, file: SessionFile | str | os.PathLike[str]) -> None:
        """Save the conversation to a file, now and after every change.

        Args:
            file: open already, or its name or path, as `SessionFile` takes it.

        Raises:
            SessionError: the file cannot be opened or written.
        """
        if not isinstance(file, SessionFile):
            file = SessionFile(file)
        self.close()
        self._attach(file)
        self._save()
        if self._states is not None and self._known is not None and not self.engine.closed:
            self.engine.save_conversation(self._known.tokens, self._states)

    @checks_arguments
    def resume(self, file: SessionFile | str | os.PathLike[str]) -> ResumedSession | None:
        """Resume a saved conversation, and save to its file after every change.

        Its keys and values are restored if the model, the context and the build are the same. With another
        build or context size, the conversation is read again with the next question.

        Args:
            file: as for `save_to`.

        Returns:
            How it was resumed; None if the file is empty, which then gets the conversation so far.

        Raises:
            SessionError: the file is not a session, or one of another model.
            TemplateError: the template fails on this conversation.
        """
        if not isinstance(file, SessionFile):
            file = SessionFile(file)
        saved = file.read()
        if saved is None:
            self.save_to(file)
            return None
        reason = misfit(saved, file, self.engine.target.identity, self.engine.context)
        self.close()
        self._system, self._known = saved.system, saved.known
        self.messages[:] = saved.messages
        self._attach(file)
        tokens = list(saved.known.tokens) if saved.known else []
        restored = 0
        if tokens and self._states is not None and not reason:
            restored = self.engine.restore_conversation(tokens, self._states)
        if saved.messages and not restored and not reason:
            reason = "The saved state is missing or damaged"
        return ResumedSession(self.turns, len(tokens), restored, reason, saved.pending)

    def detach(self) -> None:
        """Leave the engine, which may then be closed; `attach` gives the session another one."""
        self._stop_keeping_states()
        self._known = None

    @checks_arguments
    def attach(self, engine: Engine) -> None:
        """Go on with another engine, which reads the conversation with the next question.

        Raises:
            SessionError: the conversation cannot be saved.
        """
        self.engine = engine
        if self.file is not None:
            self._attach(self.file)
            self._save()

    def close(self) -> None:
        """Stop saving; what was saved remains."""
        self._stop_keeping_states()
        if self.file is not None:
            self.file.close()
        self.file = None

    def _stop_keeping_states(self) -> None:
        if self._states is not None:
            self._states.closed = True  # for an answer that has not ended
        self._states = None

    def _begun(self, config: GenerationConfig | None) -> tuple[EncodedConversation, str]:
        """The conversation up to the end of its last answer, as tokens, and the text of that answer."""
        said = self.messages[-1]["content"]
        if self._known is not None:
            return self._known, said
        messages, encoder = [*self._beginning, *self.messages[:-1]], self.engine.encoder
        with self.engine.held():
            if not said:  # it was cut off in its thought, which is not kept
                return encoder.conversation(messages, config=config), said
            return encoder.begun(messages, said), said

    def _extend(self, said: str, more: Generation, begun: EncodedConversation) -> None:
        self.messages[-1] = {"role": "assistant", "content": said + more.text}
        self._remember(more, begun)

    @property
    def _beginning(self) -> list[dict[str, str]]:
        """The system prompt as a message, if there is one."""
        return [{"role": "system", "content": self._system}] if self._system else []

    def _encoded(
        self,
        text: str,
        messages: list[dict[str, str]] | None = None,
        config: GenerationConfig | None = None,
    ) -> EncodedConversation:
        told = self.messages if messages is None else messages
        question = {"role": "user", "content": text}
        known = self._known if messages is None else None
        with self.engine.held():
            conversation = [*self._beginning, *told, question]
            return self.engine.encoder.conversation(conversation, known, config=config)

    def _add(self, text: str, answer: Generation, encoded: EncodedConversation) -> None:
        self.messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer.text},
        ]
        self._remember(answer, encoded)

    def _remember(self, answer: Generation, encoded: EncodedConversation) -> None:
        """Remember as which tokens the conversation was read."""
        self._known = None
        if not self.engine.closed:
            with self.engine.held():
                self._known = self.engine.encoder.answered(encoded, answer.text, answer.tokens)

    def _attach(self, file: SessionFile) -> None:
        self.file = file
        store = self.engine.target.store_in(CheckedFiles(file.states))
        self._states = SavedStates(store, file.states / "drafter")

    def _save(self) -> None:
        if self.file is None or self._states is None:
            return
        target = self.engine.target
        self.file.write(
            Conversation(
                target.identity,
                self._system,
                self.messages,
                self._pending,
                self._known,
                model_path=str(target.model.path.absolute()),
            )
        )
        if not self.messages and self._pending is None:
            self._states.clear()
