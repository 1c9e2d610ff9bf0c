"""The fit of a saved conversation to the loaded model."""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.base.option import named
from edgespec.engine.sessions.file import Conversation, SessionFile, model_name
from edgespec.errors import SessionError

_REASONS = {
    "weights": "with other weights of this model, or from another copy of its file",
    "build": "by another build of llama.cpp, or on another processor",
    "context": "with another context size",
    "projector": "with another projector, or from another copy of its file",
}


def misfit(saved: Conversation, file: SessionFile, now: Mapping[str, str], context: int) -> str:
    """The reason why the saved states of a conversation do not fit; empty if they do.

    Args:
        now: the identity of the conversations that the engine saves; see `Session`.
        context: tokens that it holds.

    Raises:
        SessionError: the conversation itself does not fit.
    """
    then = saved.identity
    if not _same_model(then.get("model", ""), now.get("model", "")):
        was, loaded = saved.model_name, model_name(now)
        other = f"{was}, but {loaded}" if was != loaded else f"another {was} than the one that"
        raise SessionError(
            f'Session "{file.path.stem}" uses {other} is loaded.',
            f"Load {was} to resume it, or choose another session name.",
        )
    if saved.known and len(saved.known.tokens) >= context:
        raise SessionError(
            f'Session "{file.path.stem}" has {len(saved.known.tokens)} tokens, but the context holds '
            f"{context}.",
            f"Use {named('context', -(-(len(saved.known.tokens) + 512) // 1024) * 1024)}.",
        )
    differing = [name for name in now if name != "model" and then.get(name) != now[name]]
    if not differing:
        return ""
    return f"Saved {_REASONS.get(differing[0], 'with other settings of the model')}"


def _same_model(then: str, now: str) -> bool:
    """True if two identities mean one model; earlier versions appended a sample of the weights."""
    return then == now or then.startswith(f"{now} ")
