"""A conversation with an engine, saved after every turn if it has a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.engine.engine import Engine
from edgespec.engine.sessions.file import Conversation, SessionFile
from edgespec.engine.sessions.fit import misfit
from edgespec.engine.turn import SavedStates, Turn
from edgespec.errors import EdgeSpecError, SessionError, UsageError
from edgespec.files.checked import CheckedFiles
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Chunk, Generation
from edgespec.images.parts import Image, image_of
from edgespec.text.encoding import EncodedConversation
from edgespec.text.unreadable import note_for


@dataclass(frozen=True)
class ResumedSession:
    """The outcome of resuming a saved session."""

    turns: int  # questions with an answer
    tokens: int  # tokens of the conversation
    restored: int  # how many of them had their state restored; the others are read with the next question
    reason: str  # why nothing was restored; empty if something was
    pending: str | None  # a question without an answer
    pending_images: tuple[Image, ...] = ()  # those that were shown with it


class Session:
    """The messages so far, and the tokens they were read as, so that each turn reads only its own text.

    Attributes:
        messages: {"role", "content"} of each turn, without the system prompt; questions that were asked about
            images have these, too, as "images".
        file: where the conversation is saved after every change; None if it is not.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self.engine = engine
        self.messages: list[dict[str, Any]] = []
        self.file: SessionFile | None = None
        self._system = system
        self._known: EncodedConversation | None = None
        self._pending: dict[str, Any] | None = None
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

    def ask(
        self,
        text: str,
        config: GenerationConfig | None = None,
        *,
        images: Iterable[object] = (),
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[Chunk]:
        """Ask a question and stream the answer; both become part of the conversation.

        A model that cannot see reads a note in place of each image of earlier questions.

        If an answer is stopped half-way, the part so far is kept.

        The thought before an answer is not kept: templates leave out those of earlier turns.

        Args:
            images: files that the question is about, their contents, or images of Pillow.

        Raises:
            TemplateError: the model has no chat template, or it failed; the message is not kept.
            UsageError: tools are offered, whose results a conversation of texts has no place for; or an image
                cannot be read, or the model cannot see it.
            ContextLengthError: the conversation fills the context; the message is not kept.
            SessionError: the conversation cannot be saved.
        """
        if config is not None and config.offers_tools:
            raise UsageError(
                "A session cannot call tools.",
                "Give the messages to Engine.generate, results of tools included.",
            )

        question: dict[str, Any] = {"role": "user", "content": text}
        if shown := [image if isinstance(image, Image) else image_of(image) for image in images]:
            self.require_sight()
            question["images"] = shown

        def prepare() -> Turn:
            encoded = self._encoded(question, config=config)
            self._pending = question
            self._save()
            return Turn(
                encoded.tokens, False, self._states, lambda answer: self._add(question, answer, encoded)
            )

        return self._stream(prepare, config, on_prefill)

    def require_sight(self) -> None:
        """Raise UsageError, with what to do, if the model cannot see."""
        reader = self.engine.encoder.images
        if reader is None:
            raise UsageError("Images cannot be read with this model.")
        reader.require_projector()

    @property
    def has_images(self) -> bool:
        """True if a question of the conversation was asked about images."""
        return any("images" in message for message in self.messages)

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
            question = {"role": "user", "content": text or "?"}
            if len(self._encoded(question, kept).tokens) + room <= self.engine.context:
                dropped = (len(self.messages) - len(kept)) // 2
                self.messages[:] = kept
                self._known = None
                self._save()
                return dropped
        return 0

    def save_to(self, file: SessionFile | str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Save the conversation to a file, now and after every change.

        Args:
            file: open already, or its name or path, as `SessionFile` takes it.
            overwrite: replace another conversation that is saved there.

        Raises:
            SessionError: the file cannot be opened or written, is no session, or holds another conversation.
        """
        opened = file if isinstance(file, SessionFile) else SessionFile(file)
        try:
            opened.require_free(overwrite=overwrite or opened is self.file)
        except SessionError:
            if opened is not file:
                opened.close()
            raise
        file = opened
        self.close()
        self._attach(file)
        self._save()
        if self._states is not None and self._known is not None and not self.engine.closed:
            self.engine.save_conversation(self._known.tokens, self._states)

    def resume(self, file: SessionFile | str | os.PathLike[str]) -> ResumedSession | None:
        """Resume a saved conversation, and save to its file after every change.

        Its keys and values are restored if the model, the context, the build and the projector of its images
        are the same. Otherwise, the conversation is read again with the next question, unless the model is
        another one.

        Args:
            file: as for `save_to`.

        Returns:
            How it was resumed; None if the file is empty, which then gets the conversation so far.

        Raises:
            SessionError: the file is not a session, or one of another model.
            TemplateError: the template fails on this conversation.
        """
        if isinstance(file, SessionFile):
            return self._resume(file)
        file = SessionFile(file)
        try:
            return self._resume(file)
        except EdgeSpecError:
            if self.file is not file:
                file.close()
            raise

    def _resume(self, file: SessionFile) -> ResumedSession | None:
        saved = file.read()
        if saved is None:
            self.save_to(file)
            return None
        reason = misfit(saved, file, self._identity(saved.messages), self.engine.context)
        self.close()
        self._system, self._known = saved.system, saved.known
        self.messages[:] = saved.messages
        self._attach(file)
        tokens = list(saved.known.tokens) if saved.known else []
        restored = 0
        if tokens and self._states is not None and not reason:
            restored = self.engine.restore_conversation(tokens, self._states)
        if saved.messages and not restored and not reason:
            reason = (
                "Images are read again first" if self.has_images else "The saved state is missing or damaged"
            )
        pending = saved.pending or {}
        return ResumedSession(
            self.turns,
            len(tokens),
            restored,
            reason,
            pending.get("content"),
            tuple(pending.get("images", ())),
        )

    def detach(self) -> None:
        """Leave the engine, which may then be closed; `attach` gives the session another one."""
        self._stop_keeping_states()
        self._known = None

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
        messages, encoder = self._for_encoder(self.messages[:-1]), self.engine.encoder
        with self.engine.held():
            if self._known is not None and self.has_images:
                encoder.conversation(messages, config=config)  # reads the images
            if self._known is not None and encoder.knows(self._known.tokens):
                return self._known, said
            if not said:  # it was cut off in its thought, which is not kept
                return encoder.conversation(messages, config=config), said
            return encoder.begun(messages, said), said

    def _extend(self, said: str, more: Generation, begun: EncodedConversation) -> None:
        self.messages[-1] = {"role": "assistant", "content": said + more.text}
        self._remember(more, begun)

    def _for_encoder(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages behind the system prompt, if there is one, with images as parts of their contents."""
        beginning = [{"role": "system", "content": self._system}] if self._system else []
        sees = self.engine.sees_images
        return [*beginning, *(_with_parts(message, sees=sees) for message in messages)]

    def _encoded(
        self,
        question: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]] | None = None,
        config: GenerationConfig | None = None,
    ) -> EncodedConversation:
        told = self.messages if messages is None else messages
        known = self._known if messages is None else None
        with self.engine.held():
            conversation = self._for_encoder([*told, question])
            return self.engine.encoder.conversation(conversation, known, config=config)

    def _add(self, question: dict[str, Any], answer: Generation, encoded: EncodedConversation) -> None:
        self.messages += [question, {"role": "assistant", "content": answer.text}]
        self._remember(answer, encoded)

    def _remember(self, answer: Generation, encoded: EncodedConversation) -> None:
        """Remember as which tokens the conversation was read."""
        self._known = None
        if not self.engine.closed:
            with self.engine.held():
                self._known = self.engine.encoder.answered(encoded, answer.text, answer.tokens)

    def _identity(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Everything that the tokens and states of a conversation depend on, except its text."""
        reader = self.engine.encoder.images
        pictured = reader is not None and any("images" in message for message in messages)
        projector = reader.identity if reader is not None and pictured else ""
        return self.engine.target.identity | ({"projector": projector} if projector else {})

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
                self._identity(self.messages),
                self._system,
                self.messages,
                self._pending,
                self._known,
                model_path=str(target.model.path.absolute()),
            )
        )
        if not self.messages and self._pending is None:
            self._states.clear()


def _with_parts(message: Mapping[str, Any], *, sees: bool) -> dict[str, Any]:
    """A message without "images", which are parts of its content, or notes before it."""
    text = message["content"]
    images: Sequence[Image] = message.get("images", ())
    if not images:
        return {"role": message["role"], "content": text}
    if not sees:
        return {
            "role": message["role"],
            "content": "\n".join([*(note_for("An image") for _ in images), text]),
        }
    parts = [*(image.part for image in images), {"type": "text", "text": text}]
    return {"role": message["role"], "content": parts}
