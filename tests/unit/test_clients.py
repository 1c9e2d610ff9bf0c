"""The server that programs are run against depends on names of EdgeSpec's own."""

from __future__ import annotations

from edgespec.serving.completion_handler import CompletionHandler
from tests.clients.server import ScriptedHandler


def test_the_scripted_handler_replaces_methods_that_handlers_have() -> None:
    """So that a renamed method is noticed here, not only where the programs are installed."""
    own = {name for name, value in vars(ScriptedHandler).items() if callable(value)} - {"_changed"}
    assert own <= set(vars(CompletionHandler))
