"""The options of loading a model, declared once: `Config`.

The flags, environment variables and settings of the command line, and the arguments of `edgespec.load`, are
made from the fields here. The settings of an answer are `generation.config.GenerationConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from edgespec.base.option import (
    Group,
    Number,
    OneOf,
    Option,
    Size,
    Switch,
    Text,
    Texts,
    named,
    option,
    options_of,
)
from edgespec.errors import ContradictionError, UsageError, listed

AUTO, ALL, NONE, ATTENTION = "auto", "all", "none", "attention"
_MAX_NODES = 4096  # of a tree
_MAX_PARALLEL = 1000  # sequences
_MAX_TOKENS = 10_000_000
TREES = ("calibrated", "specexec", "sequoia", "opt-tree", "eagle2", "chain", "sequences")
"""The policies of `speculation.policies`, which takes too long to import for help and completion."""
LOOKUP = "lookup"
MTP = "mtp"
NO_MODEL = (AUTO, NONE, LOOKUP, MTP)
"""Values of --draft that name no model."""


@dataclass(frozen=True)
class ModelConfig(Group):
    """The target and its context."""

    name: str | None = option(
        None,
        "",
        "GGUF file or model name.",
        Text(),
        says="the bundled smollm2-135m",
        name="model",
        metavar="MODEL",
        more="A name is in the catalog, or is org/repo[:quant] on the Hub, which is downloaded if needed.",
    )
    context: int = option(
        4096, "-c --context", "Maximum tokens, prompt plus answer.", Number(16, _MAX_TOKENS)
    )
    kv: str = option(
        "f16",
        "--kv",
        "KV cache type; q8_0 halves its memory.",
        OneOf("f16", "q8_0"),
        more="It changes the text a little. The drafter's cache is always f16.",
    )
    lora: tuple[str, ...] = option(
        (),
        "--lora",
        "LoRA adapter; requires all weights in memory; repeatable.",
        Texts(repeated=True),
        says="",
        metavar="FILE[:SCALE]",
        more='Each is "FILE" or "FILE:SCALE".',
    )
    mmproj: str | None = option(
        None,
        "--mmproj",
        "Vision projector (mmproj GGUF) of the model.",
        Text(),
        says="mmproj-*.gguf beside the model",
        everywhere=False,
        metavar="FILE",
        more="It is loaded in a child process while images are read.",
    )
    images: bool = option(
        False,
        "",
        "Reserve memory for image input.",
        Switch(),
        says="only where one is named",
    )

    @property
    def reads_images(self) -> bool:
        """True if images will be read for sure, so that memory is reserved for that."""
        return self.images or self.mmproj is not None


@dataclass(frozen=True)
class MemoryConfig(Group):
    """The memory budget, and what becomes of weights that exceed it."""

    limit: int | None = option(
        None,
        "--memory",
        "Memory limit.",
        Size(),
        says="all available memory",
        name="memory",
        more='In bytes, or a size such as "12GiB".',
    )
    offload: str = option(
        AUTO,
        "--offload",
        "How to read weights that do not fit in memory.",
        OneOf(AUTO, "stream", "mmap", NONE),
        more='"none" keeps all weights in memory, "stream" reads the others from disk in every pass, "mmap" '
        'lets the system page them, and "auto" keeps or streams them.',
    )
    pack: str = option(
        AUTO,
        "--pack",
        "Store a copy of streamed weights on disk, in this CPU's fast layout.",
        OneOf(AUTO, "always", "never"),
        more='"auto" does so if the disk has room for the copy.',
    )
    pack_dir: tuple[str, ...] = option(
        (),
        "--pack-dir",
        "Folder for that copy; repeatable: several disks are read at the same time.",
        Texts(repeated=True),
        says="",
        metavar="FOLDER",
        more="Each holds a share by how fast its disk reads. Default: a folder in the cache.",
    )
    slots: int | None = option(
        None,
        "--slots",
        "Streamed layers, or parts of large ones, to buffer at once.",
        Number(2, 4096),
        says="as many as keep the disk busy",
    )
    experts: str = option(
        AUTO,
        "--experts",
        "MoE: stream experts individually (auto) or whole layers (never).",
        OneOf(AUTO, "never"),
    )
    prompt_cache: bool = option(
        False,
        "--prompt-cache/--no-prompt-cache",
        "Cache prompt prefixes on disk, so shared prefixes are processed only once.",
        Switch(),
        says="yes for serve, otherwise no",
    )
    prompt_cache_size: int = option(
        8 << 30,
        "--prompt-cache-size",
        "Maximum size of the prompt cache on disk.",
        Size(),
        says="8GiB",
        more="It is shared by all models; the least recently used is deleted first.",
    )

    def check_offload(self) -> None:
        """Refuse options that have no effect with others.

        Raises:
            ContradictionError: there are such.
        """
        if self.offload in ("mmap", NONE):
            for name in _OF_STREAMING:
                if getattr(self, name) not in (OPTIONS[name].default, "never" if name == "pack" else None):
                    raise _excluded(named("offload", self.offload), named(name), "offload", name)
        if self.pack == "never" and self.pack_dir:
            raise _excluded(named("pack", "never"), named("pack_dir"), "pack", "pack_dir")
        if self.prompt_cache_size != OPTIONS["prompt_cache_size"].default and not self.prompt_cache:
            raise ContradictionError(
                f"{named('prompt_cache_size')} has no effect without {named('prompt_cache', True)}.",
                f"Add {named('prompt_cache', True)}.",
                "prompt_cache_size",
                "prompt_cache",
            )


@dataclass(frozen=True)
class DevicesConfig(Group):
    """The processor's threads, and the devices and machines that hold layers."""

    threads: int | None = option(
        None,
        "-t --threads",
        "CPU threads.",
        Number(1, 1024),
        says="one per physical core, or more where that is faster",
    )
    gpu_layers: int | str = option(
        AUTO,
        "-ngl --gpu-layers",
        "Layers to put on GPUs; auto picks the fastest split.",
        Number(0, 999_999, {AUTO: AUTO, ALL: ALL, ATTENTION: ATTENTION}, hidden={"-1": ALL}),  # as elsewhere
        metavar="N|auto|all|...",
        more='"attention" puts attention and caches of layers there first, and other weights as they fit. '
        "0 uses no GPU. See docs/devices.md.",
    )
    names: tuple[str, ...] = option(
        (),
        "-dev --device",
        "GPUs to use, by the names that 'edgespec doctor' prints.",
        Texts(),
        says=ALL,
        name="device",
        metavar="NAME,...",
    )
    draft_device: str = option(
        AUTO,
        "-devd --draft-device",
        "GPU for the drafter; auto uses one where that is faster.",
        Text(AUTO, NONE),
        metavar="NAME|auto|none",
    )
    workers: tuple[str, ...] = option(
        (),
        "--workers",
        "Machines running 'edgespec worker' that hold some of the layers.",
        Texts(),
        says="",
        metavar="HOST:PORT,...",
        more="All weights must fit in these memories and this one. See docs/devices.md.",
    )
    leave_out_missing: bool = option(
        False, "", "Continue without workers that do not answer; from disk, if none does.", Switch()
    )

    @property
    def layers_here(self) -> int | str:
        """Layers for this machine's GPUs; none while workers hold layers."""
        return 0 if self.workers else self.gpu_layers

    @property
    def drafter_here(self) -> str:
        """The GPU of this machine for the drafter: "auto", "none" or a name."""
        return NONE if self.workers else self.draft_device

    @property
    def requires_gpu(self) -> bool:
        """True if a GPU of this machine must be used."""
        return self.layers_here not in (0, AUTO) or self.drafter_here not in (AUTO, NONE)


