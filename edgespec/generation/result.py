"""The result of generating an answer: its text, and a record of every pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edgespec.base.units import readable_rate
from edgespec.generation.config import short_repr
from edgespec.generation.expert_use import ExpertUse
from edgespec.generation.tools import CallPiece, ToolCall

_SHOWN = 60  # characters of an answer in its repr

FinishReason = Literal["stop", "length", "cancelled", "error", "tool_calls"]
Bottleneck = Literal["disk", "compute", "drafter"]


@dataclass(frozen=True)
class PassRecord:
    """One round of the loop: a tree was drafted, verified in one target pass, and a path of it accepted.

    A pass yields tokens of the answer. The end token counts as one of them although it is not part of the
    text, because the target chooses it like any other, and plain decoding takes a pass for it. Whatever
    follows the end token, or the token that completes a stop string, is not counted anywhere.

    Attributes:
        nodes: tree nodes the target read, the root included.
        accepted: drafted tokens accepted; the pass yields one more, the bonus token or the end token.
        draft_s: seconds the drafter took to grow the tree.
        verify_s: seconds of the target pass.
        accept_s: seconds spent choosing tokens and updating the caches.
        wait_s: seconds of the pass spent waiting for weights to arrive from disk.
        setup_s: seconds of the pass for one-time setup of its number of rows, such as asking workers how much
            memory it takes there. The next pass over as many rows does not take them.
        draft_read_s: seconds of `draft_s` during which weights for the pass were being read.
        expected_accepted: drafted tokens that were expected to be accepted, the sum of the nodes' path
            probabilities; 0 if unknown.
        draft_steps: decodes that the drafter took.
        draft_rows: nodes that it read in them.
        draft_text_s: seconds of `draft_s` in a decode that read text which was new to the drafter, such as
            the prompt, beside the root; 0 if there was none.
        experts: what the pass needed of a mixture's experts that are read one by one; None if none are.
        observe_s: seconds of `accept_s` in which the drafter looked at what the target said.
        prompt_rows: tokens of the prompt that the pass read beside the tree.
        shared: whether the pass also extended other sequences, or read other prompts.
    """

    nodes: int
    accepted: int
    draft_s: float
    verify_s: float
    accept_s: float
    wait_s: float = 0.0
    draft_read_s: float = 0.0
    expected_accepted: float = 0.0
    draft_steps: int = 0
    draft_rows: int = 0
    draft_text_s: float = 0.0
    experts: ExpertUse | None = None
    setup_s: float = 0.0
    observe_s: float = 0.0
    prompt_rows: int = 0
    shared: bool = False

    __repr__ = short_repr

    @property
    def seconds(self) -> float:
        """Seconds of the whole round."""
        return self.draft_s + self.verify_s + self.accept_s

    @property
    def recurring_s(self) -> float:
        """Seconds of the round without one-time setup: the cost to expect of the next such round."""
        return self.seconds - self.setup_s

    @property
    def target_s(self) -> float:
        """Those seconds without the drafter's share."""
        return self.recurring_s - self.draft_s - self.observe_s

    @property
    def hidden_draft_s(self) -> float:
        """Seconds of the draft that did not make the round longer.

        What is read while the drafter works need not be waited for later, as far as the pass waits at all.
        """
        return min(self.draft_read_s, self.wait_s)

    def cut(self, tokens: int) -> PassRecord:
        """The record if only the first `tokens` tokens of the pass (at least 1) belong to the answer."""
        return self if tokens > self.accepted else replace(self, accepted=max(tokens - 1, 0))


@dataclass
class Timings:
    """Seconds; draft, verify and io_wait are sums over all passes.

    Attributes:
        prefill_s: until the first token: the prompt, and the first pass, which reads the end of it.
        decode_s: of the passes after the first.
    """

    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    io_wait_s: float = 0.0

    __repr__ = short_repr


@dataclass
class MemoryUse:
    """Memory in bytes."""

    budget_bytes: int = 0
    peak_rss_bytes: int = 0
    resident_bytes: int = 0
    streamed_bytes_per_pass: int = 0  # of the target's weights
    device_bytes: int = 0  # weights on graphics cards and other machines
    layers: str = ""  # which are where, in words; empty if all are on the processor
    devices: tuple[str, ...] = ()  # that could hold layers, and what was measured of them
    target_bytes: int = 0  # the target's weights, wherever they are

    __repr__ = short_repr


