"""The slash command /model."""

from __future__ import annotations

from edgespec.cli.conversation.slash.typed_chat import TypedChat
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.units import readable


class ModelCommand:
    """`/model` of one chat."""

    def __init__(self, chat: TypedChat) -> None:
        self._chat = chat

    def change(self, name: str) -> None:
        """Switch to another model, or list the models here if none is named."""
        if not name:
            self._list()
            return
        models, chat = self._chat.models, self._chat.chat
        if models is None:
            raise UsageError("This chat cannot switch models.", "Start another chat.")
        chat.session.detach()
        try:
            models.replace_by(name.strip('"'))
        except EdgeSpecError:
            chat.use(models.engine, models.sampling)
            raise
        except BaseException:  # Ctrl-C, which stops the loading
            if not models.engine.closed:
                chat.use(models.engine, models.sampling)
            raise
        chat.use(models.engine, models.sampling)
        reads = "; it will read the conversation with your next question" if chat.session.messages else ""
        self._chat.say(f"Switched to {chat.model_name}{reads}.")

    def _list(self) -> None:
        from edgespec.models.hub.inventory import local_models
        from edgespec.models.hub.repository import Hub

        self._chat.say(f"Current model: {self._chat.chat.description}.")
        found = {model.name: readable(model.n_bytes) for model in local_models(Hub.without_token())}
        self._chat.chat.terminal.rows(found)