@dataclass(frozen=True)
class SpeculationConfig(Group):
    """The drafter and its trees."""

    draft: str = option(
        AUTO,
        "-md --draft",
        "Draft model, or an experimental head; mtp is the head in the model's own file.",
        Text(),
        metavar="PATH|NAME|auto|mtp|none",
        more='"mtp" drafts with the layer for multi-token prediction in the model\'s own file, "lookup" '
        'drafts from the text itself, "none" decodes without drafting, and "auto" takes the best drafter on '
        "this machine: registered, made, the MTP layer, of the same family, or else the text itself. Heads, "
        "MTP layers among them, were tested with tiny models only.",
    )
    kind: str | None = option(
        None,
        "--drafter",
        "Kind of drafter, if --draft does not determine it.",
        OneOf("model", "lookup", "merged"),
        says="whatever the model supports",
        name="drafter",
    )
    draft_from: str | None = option(
        None,
        "--draft-from",
        "Text file or folder of text files to draft matching passages from.",
        Text(),
        says="",
        metavar="FOLDER",
        more="An index of it is kept in the cache folder.",
    )
    reuse_answers: bool = option(
        True,
        "--reuse-answers/--no-reuse-answers",
        "Draft from earlier answers, which are kept in memory.",
        Switch(),
        says="yes",
        more="The server keeps those to each API key apart.",
    )
    draft_window: int | None = option(
        None,
        "--draft-window",
        "Latest tokens of a long text that a draft model reads; 0: the whole text.",
        Number(0, _MAX_TOKENS, {AUTO: None}),
        says=AUTO,
        more='It reads the first 64 tokens too, and between a half and all of these. "auto" reads more with '
        "larger draft models.",
    )
    learn: bool = option(
        True,
        "--learn/--no-learn",
        "Use and update what earlier runs learned about these models.",
        Switch(),
        says="yes",
        more="docs/how-to/privacy.md says what that is.",
    )
    tree: str = option(
        "calibrated", "--tree", f"Tree policy: {listed(TREES)}.", OneOf(*TREES), metavar="NAME"
    )
    tree_budget: int | None = option(
        None,
        "--tree-budget",
        "Maximum nodes per token tree.",
        Number(1, _MAX_NODES, {AUTO: None}),
        says=AUTO,
    )
    tree_depth: int | None = option(
        None, "--tree-depth", "Maximum depth of a token tree.", Number(1, _MAX_NODES), says=AUTO
    )
    tree_width: int | None = option(
        None, "--tree-width", "Maximum nodes per draft step.", Number(1, _MAX_NODES), says=AUTO
    )
    exact: bool | None = option(
        None,
        "--exact/--no-exact",
        "Make the text independent of the drafter, bit for bit.",
        Switch(),
        says="where that costs almost nothing",
        more="Exact decoding refuses verification rules by which the drafter influences the text.",
    )

    @property
    def drafts(self) -> bool:
        """False for plain decoding."""
        return self.draft != NONE

    @property
    def drafts_from_answers(self) -> bool:
        """True if earlier answers are kept to draft from."""
        return self.reuse_answers and self.drafts and self.kind != "model"

    @property
    def names_a_model(self) -> bool:
        """True if `draft` is the name or path of a model."""
        return self.draft not in NO_MODEL

    @property
    def uses_mtp(self) -> bool:
        """True if the target's own layers are to draft."""
        return self.draft == MTP

    @property
    def may_use_a_model(self) -> bool:
        """True unless the drafter is known to need no model."""
        return self.kind != "lookup"

    def check_drafter(self) -> None:
        """Refuse options of drafting that exclude each other.

        Raises:
            ContradictionError: they do.
        """
        kind, draft = self.kind, self.draft
        if draft == NONE:
            self._refuse(_OF_DRAFTS, named("draft", NONE), "draft")
        if draft == LOOKUP:
            self._refuse(("draft_window",), named("draft", LOOKUP), "draft")
        if kind == LOOKUP:
            self._refuse(("draft_window",), named("drafter", LOOKUP), "drafter")
        if self.draft_from is not None and kind == "model":
            raise _excluded(named("drafter", kind), named("draft_from"), "drafter", "draft_from")
        if kind == LOOKUP and (draft == NONE or self.names_a_model or self.uses_mtp):
            raise _excluded(named("drafter", kind), named("draft", draft), "drafter", "draft")
        if kind in ("model", "merged") and draft in (NONE, LOOKUP):
            raise ContradictionError(
                f"{named('drafter', kind)} needs a model, but {named('draft', draft)} names none.",
                f"Name one: {named('draft', 'PATH')}",
                "drafter",
                "draft",
            )

    def _refuse(self, names: Sequence[str], given: str, option: str) -> None:
        """Refuse options that another one, as it was given, leaves without effect."""
        for name in names:
            if getattr(self, name) != OPTIONS[name].default:
                raise _excluded(given, named(name), option, name)

    def require_exact_budget(self, most: int) -> None:
        """Refuse larger trees than exact decoding allows, if both were asked for.

        Args:
            most: rows of an exact pass.

        Raises:
            UsageError: that is the case.
        """
        if self.exact and self.tree_budget is not None and self.tree_budget > most:
            raise UsageError(
                f"{named('tree_budget', self.tree_budget)} is too large: exact decoding allows {most} nodes "
                "with this model here.",
                f"Use {named('tree_budget', most)} or less, or {named('exact', False)}.",
            )