@dataclass(frozen=True)
class TokenLogprob:
    """The probability of a token by the target's own logits, before penalties and temperature.

    Attributes:
        logprob: natural logarithm of its probability.
        spelling: the bytes of the token; a character may span several.
        top: the likeliest tokens there, the likeliest first.
        is_greedy: it is the likeliest one, which greedy decoding takes; unknown of those in `top`.
    """

    token: int
    logprob: float
    spelling: bytes = b""
    top: tuple[TokenLogprob, ...] = ()
    is_greedy: bool = False

    def cut(self, top: int) -> TokenLogprob:
        """A copy with at most so many of the likeliest tokens."""
        return self if len(self.top) <= top else replace(self, top=self.top[:top])

    def to_json(self) -> dict[str, Any]:
        values = self._named() | {"is_greedy": self.is_greedy}
        return values | ({"top_logprobs": [other._named() for other in self.top]} if self.top else {})

    def _named(self) -> dict[str, Any]:
        spelling = self.spelling.decode("utf-8", "replace")
        return {"id": self.token, "token": spelling, "logprob": self.logprob}


@dataclass
class Generation:
    """A finished answer.

    Attributes:
        text: the answer, cut off before the end token or stop string that ended it; without the thought
            before it and the tools that it calls.
        reasoning: what the model thought before it answered; empty if it did not.
        reasoning_tokens: how many of the tokens are part of the thought.
        tool_calls: the tools that the answer calls.
        logprobs: one for each of `tokens`, if they were asked for.
        prompt_logprobs: one for each token of the prompt that was to be scored; see `engine.logprobs`.
        tokens: its token ids, with those of the thought, without the end token. If a stop string ended the
            answer, the tokens that spell it are included.
        finish_reason: "stop" (end token or stop string), "tool_calls" (it calls tools), "length" (max_tokens,
            or the context is full), "cancelled", or "error".
        stop_string: the stop string that ended the answer; empty if none did.
        cached_tokens: tokens of the prompt that were not read, because their state was known.
        context_full: the answer ended because the context had no room left.
        exact: passes followed one row rule, so the logits, and with them the text, are bit for bit the same
            with any drafter and tree.
        verify: the verification rule in force.
        lossy: whether that rule may accept what the target would not have chosen.
        seed: the seed in force; 0 when greedy.
        passes: a record of every target pass.
        drafts: something proposes tokens, where that pays.
        plain_pass_s: seconds of a pass without drafts, by the answer's own or the last minutes' passes; 0 if
            unknown.
    """

    text: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    stop_string: str = ""
    context_full: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    exact: bool = False
    verify: str = "auto"
    lossy: bool = False
    seed: int = 0
    passes: list[PassRecord] = field(default_factory=list)
    drafts: bool = False
    plain_pass_s: float = 0.0
    timings: Timings = field(default_factory=Timings)
    memory: MemoryUse = field(default_factory=MemoryUse)

    def __repr__(self) -> str:
        """Format as <Generation 60 tokens, 46.7/s, 3.10 a pass, stop: 'Light is scattered by…'>."""
        text = self.text if len(self.text) <= _SHOWN else self.text[: _SHOWN - 1] + "…"
        count = f"{len(self.tokens)} token{'s' * (len(self.tokens) != 1)}"
        speed = f", {readable_rate(self.tokens_per_second, '/s')}" if self.tokens_per_second else ""
        passes = f", {self.tokens_per_pass:.2f} a pass" if self.passes else ""
        return f"<Generation {count}{speed}{passes}, {self.finish_reason}: {text!r}>"

    @property
    def is_only_thought(self) -> bool:
        """True if the model thought, and neither answered nor called a tool."""
        return bool(self.reasoning_tokens) and not self.text.strip() and not self.tool_calls

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first pass, per second of decoding; 0 if there are none."""
        return tokens_per_second([self])

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens of the answer per target pass, an end token included; see PassRecord.

        Plain decoding yields 1.
        """
        return _mean([p.accepted + 1 for p in self.passes])

    @property
    def nodes_per_pass(self) -> float:
        """Mean tree nodes per target pass, the root included."""
        return _mean([p.nodes for p in self.passes])

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that became part of the answer."""
        return sum(p.accepted for p in self.passes) / self.drafted if self.drafted else 0.0

    @property
    def drafted(self) -> int:
        """The number of drafted tokens."""
        return sum(p.nodes - 1 for p in self.passes)

    @property
    def paused_drafting(self) -> bool:
        """True if most passes had no drafts because these did not pay."""
        plain = sum(record.nodes == 1 for record in self.passes)
        return self.drafts and 2 * plain > len(self.passes) > 1 and not any(p.shared for p in self.passes)

    @property
    def experts(self) -> ExpertUse | None:
        """The use of a mixture's experts that are read one by one; None if none are."""
        used = [record.experts for record in self.passes if record.experts is not None]
        return sum(used, ExpertUse()) if used else None

    @property
    def gain(self) -> float:
        """Speed-up over plain decoding at that time; 0 if unknown, if nothing was drafted, or in company."""
        if not self.drafted or any(p.shared for p in self.passes):
            return 0.0
        return self.tokens_per_second * self.plain_pass_s

    @property
    def time_parts(self) -> dict[Bottleneck, float]:
        """Seconds spent waiting for weights, on the target's arithmetic, and drafting.

        Of the passes after the first, as `timings.decode_s`, or of a single one.
        """
        passes = self.passes[1:] or self.passes
        waited, drafted = sum(p.wait_s for p in passes), sum(p.draft_s for p in passes)
        computed = sum(p.verify_s + p.accept_s for p in passes) - waited
        return {"disk": waited, "compute": computed, "drafter": drafted}

    @property
    def bound_by(self) -> Bottleneck:
        """The bottleneck: what took the largest part of the time."""
        parts = self.time_parts
        return max(parts, key=lambda name: parts[name])

    def to_json(self, prompt: object, identifier: str | int | None = None) -> dict[str, Any]:
        """The record that `generate --json` prints. Its names are fixed; new ones may be added."""
        t, m, experts = self.timings, self.memory, self.experts
        said: dict[str, Any] = {"text": self.text}
        used = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.tokens)}
        if self.reasoning or self.reasoning_tokens:
            said["reasoning_content"] = self.reasoning
            used["reasoning_tokens"] = self.reasoning_tokens
        if self.tool_calls:
            said["tool_calls"] = [call.to_json() for call in self.tool_calls]
        if self.logprobs:
            said["token_logprobs"] = [found.to_json() for found in self.logprobs]
        return {
            "id": identifier,
            "prompt": prompt,
            **said,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "error": None,
            "seed": self.seed,
            "usage": used,
            "timings": {
                "load_s": round(t.load_s, 4),
                "prefill_s": round(t.prefill_s, 4),
                "decode_s": round(t.decode_s, 4),
                "draft_s": round(t.draft_s, 4),
                "verify_s": round(t.verify_s, 4),
                "io_wait_s": round(t.io_wait_s, 4),
                "tokens_per_second": round(self.tokens_per_second, 5),
            },
            "speculation": {
                "passes": len(self.passes),
                "tokens_per_pass": round(self.tokens_per_pass, 3),
                "nodes_per_pass": round(self.nodes_per_pass, 3),
                "acceptance_rate": round(self.acceptance_rate, 4) if self.drafted else None,
                "exact": self.exact,
                "verify": self.verify,
                "lossy": self.lossy,
            },
            "memory": {
                "budget_bytes": m.budget_bytes,
                "peak_rss_bytes": m.peak_rss_bytes,
                "resident_bytes": m.resident_bytes,
                "streamed_bytes_per_pass": m.streamed_bytes_per_pass,
                "device_bytes": m.device_bytes,
                "layers": m.layers or None,
            },
            "experts": experts.to_json(sum(p.accepted + 1 for p in self.passes)) if experts else None,
        }


