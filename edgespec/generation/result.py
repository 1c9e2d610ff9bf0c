"""What generating an answer gives: its text, and a record of every pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class PassRecord:
    """One round of the loop: a tree was drafted, verified in one target pass, and a path of it accepted.

    A pass yields tokens of the answer. The end token is one of them, though it is no part of the text: it is
    a choice of the target's like any other, and plain decoding takes a pass for it. What stands behind the
    end token, or behind the token that completes a stop string, is not counted anywhere.

    Attributes:
        nodes: tree nodes the target read, the root included.
        accepted: drafted tokens accepted; the pass yields one more, the bonus token, or the end token.
        draft_s: seconds the drafter took to grow the tree.
        verify_s: seconds of the target pass.
        accept_s: seconds spent choosing tokens and updating the caches.
        wait_s: seconds of the pass spent waiting for weights to arrive from disk.
        promised: drafted tokens the drafter expected to be accepted, the sum of its nodes' path
            probabilities; 0 when it did not say.
        draft_steps: decodes the drafter took.
        draft_rows: nodes it read in them.
    """

    nodes: int
    accepted: int
    draft_s: float
    verify_s: float
    accept_s: float
    wait_s: float = 0.0
    promised: float = 0.0
    draft_steps: int = 0
    draft_rows: int = 0

    @property
    def seconds(self) -> float:
        """The whole round."""
        return self.draft_s + self.verify_s + self.accept_s

    def cut(self, tokens: int) -> PassRecord:
        """The record of a pass of which only the first `tokens` tokens are part of the answer, at least 1."""
        return self if tokens > self.accepted else replace(self, accepted=max(tokens - 1, 0))


@dataclass
class Timings:
    """Seconds. `decode_s` covers every pass after the prompt; the others are parts of it."""

    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    io_wait_s: float = 0.0


@dataclass
class MemoryUse:
    """Bytes."""

    budget_bytes: int = 0
    peak_rss_bytes: int = 0
    resident_bytes: int = 0
    streamed_bytes_per_pass: int = 0


@dataclass
class Generation:
    """A finished answer.

    Attributes:
        text: the answer, cut before the end token or stop string that ended it.
        tokens: its token ids, without the end token. Where a stop string ended the answer, the tokens
            that spell it are included.
        finish_reason: "stop" (end token or stop string), "length" (max_tokens, or the context is full),
            "cancelled", or "error".
        context_full: the answer ended because the context had no room left.
        exact: the kernels were held to one row rule, and the text is the same bit for bit with any drafter
            and tree.
        verify: the rule that was in force.
        lossy: that rule may accept what the target would not have chosen.
        seed: the seed in force; 0 when greedy.
        passes: one record for every target pass.
        plain_pass_s: seconds that a pass without drafts takes, as last measured; 0 if none was.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    context_full: bool = False
    prompt_tokens: int = 0
    exact: bool = False
    verify: str = "auto"
    lossy: bool = False
    seed: int = 0
    passes: list[PassRecord] = field(default_factory=list)
    plain_pass_s: float = 0.0
    timings: Timings = field(default_factory=Timings)
    memory: MemoryUse = field(default_factory=MemoryUse)

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, per second of decoding; 0 before there are two."""
        if len(self.tokens) < 2 or self.timings.decode_s <= 0:
            return 0.0
        return (len(self.tokens) - 1) / self.timings.decode_s

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens of the answer that a target pass yielded, an end token included; see PassRecord.

        Plain decoding has 1.
        """
        return _mean([p.accepted + 1 for p in self.passes])

    @property
    def nodes_per_pass(self) -> float:
        """Mean tree nodes in a target pass, the root included."""
        return _mean([p.nodes for p in self.passes])

    @property
    def acceptance_rate(self) -> float:
        """Drafted tokens that became part of the answer over all drafted tokens."""
        drafted = sum(p.nodes - 1 for p in self.passes)
        return sum(p.accepted for p in self.passes) / drafted if drafted else 0.0

    @property
    def gain(self) -> float:
        """How many times as fast as plain decoding, by the measured cost of a plain pass; 0 if unknown."""
        if self.plain_pass_s <= 0 or self.timings.decode_s <= 0 or all(p.nodes == 1 for p in self.passes):
            return 0.0
        return sum(p.accepted + 1 for p in self.passes) * self.plain_pass_s / self.timings.decode_s

    @property
    def bound_by(self) -> Literal["disk", "compute", "drafter"]:
        """What most of the time went to: waiting for weights, the target's passes, or drafting."""
        t = self.timings
        shares: dict[Literal["disk", "compute", "drafter"], float] = {
            "disk": t.io_wait_s,
            "compute": t.verify_s - t.io_wait_s,
            "drafter": t.draft_s,
        }
        return max(shares, key=lambda name: shares[name])

    def to_json(self, prompt: object, identifier: str | int | None = None) -> dict[str, Any]:
        """The record that `generate --json` prints: names are fixed, new ones may be added."""
        t, m = self.timings, self.memory
        return {
            "id": identifier,
            "prompt": prompt,
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "error": None,
            "seed": self.seed,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.tokens)},
            "timings": {
                "load_s": round(t.load_s, 4),
                "prefill_s": round(t.prefill_s, 4),
                "decode_s": round(t.decode_s, 4),
                "draft_s": round(t.draft_s, 4),
                "verify_s": round(t.verify_s, 4),
                "io_wait_s": round(t.io_wait_s, 4),
                "tokens_per_second": round(self.tokens_per_second, 3),
            },
            "speculation": {
                "passes": len(self.passes),
                "tokens_per_pass": round(self.tokens_per_pass, 3),
                "nodes_per_pass": round(self.nodes_per_pass, 3),
                "acceptance_rate": round(self.acceptance_rate, 4),
                "exact": self.exact,
                "verify": self.verify,
                "lossy": self.lossy,
            },
            "memory": {
                "budget_bytes": m.budget_bytes,
                "peak_rss_bytes": m.peak_rss_bytes,
                "resident_bytes": m.resident_bytes,
                "streamed_bytes_per_pass": m.streamed_bytes_per_pass,
            },
        }


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer as it is accepted.

    Attributes:
        text: text that is now certain; never half a character, never part of a stop string.
        tokens: the tokens of the answer that this pass yielded, without the end token.
        record: the pass that yielded them.
        generation: the finished answer, on the last chunk only.
    """

    text: str
    tokens: tuple[int, ...] = ()
    record: PassRecord | None = None
    generation: Generation | None = None


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
