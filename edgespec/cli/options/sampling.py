"""The options that say how answers are generated, shared by the commands that generate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from edgespec.cli.options.declaration import option
from edgespec.cli.options.loading import LoadOptions
from edgespec.cli.utf8 import decoded
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig, Grammar

_DEFAULTS = GenerationConfig()
_NO_LIMIT = -1  # of --max-tokens, as in llama.cpp and ollama


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are generated: the fields of GenerationConfig that have a flag."""

    max_tokens: Annotated[
        int | None,
        option(
            "Sampling",
            "-n --max-tokens",
            "Most tokens to generate; -1 is no limit. Default: until the context is full.",
            metavar="N",
        ),
    ] = _DEFAULTS.max_tokens
    temperature: Annotated[
        float, option("Sampling", "--temp --temperature", "0 takes the likeliest token.", metavar="T")
    ] = _DEFAULTS.temperature
    top_k: Annotated[
        int, option("Sampling", "--top-k", "Only the k likeliest tokens; 0 is all.", metavar="K")
    ] = _DEFAULTS.top_k
    top_p: Annotated[
        float,
        option("Sampling", "--top-p", "Only the likeliest tokens that sum up to P.", metavar="P"),
    ] = _DEFAULTS.top_p
    min_p: Annotated[
        float,
        option("Sampling", "--min-p", "Drop tokens under P times the likeliest one.", metavar="P"),
    ] = _DEFAULTS.min_p
    repeat_penalty: Annotated[
        float, option("Sampling", "--repeat-penalty", "Over 1 avoids repetition.", metavar="X")
    ] = _DEFAULTS.repeat_penalty
    frequency_penalty: Annotated[
        float,
        option("Sampling", "--frequency-penalty", "Taken off for each earlier use.", metavar="X"),
    ] = _DEFAULTS.frequency_penalty
    presence_penalty: Annotated[
        float,
        option("Sampling", "--presence-penalty", "Taken off once for earlier use.", metavar="X"),
    ] = _DEFAULTS.presence_penalty
    seed: Annotated[
        int | None, option("Sampling", "-s --seed", "Makes sampled text repeatable.", metavar="N")
    ] = _DEFAULTS.seed
    stop: Annotated[
        list[str] | None,
        option("Sampling", "--stop", "End before this text; may be repeated.", metavar="TEXT"),
    ] = None
    json_schema: Annotated[
        str | None,
        option("Sampling", "--json-schema", "Answer with JSON that fits this schema.", metavar="FILE"),
    ] = None
    grammar: Annotated[
        str | None,
        option("Sampling", "--grammar", "Answer by this grammar: GBNF or Lark.", metavar="FILE"),
    ] = None
    verify: Annotated[
        str,
        option(
            "Speculation",
            "--verify",
            "Rule by which drafted tokens are accepted: see docs/verification.md.",
            metavar="RULE",
        ),
    ] = _DEFAULTS.verify

    def config(self) -> GenerationConfig:
        """The settings, checked.

        Raises:
            UsageError: a value is out of its range, or a file cannot be read.
        """
        if self.json_schema is not None and self.grammar is not None:
            raise UsageError("Both --json-schema and --grammar were given.", "Give one of them.")
        form = None
        if self.json_schema is not None:
            form = Grammar("json_schema", _read_form("--json-schema", self.json_schema))
        elif self.grammar is not None:
            form = Grammar("grammar", _read_form("--grammar", self.grammar))
        values = asdict(self) | {"stop": tuple(self.stop or ()), "grammar": form}
        del values["json_schema"]
        if self.max_tokens == _NO_LIMIT:
            values["max_tokens"] = None
        return GenerationConfig(**values)

    def config_for(self, loading: LoadOptions) -> GenerationConfig:
        """The settings, checked against the options for loading.

        Raises:
            UsageError: a value is out of its range, or --exact and --verify contradict each other.
        """
        config = self.config()
        if loading.exact and not config.rule.kind.invariant:
            raise exact_contradicts(self.verify)
        return config


def exact_contradicts(rule: str) -> UsageError:
    """The error for a rule of --verify that cannot be combined with --exact."""
    return UsageError(
        f"With --verify {rule} the text depends on the drafter, which --exact excludes.",
        "Leave out one of them.",
    )


def _read_form(flag: str, name: str) -> str:
    try:
        data = Path(name).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.", f"Give a file to {flag}.") from error
    return decoded(data, name)
