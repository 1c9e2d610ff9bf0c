"""What a person asks of a generation, and what they get back. Pure values: nothing here runs a model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from edgespec.errors import GrammarError, UsageError
from edgespec.speculation.verification.rules import Rule, parse_rule

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Grammar:
    """A form that answers must have.

    Attributes:
        kind: of the text: "json_schema", "grammar" (GBNF as llama.cpp has it, or Lark) or "regex".
    """

    kind: Literal["json_schema", "grammar", "regex"]
    text: str

    @classmethod
    def of_schema(cls, schema: object) -> Grammar:
        """The form of a JSON schema that has been parsed already.

        Raises:
            GrammarError: it is nested too deeply to be written as JSON again, or is none.
        """
        try:
            return cls("json_schema", json.dumps(schema))
        except RecursionError:
            raise GrammarError(
                "The JSON schema is nested too deeply.", 'Flatten it with "$defs" and "$ref".'
            ) from None
        except (TypeError, ValueError) as error:
            raise GrammarError(f"The JSON schema is not JSON: {error}.", "Correct it.") from error


@dataclass(frozen=True)
class GenerationConfig:
    """How one answer is generated.

    The filters apply in llama.cpp's order: penalties, top-k, top-p, min-p, temperature.

    Attributes:
        max_tokens: most tokens to generate; None means until the context is full.
        temperature: 0 takes the most likely token (greedy); above 0 samples.
        top_k: sample among the k most likely tokens; 0 means all.
        top_p: smallest set of tokens whose probability reaches top_p; 1 means all.
        min_p: drop tokens less likely than min_p x the most likely one; 0 means none.
        repeat_penalty: divides the positive logits of tokens seen before (Keskar et al. 2019); 1 is off.
        frequency_penalty: subtracted from a token's logit for every time it was seen; 0 is off.
        presence_penalty: subtracted once from the logit of every token seen before; 0 is off.
        penalty_window: how many of the last tokens the penalties look at; 0 means all.
        seed: fixes the sampled text, whatever the drafter or the tree; None picks one and reports it.
        stop: the answer ends before the first of these strings.
        grammar: the form that the answer must have.
        verify: the rule by which drafted tokens are accepted, NAME or NAME:PARAMETER=VALUE,...; "auto" is
            greedy at temperature 0 and shared noise above.

    Raises:
        UsageError: a value is out of its range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int = 64
    seed: int | None = None
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    verify: str = "auto"

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "penalty_window", "seed"):
            value = getattr(self, name)
            _check(not isinstance(value, float), name, value, "a whole number")
        _check(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "at least 1",
        )
        _check(_within(self.temperature, 0, 100), "temperature", self.temperature, "from 0 to 100")
        _check(self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or more")
        _check(
            _within(self.top_p, 0, 1) and self.top_p > 0,
            "top_p",
            self.top_p,
            "above 0 and at most 1",
        )
        _check(_within(self.min_p, 0, 1), "min_p", self.min_p, "from 0 to 1")
        _check(
            _within(self.repeat_penalty, 0.01, 100),
            "repeat_penalty",
            self.repeat_penalty,
            "from 0.01 to 100",
        )
        _check(
            _within(self.frequency_penalty, -100, 100),
            "frequency_penalty",
            self.frequency_penalty,
            "from -100 to 100",
        )
        _check(
            _within(self.presence_penalty, -100, 100),
            "presence_penalty",
            self.presence_penalty,
            "from -100 to 100",
        )
        _check(
            self.penalty_window >= 0,
            "penalty_window",
            self.penalty_window,
            "0 (everything) or more",
        )
        _check(
            self.seed is None or 0 <= self.seed <= MAX_SEED,
            "seed",
            self.seed,
            f"from 0 to {MAX_SEED}",
        )
        _check(not isinstance(self.stop, str), "stop", repr(self.stop), "a list of texts")
        _check(all(self.stop), "stop", "''", "a text that is not empty")
        if parse_rule(self.verify).name == "greedy" and not self.greedy:
            raise UsageError(
                f"The rule 'greedy' takes the likeliest token, and temperature is {self.temperature}.",
                "Leave out one of them.",
            )

    @property
    def rule(self) -> Rule:
        """The rule in force at this temperature."""
        return parse_rule(self.verify).in_force(greedy=self.greedy)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken every time."""
        return self.temperature == 0

    def with_(self, **changes: Any) -> GenerationConfig:
        """A copy with some values changed.

        Raises:
            UsageError: a name is unknown, or a value is of the wrong kind or out of its range.
        """
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise UsageError(
                    f"There is no setting '{name}'.",
                    f"The settings are {', '.join(sorted(known))}.",
                )
        try:
            return replace(self, **changes)
        except TypeError as error:
            raise UsageError(f"A setting has a value of the wrong kind: {changes}.") from error


def shortened(text: str, most: int = 80) -> str:
    """The text, or the beginning of a long one: values in messages may have thousands of digits."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _within(value: float, low: float, high: float) -> bool:
    return low <= value <= high  # so not for NaN; math.isfinite fails for whole numbers beyond any float


def _check(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {shortened(str(value))}.", f"It must be {wanted}.")


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
