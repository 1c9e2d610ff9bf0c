"""The options that say how answers are generated, shared by the commands that generate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edgespec.base.option import named
from edgespec.cli.completion import complete_words
from edgespec.cli.options.declaration import option
from edgespec.cli.utf8 import as_text, read_text
from edgespec.config import Config
from edgespec.errors import InvalidValueError, ModelFileError, UsageError
from edgespec.generation.config import GenerationConfig, Grammar
from edgespec.generation.rules import KINDS
from edgespec.generation.thinking import EFFORTS

if TYPE_CHECKING:
    from edgespec.models.hub.recommended import RecommendedSampling

_DEFAULTS = GenerationConfig()
_SAMPLING = ("recommended", "greedy")
_MORE = "More samplers"
_FLAGS = {"banned_strings": "ban_string", "dry_sequence_breakers": "dry_sequence_breaker"}
_NOT_GIVEN = -1  # as in llama.cpp and ollama, of these options
_HINTS = {"max_tokens": "-1 means no limit.", "seed": "-1 takes a new seed each time."}


@dataclass(frozen=True)
class SamplingOptions:
    """Options for generation: the fields of GenerationConfig that have a flag."""

    max_tokens: Annotated[
        int | None,
        option(
            "Sampling",
            "-n --max-tokens",
            "Maximum tokens to generate; -1 for no limit. Default: no limit but the context.",
            metavar="N",
        ),
    ] = _DEFAULTS.max_tokens
    sampling: Annotated[
        str | None,
        option(
            "Sampling",
            "--sampling",
            "Settings you do not give: the model author's recommendation, or greedy. Default: recommended "
            "in a terminal chat and for serve, otherwise greedy.",
            metavar="recommended|greedy",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        option(
            "Sampling",
            "--temp --temperature",
            "Sampling temperature; 0 always takes the most likely token. Default: 0, or as recommended.",
            metavar="T",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        option(
            "Sampling",
            "--top-k",
            "Sample from the K most likely tokens; 0 for all. Default: 0, or as recommended.",
            metavar="K",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        option(
            "Sampling",
            "--top-p",
            "Sample from the smallest set of tokens with total probability P. Default: 1, or as recommended.",
            metavar="P",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        option(
            "Sampling",
            "--min-p",
            "Drop tokens below P times the top probability. Default: 0, or as recommended.",
            metavar="P",
        ),
    ] = None
    repeat_penalty: Annotated[
        float | None,
        option(
            "Sampling",
            "--repeat-penalty",
            "Penalize repeated tokens; 1 is off. Default: 1, or as recommended.",
            metavar="X",
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        option(
            "Sampling",
            "--frequency-penalty",
            "Penalty for each earlier occurrence of a token. Default: 0.",
            metavar="X",
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        option(
            "Sampling",
            "--presence-penalty",
            "Penalty for tokens that occurred before. Default: 0, or as recommended.",
            metavar="X",
        ),
    ] = None
    top_n_sigma: Annotated[
        float | None,
        option(
            _MORE,
            "--top-n-sigma",
            "Drop tokens more than N standard deviations below the top logit. Default: off.",
            metavar="N",
        ),
    ] = None
    xtc_probability: Annotated[
        float | None,
        option(
            _MORE,
            "--xtc-probability",
            "XTC: chance per token of dropping all tokens above the threshold but the least likely. "
            "Default: 0, or as recommended.",
            metavar="P",
        ),
    ] = None
    xtc_threshold: Annotated[
        float | None,
        option(
            _MORE,
            "--xtc-threshold",
            "XTC: the threshold, a probability. Default: 0.1, or as recommended.",
            metavar="P",
        ),
    ] = None
    dry_multiplier: Annotated[
        float | None,
        option(
            _MORE,
            "--dry-multiplier",
            "DRY: penalize tokens that would continue a repetition; 0 is off. Default: 0.",
            metavar="X",
        ),
    ] = None
    dry_base: Annotated[
        float | None,
        option(
            _MORE,
            "--dry-base",
            "DRY: factor of the penalty for each further repeated token. Default: 1.75.",
            metavar="X",
        ),
    ] = None
    dry_allowed_length: Annotated[
        int | None,
        option(
            _MORE,
            "--dry-allowed-length",
            "DRY: tokens that may be repeated without a penalty. Default: 2.",
            metavar="N",
        ),
    ] = None
    dry_penalty_last_n: Annotated[
        int | None,
        option(
            _MORE,
            "--dry-penalty-last-n",
            "DRY: how many of the last tokens are searched; -1 for all. Default: -1.",
            metavar="N",
        ),
    ] = None
    dry_sequence_breakers: Annotated[
        list[str] | None,
        option(
            _MORE,
            "--dry-sequence-breaker",
            'DRY: text that interrupts repetitions, or none; repeatable. Default: line break, :, " and *.',
            metavar="TEXT",
        ),
    ] = None
    banned_strings: Annotated[
        list[str] | None,
        option(
            _MORE,
            "--ban-string",
            "Text that the answer must not contain, whatever its case; repeatable.",
            metavar="TEXT",
        ),
    ] = None
    seed: Annotated[
        int | None,
        option(
            "Sampling",
            "-s --seed",
            "Random seed, for reproducible sampling; -1 for a new one. Default: a new one.",
            metavar="N",
        ),
    ] = _DEFAULTS.seed
    stop: Annotated[
        list[str] | None,
        option("Sampling", "--stop", "Stop before this text; repeatable.", metavar="TEXT"),
    ] = None
    think: Annotated[
        str,
        option(
            "Sampling",
            "--think",
            "For reasoning models: on, off, low, medium, high, or a token limit. Default: as "
            "the chat template decides.",
            metavar="on|off|N",
            autocompletion=complete_words("auto", "on", "off", *EFFORTS),
        ),
    ] = _DEFAULTS.think
    json_schema: Annotated[
        str | None,
        option(
            "Sampling", "--json-schema", "Constrain the answer to this JSON schema.", metavar="FILE|{...}"
        ),
    ] = None
    grammar: Annotated[
        str | None,
        option("Sampling", "--grammar", "Constrain the answer to this GBNF or Lark grammar.", metavar="FILE"),
    ] = None
    verify: Annotated[
        str,
        option(
            "Speculation",
            "--verify",
            "Rule for accepting drafted tokens; see docs/verification.md.",
            metavar="RULE",
            autocompletion=complete_words(*KINDS),
        ),
    ] = _DEFAULTS.verify

    @property
    def given(self) -> frozenset[str]:
        """Settings that were given, by whatever means; they win over what is recommended."""
        own = (f.name for f in fields(GenerationConfig) if getattr(self, f.name, None) not in (None, []))
        return frozenset(own) - {n for n in ("verify", "think") if getattr(self, n) == getattr(_DEFAULTS, n)}

    def config(self) -> GenerationConfig:
        """The settings, checked; what was not given has the library's default."""
        if self.sampling not in (None, *_SAMPLING):
            raise UsageError(f"--sampling must be recommended or greedy, not '{self.sampling}'.")
        if self.json_schema is not None and self.grammar is not None:
            raise UsageError("Both --json-schema and --grammar were given.", "Give one of them.")
        grammar: Grammar | None = None
        if self.json_schema is not None:
            grammar = Grammar("json_schema", _read_grammar("--json-schema", self.json_schema))
        elif self.grammar is not None:
            grammar = Grammar("grammar", _read_grammar("--grammar", self.grammar))
        if grammar is not None:
            _check_grammar(grammar)
        values = {name: getattr(self, name) for name in self.given}
        values |= {
            "stop": tuple(as_text(text, "--stop") for text in self.stop or ()),
            "banned_strings": tuple(as_text(text, "--ban-string") for text in self.banned_strings or ()),
            "grammar": grammar,
        }
        if self.dry_sequence_breakers:
            breakers = [as_text(text, "--dry-sequence-breaker") for text in self.dry_sequence_breakers]
            # As in llama.cpp, "none" stands for no breakers at all, and "\\n" for a line break.
            texts = (text.replace("\\n", "\n") for text in breakers if text != "none")
            values["dry_sequence_breakers"] = tuple(texts)
        values |= {name: None for name in _HINTS if values.get(name) == _NOT_GIVEN}
        try:
            return config_of_options(**values)
        except InvalidValueError as error:
            error.hint = _HINTS.get(error.name.removeprefix("--").replace("-", "_"), "")
            raise

    def config_for(self, loading: Config) -> GenerationConfig:
        """The settings, checked against the options for loading."""
        config = self.config()
        if loading.speculation.exact and not config.rule.kind.invariant:
            raise exact_contradicts(self.verify)
        return config

    def chosen_for(self, loading: Config, model: Path, *, default: str) -> ChosenSampling:
        """The settings for a model, with what its maker recommends where nothing was given.

        Args:
            model: its file.
            default: what this command does without --sampling: "recommended" or "greedy".
        """
        config = self.config_for(loading)
        sources = dict.fromkeys(self.given, "given")
        # Whoever asks for greedy decoding by its temperature or rule means all of it.
        greedy = self.temperature == 0 or self.verify == "greedy"
        if greedy or (self.sampling or default) != "recommended":
            return ChosenSampling(config, sources)
        found = _recommendation(model, config.thinking.enabled)
        values = {name: value for name, value in found.values.items() if name not in self.given}
        config = config.with_(**values)
        if loading.speculation.exact and not config.rule.kind.invariant:
            raise exact_contradicts(self.verify)
        return ChosenSampling(config, {name: found.sources[name] for name in values} | sources)


