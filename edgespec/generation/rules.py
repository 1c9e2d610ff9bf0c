"""Verification rules by name: their parameters, and what each guarantees.

Only names and numbers, so that the command line can parse a rule without importing its implementation;
`speculation.methods` turns a rule into how trees are drafted and verified.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from edgespec.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class RuleParameter:
    """A number that tunes a rule.

    Attributes:
        default: its value unless it is set.
        low, high: its range.
        whole: whether it must be an integer.
    """

    default: float
    low: float
    high: float
    whole: bool = False


@dataclass(frozen=True)
class RuleKind:
    """The guarantee and the needs of a rule."""

    lossy: bool = False  # whether the text may differ from what the target alone would give
    invariant: bool = False  # whether the text depends only on target, settings and seed, whatever is drafted
    # whether drafted tokens must be sampled from the drafter's distribution; otherwise the text would not
    # follow the target's distribution.
    drawn: bool = False
    parameters: Mapping[str, RuleParameter] | None = None  # by name


KINDS: Mapping[str, RuleKind] = {
    "auto": RuleKind(invariant=True),
    "greedy": RuleKind(invariant=True),
    "shared-noise": RuleKind(invariant=True),
    "specexec": RuleKind(invariant=True),
    "speculative": RuleKind(),
    "block": RuleKind(),
    "specinfer": RuleKind(drawn=True),
    "spectr": RuleKind(drawn=True),
    "recursive": RuleKind(drawn=True),
    "typical": RuleKind(
        lossy=True, parameters={"epsilon": RuleParameter(0.09, 0, 1), "delta": RuleParameter(0.3, 0, 1)}
    ),
    "lenience": RuleKind(lossy=True, parameters={"factor": RuleParameter(0.5, 0, 1)}),
    "topk-gap": RuleKind(
        lossy=True, parameters={"k": RuleParameter(3, 1, 1000, whole=True), "gap": RuleParameter(1.0, 0, 100)}
    ),
    "rollback": RuleKind(
        lossy=True,
        parameters={
            "distance": RuleParameter(3.0, 0, 100),
            "fallback": RuleParameter(0.5, 0, 1),
            "mismatches": RuleParameter(0, 0, 1000, whole=True),
        },
    ),
}


@dataclass(frozen=True)
class Rule:
    """A rule with its parameters filled in."""

    name: str  # a key of KINDS
    values: tuple[tuple[str, float], ...] = ()  # parameter -> value

    @property
    def kind(self) -> RuleKind:
        """Its guarantee and needs."""
        return KINDS[self.name]

    def __getitem__(self, parameter: str) -> float:
        return dict(self.values)[parameter]

    def __str__(self) -> str:
        """Format as NAME, or NAME:PARAMETER=VALUE,..."""
        parameters = ",".join(f"{name}={value:g}" for name, value in self.values)
        return f"{self.name}:{parameters}" if parameters else self.name

    def in_force(self, *, greedy: bool) -> Rule:
        """The rule that decides at a temperature of 0 (`greedy`) or above.

        At 0 the target's distribution is a single token, and every rule that compares distributions reduces
        to taking that token. The two rules whose papers define them for that case stay in force.
        """
        if greedy and self.name not in ("topk-gap", "rollback"):
            return Rule("greedy")
        return Rule("shared-noise") if self.name == "auto" else self


def parse_rule(text: str) -> Rule:
    """The rule written as NAME or NAME:PARAMETER=VALUE,...

    Raises:
        UsageError: there is no such rule or parameter, or a value is out of its range.
    """
    name, _, rest = text.partition(":")
    if name not in KINDS:
        hint = did_you_mean(name, KINDS, f"Rules: {', '.join(KINDS)}.")
        raise UsageError(f"There is no verification rule '{name}'.", hint)
    parameters = KINDS[name].parameters or {}
    values = {key: parameter.default for key, parameter in parameters.items()}
    for part in rest.split(",") if rest else ():
        key, _, value = part.partition("=")
        if key not in parameters:
            known = f"It has {', '.join(parameters)}." if parameters else "It has none."
            raise UsageError(f"The rule '{name}' has no parameter '{key}'.", known)
        values[key] = _number(name, key, value, parameters[key])
    return Rule(name, tuple(values.items()))


def _number(rule: str, key: str, text: str, parameter: RuleParameter) -> float:
    pattern = r"\d{1,9}" if parameter.whole else r"\d{1,9}(\.\d{1,18})?|\.\d{1,18}"
    readable = re.fullmatch(pattern, text, re.ASCII)
    if readable is None or not parameter.low <= float(text) <= parameter.high:
        kind = "an integer" if parameter.whole else "a number"
        raise UsageError(
            f"{key} of the rule '{rule}' must be {kind} from {parameter.low:g} to {parameter.high:g}, "
            f"not '{text}'."
        )
    return float(text)
