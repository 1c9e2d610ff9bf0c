"""The slash commands that remove, repeat, change or extend the last turn of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.cli.conversation.echo import with_shell_modes
from edgespec.cli.conversation.editor import edited
from edgespec.cli.conversation.slash.typed_chat import TypedChat, TypedQuestion
from edgespec.errors import UsageError


class RewriteCommands:
    """The commands of one chat."""

    def __init__(self, chat: TypedChat) -> None:
        self._chat = chat

    def undo(self, _rest: str) -> None:
        """Remove the last question and its answer."""
        self._chat.last_question = None
        undone = self._chat.chat.undo()
        self._chat.say("Removed the last turn." if undone else "Nothing to undo.")

    def retry(self, _rest: str) -> None:
        """Answer the last question again."""
        question = self._last_question
        if question is None:
            self._chat.say("Nothing to retry.")
            return
        chat = self._chat.chat
        before = chat.session.messages[-1:]
        answered = self._remove(question)
        self._chat.answer(question)
        config = chat.config
        repeats = not config.draws or config.seed is not None
        if answered and repeats and chat.session.messages[-1:] == before:
            vary = "/set temperature 0.7" if not config.draws else "/set seed random"
            self._chat.say(f"The same answer again; {vary} varies it.")

    def edit(self, rest: str) -> None:
        """Answer another question instead of the last one, which an editor opens if none is given."""
        question = self._last_question
        if question is None:
            self._chat.say("No question to edit.")
            return
        if rest:
            self._remove(question)
            self._chat.answer(question._replace(text=rest))
            return
        with with_shell_modes():
            changed = edited(question.text)
        if changed is None or not changed.strip() or changed == question.text:
            self._chat.say("The question is unchanged.")
            return
        self._remove(question)
        self._chat.say(f">>> {changed}")
        self._chat.answer(question._replace(text=changed))

    def continue_answer(self, _rest: str) -> None:
        """Continue the last answer."""
        if not self._chat.chat.session.messages:
            raise UsageError("No answer to continue.", "Ask something first.")
        self._chat.continue_answer()

    @property
    def _last_question(self) -> TypedQuestion | None:
        messages = self._chat.chat.session.messages
        if self._chat.last_question is None and messages:
            self._chat.last_question = _question(messages[-2])
        return self._chat.last_question

    def _remove(self, question: TypedQuestion) -> bool:
        """Remove a question and its answer; False if it got none, and so was not kept."""
        messages = self._chat.chat.session.messages
        if messages and _question(messages[-2]) == question:
            return self._chat.chat.undo()
        return False


def _question(message: Mapping[str, Any]) -> TypedQuestion:
    return TypedQuestion(message["content"], tuple(message.get("images", ())))
