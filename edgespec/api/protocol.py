"""The JSON of the OpenAI API: answers, usage, models and errors."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from edgespec.api import speculation
from edgespec.api.text_logprobs import EchoedPrompt, TextLogprobs, joined
from edgespec.api.tools import custom_input
from edgespec.generation.result import Chunk, Generation, TokenLogprob, tokens_per_second
from edgespec.generation.tools import CallPiece, ToolCall


class CompletionBuilder:
    """Builds the bodies that answer one request, all with the same id.

    Args:
        model: the name of the model in them.
        key: what the id ends with; None for a random one.
        warnings: what of the request has no effect.
        timed: whether they report times, which differ from run to run.
        speculates: whether pieces report what was drafted and accepted.
        custom_tools: names of tools that take a text.
        calls_function: whether a call is a `function_call`, as the API had it before there were tools.
        n_prompts: how many prompts the answers are to; each has as many.
        echoed: for each answer, the prompt that is to stand in front of it; empty if none are.
        scored: whether the log-probabilities of these prompts are wanted.
    """

    def __init__(
        self,
        *,
        chat: bool,
        model: str,
        key: str | None = None,
        warnings: Sequence[str] = (),
        timed: bool = False,
        speculates: bool = False,
        custom_tools: Collection[str] = (),
        calls_function: bool = False,
        n_prompts: int = 1,
        echoed: Sequence[EchoedPrompt] = (),
        scored: bool = False,
    ) -> None:
        self._chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{key or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._warnings = warnings
        self._timed = timed
        self._speculates = speculates
        self._texts: defaultdict[int, TextLogprobs] = defaultdict(TextLogprobs)  # by answer
        self._custom_tools = custom_tools
        self._calls_function = calls_function
        self._custom: dict[int, list[CallPiece]] = {}  # calls of these tools, by answer, until they are whole
        self._n_prompts = n_prompts
        self._echoed = echoed
        self._scored = scored
        self._begun: set[int] = set()  # answers whose prompts were streamed

    def whole(self, answers: Sequence[Generation]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = []
        for index, answer in enumerate(answers):
            before = self._echoed[index].text if self._echoed else ""
            text = {"message": self._message(answer)} if self._chat else {"text": before + answer.text}
            choices.append(
                {
                    "index": index,
                    **text,
                    "logprobs": self._logprobs(index, answer.logprobs, answer.prompt_logprobs),
                    "finish_reason": self._reason(answer),
                }
            )
        kind = "chat.completion" if self._chat else "text_completion"
        body = {
            **self._head,
            "object": kind,
            "choices": choices,
            "usage": self._usage(answers),
            **self._notes,
        }
        return body | {"timings": timings(answers)} if self._timed else body

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Return the beginning of a streamed answer."""
        if self._chat:
            return [self._piece(index, {"role": "assistant", "content": ""}, None)]
        return [] if self._scored else self._echo(index, ())

    def _echo(self, index: int, found: Sequence[TokenLogprob | None]) -> list[dict[str, Any]]:
        """Return the prompt in front of a streamed text, once."""
        if not self._echoed or index in self._begun:
            return []
        self._begun.add(index)
        event = self._piece(index, self._echoed[index].text, None)
        event["choices"][0]["logprobs"] = self._logprobs(index, (), found)
        return [event]

    def piece(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        echo = self._echo(index, chunk.prompt_logprobs)
        delta: dict[str, Any] = {}
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.text:
            delta["content"] = chunk.text
        calls = _call_deltas(self._without_custom(index, chunk.calls)) if chunk.calls else []
        if calls and self._calls_function:
            delta["function_call"] = calls[0]["function"]
        elif calls:
            delta["tool_calls"] = calls
        told = speculation.of_pass(chunk) if self._speculates else {}
        if not delta and not chunk.logprobs and not told:
            return echo
        event = self._piece(index, delta if self._chat else chunk.text, None)
        event["choices"][0]["logprobs"] = self._logprobs(index, chunk.logprobs)
        return [*echo, event | told]

    def end(self, index: int, answer: Generation) -> list[dict[str, Any]]:
        echo = self._echo(index, answer.prompt_logprobs)
        whole = self._custom_deltas(index)
        delta: dict[str, Any] = {"tool_calls": whole} if whole else {}
        event = {**self._piece(index, delta if self._chat else "", self._reason(answer)), **self._notes}
        event |= speculation.of_answer(answer) if self._speculates else {}
        return [*echo, event | {"timings": timings([answer])} if self._timed else event]

    def usage(self, answers: Sequence[Generation]) -> list[dict[str, Any]]:
        """The usage, as a separate piece without choices."""
        return [{**self._head, "object": self._piece_kind, "choices": [], "usage": self._usage(answers)}]

    @property
    def _notes(self) -> dict[str, Any]:
        """The warnings so far; calls may add some."""
        return {"warnings": list(self._warnings)} if self._warnings else {}

    def _usage(self, answers: Sequence[Generation]) -> dict[str, Any]:
        counts = usage(answers, self._n_prompts)
        if self._timed:  # what was cached differs from run to run, too
            cached = answers[0].cached_tokens if answers else 0
            counts["prompt_tokens_details"] = {"cached_tokens": cached}
        return counts

    def _message(self, answer: Generation) -> dict[str, Any]:
        text = None if answer.tool_calls and not answer.text else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls and self._calls_function:
            message["function_call"] = answer.tool_calls[0].to_json()["function"]
        elif answer.tool_calls:
            message["tool_calls"] = [
                _custom(call) if call.name in self._custom_tools else call.to_json()
                for call in answer.tool_calls
            ]
        return message

    def _reason(self, answer: Generation) -> str:
        if answer.finish_reason == "tool_calls":
            return "function_call" if self._calls_function else "tool_calls"
        return "length" if answer.finish_reason == "length" else "stop"

    def _without_custom(self, index: int, pieces: Sequence[CallPiece]) -> list[CallPiece]:
        """The pieces of other calls; those of custom tools are kept until the answer is over."""
        held = self._custom.setdefault(index, [])
        known = {piece.index for piece in held}
        others = []
        for piece in pieces:
            if piece.index in known or piece.name in self._custom_tools:
                known.add(piece.index)
                held.append(piece)
            else:
                others.append(piece)
        return others

    def _custom_deltas(self, index: int) -> list[dict[str, Any]]:
        """The calls of custom tools, each as a whole."""
        calls: dict[int, ToolCall] = {}
        for piece in self._custom.pop(index, ()):
            known = calls.get(piece.index, ToolCall(piece.id, piece.name, ""))
            calls[piece.index] = ToolCall(known.id, known.name, known.arguments + piece.arguments)
        return [{"index": place, **_custom(call)} for place, call in calls.items()]

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _piece(self, index: int, delta: object, reason: str | None) -> dict[str, Any]:
        choice = {"index": index, ("delta" if self._chat else "text"): delta, "finish_reason": reason}
        return {**self._head, "object": self._piece_kind, "choices": [choice | {"logprobs": None}]}

    def _logprobs(
        self, index: int, found: Sequence[TokenLogprob], of_prompt: Sequence[TokenLogprob | None] = ()
    ) -> dict[str, Any] | None:
        if self._chat:
            return {"content": [_logprob(item) for item in found], "refusal": None} if found else None
        if self._scored and of_prompt:
            prompt = self._texts[index].of_prompt(self._echoed[index], of_prompt)
            return joined(prompt, self._texts[index].of_answer(found))
        return self._texts[index].of_answer(found) if found else None


def usage(answers: Sequence[Generation], n_prompts: int) -> dict[str, Any]:
    """Tokens read and generated.

    Args:
        n_prompts: how many prompts the answers are to; each counts once.
    """
    read = sum(answer.prompt_tokens for answer in answers[:: max(len(answers) // n_prompts, 1)])
    written = sum(len(answer.tokens) for answer in answers)
    counts: dict[str, Any] = {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }
    thought = sum(answer.reasoning_tokens for answer in answers)
    return counts | {"completion_tokens_details": {"reasoning_tokens": thought}} if thought else counts


def timings(answers: Sequence[Generation]) -> dict[str, Any]:
    """Return the times of answers, by the names in llama.cpp's server; of several, all together."""
    cached = answers[0].cached_tokens if answers else 0
    read = answers[0].prompt_tokens - cached if answers else 0
    read_ms = 1e3 * max((answer.timings.prefill_s for answer in answers), default=0.0)
    written = sum(len(answer.tokens) for answer in answers)
    written_ms = 1e3 * max((answer.timings.decode_s for answer in answers), default=0.0)
    rate = tokens_per_second(answers)
    passes = [record for answer in answers for record in answer.passes]
    return {
        "cache_n": cached,
        "prompt_n": read,
        "prompt_ms": round(read_ms, 3),
        "prompt_per_token_ms": round(read_ms / read, 3) if read else 0.0,
        "prompt_per_second": round(1e3 * read / read_ms, 3) if read_ms else 0.0,
        "predicted_n": written,
        "predicted_ms": round(written_ms, 3),
        "predicted_per_token_ms": round(1e3 / rate, 3) if rate else 0.0,
        "predicted_per_second": round(rate, 3),
        "draft_n": sum(record.nodes - 1 for record in passes),
        "draft_n_accepted": sum(record.accepted for record in passes),
    }


def failure(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def models(names: Sequence[str], started: int, **known: Any) -> dict[str, Any]:
    """The body of the list of models: one model, by all its names; see `model`."""
    return {"object": "list", "data": [model(name, names[0], started, **known) for name in names]}


def model(
    name: str, root: str, started: int, *, context: int = 0, sees: bool = False, writes: bool = True
) -> dict[str, Any]:
    """The body about one model.

    Args:
        root: its own name, where the other one is an alias; so vLLM calls it.
        context: maximum tokens of a request, as OpenRouter, vLLM and llama.cpp name it; 0 if it is unknown.
        sees, writes: whether it takes images, and writes text, which is said as OpenRouter says it.
    """
    takes = {
        "input_modalities": ["text", *(["image"] if sees else [])],
        "output_modalities": ["text" if writes else "embeddings"],
    }
    about: dict[str, Any] = {"id": name, "root": root, "object": "model", "created": started}
    about["owned_by"] = "edgespec"
    if context:
        about |= {"context_length": context, "max_model_len": context, "meta": {"n_ctx": context}}
    return {**about, "architecture": takes}


def _custom(call: ToolCall) -> dict[str, Any]:
    """The call of a custom tool in the form of the API."""
    return {
        "id": call.id,
        "type": "custom",
        "custom": {"name": call.name, "input": custom_input(call.arguments)},
    }


def _call_deltas(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
    """The pieces of calls, one for each call."""
    deltas: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        delta = deltas.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
        if piece.id:
            delta |= {"id": piece.id, "type": "function"}
            delta["function"]["name"] = piece.name
        delta["function"]["arguments"] += piece.arguments
    return list(deltas.values())


def _logprob(found: TokenLogprob) -> dict[str, Any]:
    def one(item: TokenLogprob) -> dict[str, Any]:
        return {
            "token": item.spelling.decode("utf-8", "replace"),
            "logprob": item.logprob,
            "bytes": list(item.spelling),
        }

    return {**one(found), "top_logprobs": [one(other) for other in found.top]}