@dataclass(frozen=True)
class ChosenSampling:
    """Settings, and where those that are not the library's defaults come from."""

    config: GenerationConfig
    sources: Mapping[str, str] = field(default_factory=dict)


def _recommendation(model: Path, thinks: bool | None) -> RecommendedSampling:
    from edgespec.models.gguf.header import read_header
    from edgespec.models.hub.recommended import RecommendedSampling, recommended_sampling

    try:
        return recommended_sampling(read_header(model), thinks=thinks)
    except ModelFileError:  # only the settings are lost: the model was loaded
        return RecommendedSampling()


def config_of_options(**values: Any) -> GenerationConfig:
    """The settings with values that options were given.

    Raises:
        UsageError: a value is out of its range; names the flag.
    """
    try:
        return GenerationConfig(**values)
    except InvalidValueError as error:
        raise error.renamed(named(_FLAGS.get(error.name, error.name))) from None


def exact_contradicts(rule: str) -> UsageError:
    """The error for a rule of --verify that cannot be combined with --exact."""
    return UsageError(
        f"With --verify {rule} the text depends on the drafter, which --exact rules out.",
        "Leave out one of them.",
    )


@cache
def _check_grammar(grammar: Grammar) -> None:
    """Refuse a wrong grammar before a model is loaded for it."""
    from edgespec.cli.screen.terminal import Terminal
    from edgespec.text.grammar.matchers import check_grammar

    if not check_grammar(grammar):
        Terminal().warn("Parts of the schema are not enforced.")


def _read_grammar(flag: str, name: str) -> str:
    """The text of a schema or grammar: the value itself if it is a JSON object, otherwise that of a file."""
    if flag == "--json-schema" and name.lstrip().startswith("{"):
        return as_text(name, "The schema")
    if not name:
        raise UsageError(f"{flag} is empty.", f"Give a file to {flag}.")
    return read_text(name)
