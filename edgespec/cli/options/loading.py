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
            help="GGUF file or model name. Default: the bundled smollm2-135m.",
            autocompletion=complete_model,
            envvar="EDGESPEC_MODEL",
            show_envvar=False,
        ),
    ] = None
    memory: Annotated[
        str | None,
        option("Model", "--memory", "Memory limit. Default: all available memory.", metavar="SIZE"),
    ] = None
    context: Annotated[
        int | None,
        option(
            "Model",
            "-c --context",
            "Maximum tokens, prompt plus answer. Default: 4096.",
            metavar="N",
        ),
    ] = None
    threads: Annotated[
        int | None,
        option(
            "Model",
            "-t --threads",
            "CPU threads. Default: one per physical core, or more where that is faster.",
            metavar="N",
        ),
    ] = None
    gpu_layers: Annotated[
        str | None,
        option(
            "Model",
            "-ngl --gpu-layers",
            "Layers to put on GPUs; auto picks the fastest split. Default: auto.",
            metavar="N|auto|all",
        ),
    ] = None
    device: Annotated[
        str | None,
        option(
            "Model",
            "-dev --device",
            "GPUs to use, by the names that 'edgespec doctor' prints. Default: all.",
            metavar="NAME,...",
        ),
    ] = None
    offload: Annotated[
        str | None,
        option(
            "Model",
            "--offload",
            "How to read weights that do not fit in memory. Default: auto.",
            metavar="auto|stream|mmap|none",
        ),
    ] = None
    pack: Annotated[
        str | None,
        option(
            "Model",
            "--pack",
            "Whether to store streamed weights in this CPU's fast layout, in a copy on disk. Default: auto.",
            metavar="auto|always|never",
        ),
    ] = None
    slots: Annotated[
        int | None,
        option(
            "Model",
            "--slots",
            "How many streamed layers to buffer at once. Default: as many as keep the disk busy.",
            metavar="N",
        ),
    ] = None
    experts: Annotated[
        str | None,
        option(
            "Model",
            "--experts",
            "Mixture of experts: stream single experts (auto) or whole layers (never). Default: auto.",
            metavar="auto|never",
        ),
    ] = None
    kv: Annotated[
        str | None,
        option(
            "Model",
            "--kv",
            "KV cache type; q8_0 halves its memory. Default: f16.",
            metavar="f16|q8_0",
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        option(
            "Model",
            "--lora",
            "LoRA adapter; requires all weights in memory; repeatable.",
            metavar="FILE[:SCALE]",
        ),
    ] = None
    workers: Annotated[
        str | None,
        option(
            "Model",
            "--workers",
            "Machines running 'edgespec worker' that hold some of the layers.",
            metavar="HOST:PORT,...",
        ),
    ] = None
    prompt_cache: Annotated[
        bool | None,
        option(
            "Model",
            "--prompt-cache/--no-prompt-cache",
            "Cache prompt prefixes on disk, so shared prefixes are processed only once. "
            "Default: yes for serve, otherwise no.",
            show_default=False,
        ),
    ] = None
    prompt_cache_size: Annotated[
        str | None,
        option(
            "Model",
            "--prompt-cache-size",
            "Maximum size of the prompt cache on disk. Default: 8GiB.",
            metavar="SIZE",
        ),
    ] = None
    draft: Annotated[
        str | None,
        option(
            "Speculation",
            "-md --draft",
            "Draft model or draft head. Default: auto.",
            autocompletion=complete_draft,
            metavar="PATH|NAME|auto|none",
        ),
    ] = None
    draft_device: Annotated[
        str | None,
        option(
            "Speculation",
            "-devd --draft-device",
            "GPU for the drafter; auto uses one where that is faster. Default: auto.",
            metavar="NAME|auto|none",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        option(
            "Speculation",
            "--drafter",
            "Kind of drafter, if --draft does not determine it. Default: whatever the model supports.",
            metavar="model|lookup|merged",
        ),
    ] = None
    draft_from: Annotated[
        str | None,
        option(
            "Speculation",
            "--draft-from",
            "Text file or folder of text files to draft matching passages from.",
            metavar="FOLDER",
        ),
    ] = None
    learn: Annotated[
        bool | None,
        option(
            "Speculation",
            "--learn/--no-learn",
            "Use and update what earlier runs learned about these models. Default: yes.",
            show_default=False,
        ),
    ] = None
    collect: Annotated[
        bool | None,
        option(
            "Speculation",
            "--collect/--no-collect",
            "Store prompts and answers on disk as training data for 'draft tune'. Default: no.",
            show_default=False,
        ),
    ] = None
    tree: Annotated[
        str | None,
        option(
            "Speculation",
            "--tree",
            "Tree policy: calibrated, specexec, sequoia, opt-tree, eagle2, chain or sequences. "
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
            "Maximum nodes per token tree. Default: auto.",
            metavar="N|auto",
        ),
    ] = None
    tree_depth: Annotated[
        int | None,
        option("Speculation", "--tree-depth", "Maximum depth of a token tree. Default: auto.", metavar="N"),
    ] = None
    tree_width: Annotated[
        int | None,
        option(
            "Speculation",
            "--tree-width",
            "Maximum nodes per draft step. Default: auto.",
            metavar="N",
        ),
    ] = None
    exact: Annotated[
        bool | None,
        option(
            "Speculation",
            "--exact/--no-exact",
            "Make the text bit-identical with any drafter. Default: where that costs almost nothing.",
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
        if self.prompt_cache_size is not None:
            arguments["prompt_cache_size"] = parse_size(self.prompt_cache_size)
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
            "Same as the MODEL argument.",
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
