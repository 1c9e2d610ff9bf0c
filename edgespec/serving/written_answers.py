"""The answers that a model wrote here, found again in the conversations that clients send back.

Clients change answers: they drop thoughts, reorder the arguments of calls, and cut off white space. So an
answer is found by what says the same in any of these forms, and by all messages before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from edgespec.api.images import digested
from edgespec.base.latest import LatestValues
from edgespec.files.checked import CheckedFiles
from edgespec.text.replay import WrittenAnswer

_SUFFIX = ".answer"
_MAX_BYTES = 8 << 20  # in memory
_TOKEN_BYTES, _CHAR_BYTES, _ANSWER_BYTES = 40, 2, 1000  # about what they take
_LARGEST_EXACT = 2.0**53  # whole numbers that a float can tell apart
Message = Mapping[str, Any]


class WrittenAnswers:
    """The answers of one model; any thread may use them.

    Args:
        model: what the tokens depend on.
        n_tokens: the tokens are below this number.
        files: where the answers are kept for later runs; None for nowhere.
    """

    def __init__(self, model: str, n_tokens: int, files: CheckedFiles | None) -> None:
        self._seed = hashlib.blake2b(model.encode("utf-8", "replace"), digest_size=16).digest()
        self._n_tokens = n_tokens
        self._files = files
        self._known: LatestValues[WrittenAnswer] = LatestValues(_MAX_BYTES)

    def find(self, messages: Sequence[Message]) -> dict[int, WrittenAnswer]:
        """The messages that are answers of the model, by their index, as they were written."""
        found: dict[int, WrittenAnswer] = {}
        for index, (message, name) in enumerate(zip(messages, self._names(messages), strict=True)):
            answer = self._get(name) if message["role"] == "assistant" else None
            if answer is not None and _thinks_alike(message, answer):
                found[index] = answer
        return found

    def add(self, messages: Sequence[Message], answer: WrittenAnswer) -> None:
        """Keep the answer to these messages."""
        function = [
            {"function": {"name": name, "arguments": json.loads(said)}} for name, said in answer.calls
        ]
        message = {"role": "assistant", "content": answer.text, "tool_calls": function}
        *_, name = self._names([*messages, message])
        self._remember(name, answer)
        if self._files is not None:
            self._files.write(name, json.dumps(asdict(answer)).encode())

    def _names(self, messages: Sequence[Message]) -> Iterator[str]:
        """The name under which each message is kept; it depends on all messages before."""
        digest = self._seed
        for message in messages:
            said = json.dumps(_meaning(message), sort_keys=True).encode()
            digest = hashlib.blake2b(digest + said, digest_size=16).digest()
            yield digest.hex() + _SUFFIX

    def _get(self, name: str) -> WrittenAnswer | None:
        answer = self._known.get(name)
        if answer is None and self._files is not None and self._files.has(name):
            answer = self._read(self._files.read(name))
            if answer is not None:
                self._remember(name, answer)
        if answer is not None and self._files is not None:
            self._files.used([name])
        return answer

    def _read(self, content: bytearray | None) -> WrittenAnswer | None:
        if content is None:
            return None
        try:
            record = json.loads(content)
            tokens, lead = record.pop("tokens"), record.pop("lead")
            if not all(0 <= token < self._n_tokens for token in (*tokens, *lead)):
                return None
            calls = tuple((name, arguments) for name, arguments in record.pop("calls"))
            return WrittenAnswer(tokens=tuple(tokens), calls=calls, lead=tuple(lead), **record)
        except (ValueError, TypeError, KeyError):
            return None

    def _remember(self, name: str, answer: WrittenAnswer) -> None:
        said = [answer.text, answer.reasoning, *(part for call in answer.calls for part in call)]
        n_tokens = len(answer.tokens) + len(answer.lead)
        n_bytes = _ANSWER_BYTES + _TOKEN_BYTES * n_tokens + _CHAR_BYTES * sum(map(len, said))
        self._known.put(name, answer, n_bytes)


def _meaning(message: Message) -> list[Any]:
    """Return the meaning of a message, whatever form a client gave it."""
    if message["role"] != "assistant":
        return [message["role"], digested(message["content"])]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [[function["name"], _value(function["arguments"])] for function in functions]
    return ["assistant", _plain(message["content"]), calls]


def _thinks_alike(message: Message, answer: WrittenAnswer) -> bool:
    """True if a message has the thought of an answer, or none."""
    thought = _plain(message.get("reasoning_content") or "")
    return not thought or thought == _plain(answer.reasoning)


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").strip()


def _value(value: Any) -> Any:
    """JSON with one form for each number: programs in JavaScript write 1.0 as 1."""
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_EXACT:
        return int(value)
    return value
