"""The options that commands share, each written once.

A group is a dataclass whose fields are Typer options; see `declare.with_options`. Where a default belongs
to the library, the option is None until somebody sets it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.completion import complete_draft, complete_model
from edgespec.cli.declare import option
from edgespec.cli.utf8 import decoded
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig, Grammar
from edgespec.progress import Progress

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine

_DEFAULTS = GenerationConfig()
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4} | {
    f"{prefix}b": 1000**power for power, prefix in enumerate(["", "k", "m", "g", "t"])
}
_UNITS |= {f"{prefix}ib": _UNITS[prefix] for prefix in "kmgt"}


@dataclass(frozen=True)
class LoadOptions:
    """What is loaded, and how: the arguments of `edgespec.load`."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="Path of a GGUF file, or a name. Default: a small model that comes along.",
            autocompletion=complete_model,
            envvar="EDGESPEC_MODEL",
            show_envvar=False,
        ),
    ] = None
    memory: Annotated[
        str | None,
        option("Model", "--memory", "Memory to use. Default: what is available.", metavar="SIZE"),
    ] = None
    context: Annotated[
        int | None,
        option(
            "Model",
            "--context",
            "Most tokens of prompt and answer. Default: 4096.",
            metavar="N",
        ),
    ] = None
    threads: Annotated[
        int | None,
        option(
            "Model",
            "--threads",
            "CPU threads. Default: one for each physical core, or more if faster.",
            metavar="N",
        ),
    ] = None
    gpu_layers: Annotated[
        int | None,
        option("Model", "--gpu-layers", "Layers for the GPU; -1 is all. Default: 0.", metavar="N"),
    ] = None
    offload: Annotated[
        str | None,
        option(
            "Model",
            "--offload",
            "How weights that do not fit are read. Default: auto.",
            metavar="auto|stream|mmap|none",
        ),
    ] = None
    pack: Annotated[
        str | None,
        option(
            "Model",
            "--pack",
            "Whether streamed weights are rearranged for this CPU on disk. Default: auto.",
            metavar="auto|always|never",
        ),
    ] = None
    slots: Annotated[
        int | None,
        option(
            "Model",
            "--slots",
            "Layers in memory at a time of those that are streamed. Default: as many as keep the disk busy.",
            metavar="N",
        ),
    ] = None
    prompt_cache: Annotated[
        bool | None,
        option(
            "Model",
            "--prompt-cache/--no-prompt-cache",
            "Keep read prompts on disk, so that a beginning is read once.",
            show_default=False,
        ),
    ] = None
    draft: Annotated[
        str | None,
        option(
            "Speculation",
            "--draft",
            "Small model that drafts. Default: auto.",
            autocompletion=complete_draft,
            metavar="PATH|NAME|auto|none",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        option(
            "Speculation",
            "--drafter",
            "Kind of drafter, where --draft leaves it open.",
            metavar="model|lookup|merged",
        ),
    ] = None
    tree: Annotated[
        str | None,
        option(
            "Speculation",
            "--tree",
            "How token trees grow: calibrated, specexec, sequoia, opt-tree, eagle2, chain or sequences. "
            "Default: calibrated.",
            metavar="NAME",
        ),
    ] = None
    tree_budget: Annotated[
        str | None,
        option(
            "Speculation",
            "--tree-budget",
            "Most nodes in a token tree. Default: auto.",
            metavar="N|auto",
        ),
    ] = None
    tree_depth: Annotated[
        int | None,
        option("Speculation", "--tree-depth", "Most drafted tokens on a path. Default: auto.", metavar="N"),
    ] = None
    tree_width: Annotated[
        int | None,
        option(
            "Speculation",
            "--tree-width",
            "Most nodes the drafter reads at a time. Default: auto.",
            metavar="N",
        ),
    ] = None
    exact: Annotated[
        bool | None,
        option(
            "Speculation",
            "--exact/--no-exact",
            "Same text bit for bit with any drafter. Default: where it is nearly free.",
            show_default=False,
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """What was asked for, as arguments of `edgespec.load`.

        Raises:
            UsageError: a size or a number cannot be read.
        """
        wishes = asdict(self)
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise UsageError(f"The number of threads is {self.threads}.", "It must be from 1 to 1024.")
        if self.memory is not None:
            wishes["memory"] = parse_size(self.memory)
        if self.tree_budget is not None:
            wishes["tree_budget"] = parse_tree_budget(self.tree_budget)
        return {name: value for name, value in wishes.items() if value is not None}

    @property
    def budget(self) -> int | None:
        """The tree budget that was asked for; None is auto."""
        return None if self.tree_budget is None else parse_tree_budget(self.tree_budget)

    def load(self, on_progress: Progress) -> Engine:
        """Load the target and its drafter; raises what `edgespec.load` raises."""
        arguments = self.arguments()
        import edgespec

        return edgespec.load(**arguments, on_progress=on_progress)


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are generated: the fields of GenerationConfig that have a flag."""

    max_tokens: Annotated[
        int | None,
        option(
            "Sampling",
            "--max-tokens",
            "Most tokens to generate. Default: until the context is full.",
            metavar="N",
        ),
    ] = _DEFAULTS.max_tokens
    temperature: Annotated[
        float, option("Sampling", "--temperature", "0 takes the likeliest token.", metavar="T")
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
        int | None, option("Sampling", "--seed", "Makes sampled text repeatable.", metavar="N")
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
        """The same, checked.

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
        return GenerationConfig(**values)

    def config_for(self, loading: LoadOptions) -> GenerationConfig:
        """The same, for a model that is loaded so.

        Raises:
            UsageError: a value is out of its range, or --exact and --verify contradict each other.
        """
        config = self.config()
        if loading.exact and not config.rule.kind.invariant:
            raise exact_contradicts(self.verify)
        return config


@dataclass(frozen=True)
class OutputOptions:
    """What is told besides the answer."""

    as_json: Annotated[bool, option("Output", "--json", "Print answers as JSON objects.")] = False
    quiet: Annotated[bool, option("Output", "--quiet", "Only results and errors.")] = False
    verbose: Annotated[bool, option("Output", "--verbose", "More on what happens.")] = False


def exact_contradicts(rule: str) -> UsageError:
    """Why a rule of --verify cannot be had together with --exact."""
    return UsageError(
        f"The text depends on the drafter with --verify {rule}, and with --exact it must not.",
        "Leave out one of them.",
    )


def parse_size(text: str) -> int:
    """Bytes from '12GiB', '800MB', '1.5G' (binary) or plain bytes.

    Raises:
        UsageError: it is no size, or not above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"'{text}' is not a size.", "Write it like 12GiB, 800MB or 4000000000.")
    size = int(Decimal(match[1]) * _UNITS[match[2]])
    if not 0 < size < 2**63:
        raise UsageError(f"A size of {text} makes no sense.", "It must be above 0 and below 8 EiB.")
    return size


def _read_form(flag: str, name: str) -> str:
    try:
        data = Path(name).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.", f"Give a file to {flag}.") from error
    return decoded(data, name)


def parse_tree_budget(text: str) -> int | None:
    """A number of nodes; None for auto.

    Raises:
        UsageError: it is neither.
    """
    if text.strip().lower() == "auto":
        return None
    if not re.fullmatch(r"\d{1,9}", text.strip(), re.ASCII):
        raise UsageError(f"The tree budget is '{text}'.", "It must be a number of nodes, or auto.")
    return int(text)
