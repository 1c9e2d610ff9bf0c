"""`edgespec serve` with a scripted model: python -m tests.clients.server RECORDS serve MODEL ...

Appends a line of JSON to the file RECORDS for every answer and every refused request.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from edgespec.api.endpoint import Endpoint
from edgespec.cli.main import main
from edgespec.generation.result import Generation
from edgespec.serving import app, completion_handler
from tests.clients.script import next_answer, words_in

_REFUSED = 400
_CLOSING = 8  # tokens that only end a prompt: the answer's opening, which a thought may follow
_SHOWN = 16
_MAX_TOKENS = 200  # of an answer whose form the client decides

_lock = threading.Lock()
_records = Path()


def record(**entry: Any) -> None:
    """Append a line to the records."""
    with _lock, _records.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


class ScriptedHandler(completion_handler.CompletionHandler):
    """Answers as the script says, and records what came and went."""

    _latest: tuple[int, ...] = ()  # the tokens of the latest prompt with tools

    def _prepare(self, content: bytearray, endpoint: Endpoint) -> Any:
        prepared = super()._prepare(content, endpoint)
        request = getattr(prepared, "request", None)
        if request is None or not request.chat:
            return prepared
        config = request.config
        tools = config.tools if config.tool_choice != "none" else ()
        scripted = next_answer(request.prompt, tools)
        forced = config.tool_choice not in ("auto", "none") and scripted.call is None
        if forced or config.grammar is not None:  # the client wants a form, which the model fills in
            config = config.with_(max_tokens=min(config.max_tokens or _MAX_TOKENS, _MAX_TOKENS))
        else:
            config = scripted.enforced_on(config)
        config = config.with_(temperature=0.0, stop=(), repeat_penalty=1.0)
        prepared.offered = [tool.name for tool in request.config.tools]
        if prepared.offered:
            prepared.changed = self._changed(prepared)
        prepared.request = replace(request, config=config)
        return prepared

    def _changed(self, prepared: Any) -> str:
        """Where a prompt leaves the one before it, if that is not at its end; empty otherwise."""
        before, now = self._latest, tuple(prepared.prompts[0])
        self._latest = now
        same = next((at for at, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), len(before))
        if same >= len(before) - _CLOSING:
            return ""
        spelled = prepared.model.engine.target.model.vocabulary.spelled
        was, is_now = (
            spelled(list(tokens[max(same - _SHOWN, 0) : same + _SHOWN])) for tokens in (before, now)
        )
        return f"changed at token {same:,} of {len(before):,}: {was!r} became {is_now!r}"

    async def _answered(self, exchange: Any, index: int, answer: Generation) -> None:
        await super()._answered(exchange, index, answer)
        messages = exchange.request.prompt if exchange.request.chat else []
        results = [str(message.get("content")) for message in messages if message["role"] == "tool"]
        record(
            kind="answer",
            prompt_tokens=answer.prompt_tokens,
            read_tokens=answer.prompt_tokens - answer.cached_tokens,
            offered=getattr(exchange, "offered", []),
            called=[call.name for call in answer.tool_calls],
            results=[word for result in results for word in words_in(result)],
            text=answer.text,
            changed=getattr(exchange, "changed", ""),
            warnings=list(exchange.request.warnings),
        )


class RecordingApplication(app.Application):
    """Records the requests that are refused, for whatever reason."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, body = 0, bytearray()

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if status >= _REFUSED:
                body.extend(message.get("body", b""))
            await send(message)

        await super().__call__(scope, receive, watched)
        if status >= _REFUSED:
            reason = body.decode("utf-8", "replace")
            record(kind="refused", method=scope["method"], path=scope["path"], status=status, reason=reason)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the parent
    _records = Path(sys.argv.pop(1))
    completion_handler.CompletionHandler = ScriptedHandler  # type: ignore[misc]
    app.Application = RecordingApplication  # type: ignore[misc]
    raise SystemExit(main())
