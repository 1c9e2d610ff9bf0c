"""Refusals: the reason why a request is not answered, as an HTTP status and an error of the API."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from edgespec.api import protocol
from edgespec.errors import (
    ContextLengthError,
    EdgeSpecError,
    HubError,
    InconclusiveTrial,
    NoSuchModelError,
    TemplateError,
    UsageError,
)

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

RETRY_S = 5
_log = logging.getLogger("uvicorn.error")


class Refusal(Exception):
    """A request that is not answered.

    Attributes:
        status: the HTTP status.
        code: the API's name for the reason, where it has one.
        retry: whether the same request may succeed in a few seconds.
    """

    def __init__(self, status: int, message: str, code: str | None = None, *, retry: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message.encode("utf-8", "replace").decode()  # half surrogates cannot be sent
        self.code = code
        self.retry = retry

    @property
    def body(self) -> dict[str, Any]:
        """The error in the form of the API."""
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        return protocol.failure(self.message, kind, self.code)

    def response(self, body: dict[str, Any] | None = None) -> JSONResponse:
        """The error as a response.

        Args:
            body: in the form of another API; None for that of OpenAI's.
        """
        from starlette.responses import JSONResponse  # batches, which report errors too, do without it

        return JSONResponse(
            body or self.body, self.status, {"Retry-After": str(RETRY_S)} if self.retry else None
        )


class QueueFull(Refusal):
    def __init__(self) -> None:
        text = f"Too many requests are waiting. Try again in {RETRY_S} seconds."
        super().__init__(429, text, "queue_full", retry=True)


class Unavailable(Refusal):
    """The model failed and is being reloaded.

    Args:
        reason: why it failed, or why it could not be loaded; a sentence. Empty if it is back already.
    """

    def __init__(self, reason: str) -> None:
        text = f"The model is being reloaded after a failure: {reason}"
        if not reason:
            text = "The model was reloaded before the answer began."
        super().__init__(503, f"{text} Try again in {RETRY_S} seconds.", "model_unavailable", retry=True)


class LoadFailed(Refusal):
    """The model that a request needs could not be loaded; the next request tries again.

    Args:
        reason: a sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(503, f"The model could not be loaded: {reason}", "model_unavailable")


class ShuttingDown(Refusal):
    def __init__(self) -> None:
        super().__init__(503, "The server is shutting down.", "shutting_down")


def refusal_for(error: Exception) -> Refusal:
    """The refusal that reports an error to the client."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ContextLengthError):
        return Refusal(400, str(error), "context_length_exceeded")
    if isinstance(error, InconclusiveTrial):
        return Refusal(503, str(error), "trial_failed", retry=True)
    if isinstance(error, NoSuchModelError):
        return Refusal(404, str(error), "model_not_found")
    if isinstance(error, HubError):
        return Refusal(502, str(error), "hub_unavailable")
    if isinstance(error, UsageError | TemplateError):
        return Refusal(400, str(error))
    return Refusal(500, reason_of(error))


def reason_of(error: BaseException) -> str:
    """A failure in words: its message, or the kind of bug that it is."""
    if isinstance(error, EdgeSpecError | Refusal):
        return str(error)
    return f"This is a bug in EdgeSpec: {type(error).__name__}: {error}."


def logged_refusal(error: Exception) -> Refusal:
    """The refusal that reports an error to the client; a bug is logged, whatever is logged otherwise."""
    log_bug(error)
    return refusal_for(error)


def log_bug(error: Exception) -> None:
    """Log an error with its traceback if it is a bug."""
    if not isinstance(error, EdgeSpecError | Refusal):
        _log.critical("%s", reason_of(error), exc_info=error)


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that was logged, and of those that led to it.

    Their frames have the request and often the error itself: such a cycle lasts until the garbage collector
    runs.
    """
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and found not in seen:
            seen.append(found)
            found.__traceback__ = None
            left += [found.__cause__, found.__context__]
