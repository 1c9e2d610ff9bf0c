"""The options that say what is loaded, and how: the arguments of `edgespec.load`.

A group is a dataclass whose fields are Typer options; see `declaration.with_options`. Where the default
belongs to the library, the option is None unless somebody sets it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.completion import complete_draft, complete_model, complete_words
from edgespec.cli.options.declaration import is_on_command_line, option
from edgespec.cli.options.values import parse_gpu_layers, parse_tree_budget
from edgespec.errors import UsageError
from edgespec.units import parse_size

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine


# The policies of speculation.policies, which takes too long to import for help and completion.
TREES = ("calibrated", "specexec", "sequoia", "opt-tree", "eagle2", "chain", "sequences")


@dataclass(frozen=True)
class LoadOptions:
    """What is loaded, and how: the arguments of `edgespec.load`."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
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
            "-c --context",
            "Most tokens of prompt and answer. Default: 4096.",
            metavar="N",
        ),
    ] = None
    threads: Annotated[
        int | None,
        option(
            "Model",
            "-t --threads",
            "CPU threads. Default: one for each physical core, or more if faster.",
            metavar="N",
        ),
    ] = None
    gpu_layers: Annotated[
        str | None,
        option(
            "Model",
            "-ngl --gpu-layers",
            "Layers for graphics cards; auto gives them as many as makes passes faster. Default: auto.",
            metavar="N|auto|all",
        ),
    ] = None
    device: Annotated[
        str | None,
        option(
            "Model",
            "-dev --device",
            "Graphics cards that may hold layers, by the names that doctor shows. Default: all.",
            metavar="NAME,...",
        ),
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
    experts: Annotated[
        str | None,
        option(
            "Model",
            "--experts",
            "Whether single experts of a mixture are streamed, or whole layers. Default: auto.",
            metavar="auto|never",
        ),
    ] = None
    kv: Annotated[
        str | None,
        option(
            "Model",
            "--kv",
            "Type of cached keys and values; q8_0 takes half the memory. Default: f16.",
            metavar="f16|q8_0",
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        option(
            "Model",
            "--lora",
            "LoRA adapter, where all weights are in memory; may be repeated.",
            metavar="FILE[:SCALE]",
        ),
    ] = None
    workers: Annotated[
        str | None,
        option(
            "Model",
            "--workers",
            "Machines that run 'edgespec worker', to hold layers together with this one.",
            metavar="HOST:PORT,...",
        ),
    ] = None
    prompt_cache: Annotated[
        bool | None,
        option(
            "Model",
            "--prompt-cache/--no-prompt-cache",
            "Keep read prompts on disk, so that a beginning is read once. Default: no.",
            show_default=False,
        ),
    ] = None
    draft: Annotated[
        str | None,
        option(
            "Speculation",
            "-md --draft",
            "Small model that drafts, or a head. Default: auto.",
            autocompletion=complete_draft,
            metavar="PATH|NAME|auto|none",
        ),
    ] = None
    draft_device: Annotated[
        str | None,
        option(
            "Speculation",
            "-devd --draft-device",
            "Graphics card for the drafter; auto takes one on which its steps are faster. Default: auto.",
            metavar="NAME|auto|none",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        option(
            "Speculation",
            "--drafter",
            "Kind of drafter, where --draft leaves it open. Default: what the model allows.",
            metavar="model|lookup|merged",
        ),
    ] = None
    draft_from: Annotated[
        str | None,
        option(
            "Speculation",
            "--draft-from",
            "Folder with text files, or a file, whose passages are drafted where they fit.",
            metavar="FOLDER",
        ),
    ] = None
    learn: Annotated[
        bool | None,
        option(
            "Speculation",
            "--learn/--no-learn",
            "Use what runs learned about the models, and keep more of it. Default: yes.",
            show_default=False,
        ),
    ] = None
    collect: Annotated[
        bool | None,
        option(
            "Speculation",
            "--collect/--no-collect",
            "Keep prompts and answers on disk, for draft tune to learn from. Default: no.",
            show_default=False,
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
            autocompletion=complete_words(*TREES),
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
        """What was requested, as arguments of `edgespec.load`.

        Raises:
            UsageError: a size or a number cannot be read.
        """
        arguments = asdict(self)
        del arguments["collect"]  # `Terminal.load` sees to it
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise UsageError(f"The number of threads is {self.threads}.", "It must be from 1 to 1024.")
        if self.memory is not None:
            arguments["memory"] = parse_size(self.memory)
        if self.tree_budget is not None:
            arguments["tree_budget"] = parse_tree_budget(self.tree_budget)
        if self.gpu_layers is not None:
            arguments["gpu_layers"] = parse_gpu_layers(self.gpu_layers)
        for name, listed in (("workers", self.workers), ("device", self.device)):
            if listed is not None:
                arguments[name] = [part.strip() for part in listed.split(",") if part.strip()]
        return {name: value for name, value in arguments.items() if value not in (None, [])}

    @property
    def budget(self) -> int | None:
        """The tree budget that was requested; None means auto."""
        return None if self.tree_budget is None else parse_tree_budget(self.tree_budget)

    def load(self, on_progress: Callable[[str, float], None], **more: Any) -> Engine:
        """Load the target and its drafter; raises what `edgespec.load` raises.

        Args:
            more: arguments of `edgespec.load` that are not options of every command.
        """
        arguments = self.arguments() | more
        import edgespec

        return edgespec.load(**arguments, on_progress=on_progress)


@dataclass(frozen=True)
class ModelFlag:
    """-m MODEL, for commands whose argument is the model: other programs name it so."""

    model_flag: Annotated[
        str | None,
        option(
            "Model",
            "-m --model",
            "The same as the argument.",
            variable=False,  # EDGESPEC_MODEL is that of the argument
            metavar="MODEL",
            autocompletion=complete_model,
        ),
    ] = None

    def or_argument(self, model: str | None, called: typer.Context) -> str | None:
        """The model of the flag, or else of the argument.

        Raises:
            UsageError: the command line has both.
        """
        if self.model_flag is not None and is_on_command_line(called, "model"):
            raise UsageError(f"Two models were named: {model} and {self.model_flag}.", "Name one.")
        return self.model_flag or model

    def on(self, loading: LoadOptions, called: typer.Context) -> LoadOptions:
        """The options with the model of the flag; raises as `or_argument`."""
        return replace(loading, model=self.or_argument(loading.model, called))