def tokens_per_second(answers: Sequence[Generation]) -> float:
    """Tokens after the first pass of each answer, per second of decoding; 0 if there are none.

    Args:
        answers: that were decoded at the same time.
    """
    seconds = max((answer.timings.decode_s for answer in answers), default=0.0)
    tokens = sum(_later_tokens(answer) for answer in answers)
    return tokens / seconds if seconds > 0 else 0.0


def _later_tokens(answer: Generation) -> int:
    """The number of tokens after the first pass, whose time counts as reading the prompt."""
    first = answer.passes[0].accepted + 1 if answer.passes else 1
    return max(len(answer.tokens) - first, 0)


@dataclass(frozen=True)
class PassTree:
    """The token tree of one pass, for people to look at.

    Attributes:
        tokens: the text of each node; the first is the root, the last token before the pass.
        parents: the index of each node's parent; -1 for the root.
        chances: the drafter's chance of each node, given its parent; 1 for the root.
        sources: who proposed each node: "model", "text", "recycled", "files", "answers", "both" or
            "grammar"; "" for the root.
        path: the nodes that were accepted, the root included.
        bonus: the text of the token that the target chose after them.
    """

    tokens: tuple[str, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...]
    sources: tuple[str, ...]
    path: tuple[int, ...]
    bonus: str


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer as it is accepted.

    Attributes:
        text: text that can no longer change; never half a character or part of a stop string.
        reasoning: the same of the thought before the answer.
        calls: the same of tool calls.
        logprobs: one for each token, if they were asked for.
        prompt_logprobs: those of the prompt, on the first piece, if it was to be scored.
        tokens: the tokens of the answer that this pass yielded, without the end token.
        record: the pass that yielded them.
        generation: the finished answer, on the last chunk only.
        tree: the tree of that pass, where it was asked for.
    """

    text: str
    tokens: tuple[int, ...] = ()
    record: PassRecord | None = None
    generation: Generation | None = None
    tree: PassTree | None = None
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()

    __repr__ = short_repr

    @classmethod
    def cancelled(cls) -> Chunk:
        """The only chunk of an answer that was cancelled before its prompt was read."""
        return cls("", generation=Generation(finish_reason="cancelled"))


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
