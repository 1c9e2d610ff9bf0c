"""The model of a chat, and how another one takes its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgespec.errors import TemplateError

if TYPE_CHECKING:
    from edgespec.cli.options.sampling import ChosenSampling
    from edgespec.cli.screen.terminal import Terminal
    from edgespec.config import Config
    from edgespec.engine.engine import Engine


class ChangeableModel:
    """Loads a model, and others in its place; closes the one that is loaded in the end.

    Args:
        sample: chooses the settings for a loaded model.

    Attributes:
        engine: what is loaded now.
    """

    def __init__(
        self,
        loading: Config,
        terminal: Terminal,
        sample: Callable[[Config, Engine], ChosenSampling],
    ) -> None:
        self._loading = loading
        self._terminal = terminal
        self._sample = sample
        self.engine: Engine = terminal.load(loading)

    def __enter__(self) -> ChangeableModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    @property
    def sampling(self) -> ChosenSampling:
        """The settings for the model: given ones, and what its maker recommends."""
        return self._sample(self._loading, self.engine)

    def load_again(self) -> None:
        """Load the same model again after a worker or a card was lost: with those left, or from this disk."""
        self.engine.close()
        self.engine = self._terminal.load(self._loading.with_(leave_out_missing=True))

    def replace_by(self, name: str) -> None:
        """Load another model with the same options. A named drafter, projector and adapters are not kept.

        The two are never in memory at once. If the other one cannot be loaded, this one is loaded again.
        """
        from edgespec.models.gguf.header import read_header
        from edgespec.models.hub import catalog

        with self._terminal.working() as progress:
            read_header(catalog.find(name, progress))  # before the present one is given up
        speculation = self._loading.speculation
        draft = "auto" if speculation.names_a_model or speculation.uses_mtp else speculation.draft
        images = self._loading.model.reads_images
        loading = self._loading.with_(model=name, draft=draft, lora=(), mmproj=None, images=images)
        self.engine.close()
        try:
            engine = self._terminal.load(loading)
            if not engine.has_chat_template:
                engine.close()
                raise TemplateError(f"{name} has no chat template, so it cannot chat.", "Name another model.")
        except BaseException:
            self.engine = self._terminal.load(self._loading)
            raise
        self.engine, self._loading = engine, loading
