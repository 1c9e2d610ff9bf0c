"""The result of scoring a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgespec.generation.result import Generation, TokenLogprob


@dataclass(frozen=True)
class Score:
    """Likelihood of a given text, or of a continuation after a context, for the target."""

    tokens: tuple[int, ...]  # the tokens that were scored
    # the log-probability of each, given all tokens before it; None for the first token of a text, which
    # follows nothing.
    token_logprobs: tuple[TokenLogprob | None, ...] = field(repr=False)
    prompt_tokens: int = 0  # tokens of context and text together
    cached_tokens: int = 0  # those of them that were not read, because their state was known
    complete: bool = True  # False if scoring was cancelled; what is missing is then None

    @classmethod
    def of(cls, prompt: tuple[int, ...], first: int, answer: Generation) -> Score:
        """The score of a prompt's tokens from position `first` on."""
        return cls(
            prompt[first:],
            tuple(answer.prompt_logprobs),
            len(prompt),
            answer.cached_tokens,
            answer.finish_reason != "cancelled",
        )

    @classmethod
    def of_prompt(cls, answer: Generation) -> Score:
        """The score that an answer has of its prompt; the token that has no log-probability is -1."""
        tokens = tuple(-1 if found is None else found.token for found in answer.prompt_logprobs)
        complete = answer.finish_reason != "cancelled"
        return cls(
            tokens, tuple(answer.prompt_logprobs), answer.prompt_tokens, answer.cached_tokens, complete
        )

    @classmethod
    def none(cls, prompt: tuple[int, ...], first: int) -> Score:
        """The score of a prompt that was cancelled before it began."""
        tokens = prompt[first:]
        return cls(tokens, (None,) * len(tokens), len(prompt), complete=False)

    @property
    def logprob(self) -> float:
        """The sum of the log-probabilities: the natural logarithm of the text's probability."""
        return sum(found.logprob for found in self.token_logprobs if found is not None)

    @property
    def is_greedy(self) -> bool:
        """True if each token is the likeliest one at its place, so that greedy decoding writes this text."""
        return all(found.is_greedy for found in self.token_logprobs if found is not None)

    def to_json(self, *, per_token: bool = False) -> dict[str, Any]:
        """The score as JSON values.

        Args:
            per_token: include the spelling and log-probability of each token, and the likeliest ones.
        """
        summary: dict[str, Any] = {
            "logprob": self.logprob,
            "tokens": len(self.tokens),
            "is_greedy": self.is_greedy,
        }
        if per_token:
            summary["token_logprobs"] = [
                {"logprob": None} if found is None else found.to_json() for found in self.token_logprobs
            ]
        return summary
