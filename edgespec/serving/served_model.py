"""A loaded model and what the server derives from it, all of which a reload replaces."""

from __future__ import annotations

from edgespec.engine.engine import Engine
from edgespec.generation.config import GenerationConfig
from edgespec.serving.ollama.model_card import ModelCard
from edgespec.serving.written_answers import WrittenAnswers


class ServedModel:
    """A loaded model; closes its engine if the description cannot be made.

    Args:
        engine: closed with the model.
        defaults: settings for what requests leave open.

    Attributes:
        card: the description of its files, as they were when it was loaded.
        written: the answers that it wrote, as its own tokens.
    """

    def __init__(self, engine: Engine, defaults: GenerationConfig) -> None:
        self.engine = engine
        self.defaults = defaults
        try:
            capabilities = ["completion"]
            if engine.has_chat_template:
                capabilities.append("tools")
            if engine.can_think:
                capabilities.append("thinking")
            if engine.sees_images:
                capabilities.append("vision")
            self.card = ModelCard(engine.target.model.path, engine.context, capabilities)
            model = engine.target.model
            self.written = WrittenAnswers(
                engine.target.identity["model"], model.vocabulary.n_tokens, engine.prompt_files
            )
        except BaseException:
            engine.close()
            raise

    def cancel(self) -> None:
        """End all answers."""
        self.engine.cancel()

    def close(self) -> None:
        self.engine.close()