@dataclass(frozen=True)
class BatchingConfig(Group):
    """The number of sequences that are answered at once, and their usual length."""

    parallel: int | str | None = option(
        None,
        "--parallel",
        "Sequences to reserve KV cache for, within the memory limit.",
        Number(1, _MAX_PARALLEL, {AUTO: AUTO}),
        says="one, whose room several share",
        everywhere=False,
        more='"auto" takes the number with the highest throughput, by the memory and the measured passes.',
    )
    text_tokens: int | None = option(
        None,
        "",
        "Tokens of a usual sequence, prompt plus answer, where there are several.",
        Number(1, _MAX_TOKENS),
        says="512",
    )


@dataclass(frozen=True)
class Config:
    """All options of loading a model.

    Raises:
        UsageError: a value is out of its range, or two options contradict each other.
    """

    model: ModelConfig = ModelConfig()
    memory: MemoryConfig = MemoryConfig()
    devices: DevicesConfig = DevicesConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    batching: BatchingConfig = BatchingConfig()

    def __post_init__(self) -> None:
        if not self.devices.workers:
            return
        if self.memory.offload in ("stream", "mmap"):
            raise ContradictionError(
                f"{named('offload', self.memory.offload)} and {named('workers')} exclude each other.",
                "Leave out one of them: layers that fit in no machine's memory are streamed in any case.",
                "offload",
                "workers",
            )
        if self.devices.gpu_layers not in (0, AUTO) or self.devices.draft_device not in (AUTO, NONE):
            raise ContradictionError(
                f"This machine's GPUs and {named('workers')} exclude each other.",
                f"Leave out {named('gpu_layers')} and {named('draft_device')}, or lend the GPU with "
                "'edgespec worker' on this machine.",
                *("gpu_layers", "draft_device", "workers"),
            )

    def check(self) -> None:
        """Refuse options that exclude each other, or would be ignored, in what a person asks for.

        Raises:
            ContradictionError: there are such.
        """
        self.memory.check_offload()
        self.speculation.check_drafter()
        devices = self.devices
        if devices.names and devices.layers_here == 0 and devices.drafter_here == NONE:
            other = "workers" if devices.workers else "gpu_layers"
            given = named("workers") if devices.workers else named("gpu_layers", 0)
            raise _excluded(given, named("device"), other, "device")
        uses_model = self.speculation.may_use_a_model and self.speculation.draft not in (NONE, LOOKUP)
        if devices.draft_device not in (AUTO, NONE) and not uses_model:
            why = "drafter" if self.speculation.kind == LOOKUP else "draft"
            given = named(why, LOOKUP if self.speculation.kind == LOOKUP else self.speculation.draft)
            raise _excluded(given, named("draft_device"), why, "draft_device")

    @classmethod
    def of(cls, **values: Any) -> Config:
        """The configuration with some options, by their names as arguments; raises as `Config`."""
        return cls().with_(**values)

    def with_(self, **values: Any) -> Config:
        """A copy with some options changed, by their names as arguments; raises as `Config`."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            changes.setdefault(_GROUPS[name], {})[OPTIONS[name].field] = value
        return replace(
            self, **{group: replace(getattr(self, group), **its) for group, its in changes.items()}
        )

    def arguments(self) -> dict[str, Any]:
        """The options that differ from their defaults, by their names as arguments, for JSON too."""
        values = {name: getattr(getattr(self, _GROUPS[name]), OPTIONS[name].field) for name in OPTIONS}
        return {
            name: [*value] if isinstance(value, tuple) else value
            for name, value in values.items()
            if value != OPTIONS[name].default
        }


_BY_GROUP = {group.name: options_of(type(group.default)) for group in fields(Config)}
_GROUPS = {option.name: group for group, options in _BY_GROUP.items() for option in options}
OPTIONS: Mapping[str, Option] = {option.name: option for options in _BY_GROUP.values() for option in options}
"""Every option by its name as an argument."""


_OF_DRAFTS = ("draft_from", "draft_window", "tree", "tree_budget", "tree_depth", "tree_width")
_OF_STREAMING = ("pack", "pack_dir", "slots", "experts")


def _excluded(first: str, second: str, *names: str) -> ContradictionError:
    return ContradictionError(f"{first} and {second} exclude each other.", "Leave out one of them.", *names)


def heading_of(name: str) -> str:
    """The heading under which `--help` lists an option: that of its group."""
    return _GROUPS[name].capitalize()
