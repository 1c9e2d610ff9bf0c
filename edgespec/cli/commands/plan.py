"""`edgespec plan`: how a model would run here, and what would help."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.options.declaration import config_option, with_options
from edgespec.cli.options.model_flag import ModelFlag
from edgespec.cli.options.output import OutputOptions
from edgespec.cli.options.sampling import SamplingOptions
from edgespec.cli.screen.formatting import count, table
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import OPTIONS, Config
from edgespec.units import readable, readable_duration, readable_rate, readable_time, significant

if TYPE_CHECKING:
    from edgespec.costs.planned_weights import PlannedExperts, PlannedWeights
    from edgespec.costs.planner import Prediction
    from edgespec.costs.prompts import PromptTime
    from edgespec.planning.embedder import EmbedderPlan
    from edgespec.planning.report.report import BatchPlan, PackFolder, PlanReport

_PLANNED = {"model", "draft", "draft_window", "memory", "context", "threads", "kv", "lora", "workers"}
_PLANNED |= {"gpu_layers", "device", "draft_device", "pack", "pack_dir", "temperature"}
_LEFT_OUT = {*OPTIONS, *(field.name for field in fields(SamplingOptions))} - _PLANNED


@partial(with_options, leave_out=_LEFT_OUT)
def plan(
    called: typer.Context,
    mmproj: Annotated[str | None, config_option("mmproj")] = None,
    *,
    flag: ModelFlag,
    loading: Config,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Predict how a model would run here: memory, trees, speed, and what would help.

    Figures are measured where this machine has run the model, and derived from the speed of its processor
    and disk otherwise. Models on the Hub are not downloaded.
    """
    loading, config = flag.on(loading, called).with_(mmproj=mmproj), sampling.config()
    from edgespec.planning.report.model_report import embedder_plan_for, plan_for

    terminal = Terminal(quiet=output.quiet, verbose=output.verbose)
    with terminal.working() as progress:
        embedder = embedder_plan_for(loading, progress)
        found = None if embedder else plan_for(loading, progress, temperature=config.temperature)
    if embedder is not None:
        if output.as_json:
            results().record(embedder.to_json())
        else:
            results().text(table((), _embedder_rows(embedder)))
        return
    assert found is not None
    if output.as_json:
        results().record(found.to_json())
    else:
        results().text(plan_report(found, verbose=output.verbose))


def plan_report(plan: PlanReport, *, verbose: bool = False) -> str:
    """The plan for people: the choice, what it was compared with, and what would help.

    Args:
        verbose: list what takes the memory, and the folders of packed layers.
    """
    from edgespec.planning.report.sight import describe_projector

    chosen = plan.chosen
    holding = chosen.holding
    about = "about " if plan.uncertain else ""
    rows = [("model", plan.model), ("memory", readable(holding.budget))]
    if holding.streamed_bytes:
        rows.append(("stays in memory", readable(holding.resident_bytes)))
        rows.append(("streamed a pass", _streamed(holding)))
        if holding.experts is not None:
            rows.append(("experts in memory", _experts(holding.experts)))
    else:
        rows.append(("stays in memory", f"all of it; {readable(holding.needed)} are needed"))
    rows.append(("KV cache", f"{readable(plan.cache_bytes)} ({plan.kv})"))
    if plan.adapter_bytes:
        rows.append(("LoRA adapters", readable(plan.adapter_bytes)))
    if plan.projector is not None:
        rows.append(("images", describe_projector(plan.projector.to_json(), reserved=plan.image_bytes > 0)))
    rows.append(("drafter", plan.drafter))
    if chosen.nodes > 1:
        rows.append(("tree", f"{chosen.nodes} nodes, {chosen.tokens_per_pass:.1f} tokens a pass"))
    elif len(plan.sizes) > 1:
        rows.append(("tree", "none: a single token a pass is faster than any tree"))
    rows.append(("speed", f"{about}{readable_rate(chosen.tokens_per_second)}"))
    if plan.plain.holding != chosen.holding or chosen.nodes > 1:
        rate = readable_rate(plan.plain.tokens_per_second)
        rows.append(("without drafts", f"{rate}; with them {plan.comparison.gain:.2f} times that"))
    bottleneck = plan.comparison.bottleneck
    gain = f"{bottleneck.what} would give {bottleneck.gain:.0%} more"
    rows.append(("bottleneck", f"the {_RESOURCES[bottleneck.resource]}: {gain}"))
    if plan.exact:
        rows.append(("exact", "yes: the text does not depend on the drafter"))
    rows.append(("threads", str(plan.threads)))
    rows += _batch_rows(plan.batch, about)
    text = table((), rows)
    if verbose and plan.memory:
        text += "\n" + table(("MEMORY", ""), [(line.what, readable(line.n_bytes)) for line in plan.memory])
    if verbose and plan.pack_folders:
        text += "\n" + _folders(plan.pack_folders)
    sizes = [(size.drafter, size) for size in plan.sizes]
    if len(sizes) > 1:
        text += "\n" + _table(sizes, "ALL TREES")
    if others := plan.comparison.alternatives:
        text += "\n" + _table([(way.drafter, way) for way in others], "WITH --draft")
    if plan.prompts:
        text += "\n" + _prompts(plan)
    text += "\n" + _batches(plan.batch)
    if advice := plan.comparison.advice:
        text += "\nWhat would help:\n"
        text += "".join(f"  {change.what}: +{change.gain:.0%}\n" for change in advice)
    return text + "\n" + "".join(f"{note}\n" for note in plan.notes)


def _folders(folders: list[PackFolder]) -> str:
    return table(
        ("PACKED LAYERS IN", "SIZE", "FREE", "READS"),
        [
            (folder.path, readable(folder.n_bytes), readable(folder.free), f"{readable(folder.rate)}/s")
            for folder in folders
        ],
    )


def _embedder_rows(plan: EmbedderPlan) -> list[tuple[str, str]]:
    """The plan of an embedding model, all of which is in memory."""
    return [
        ("model", plan.name),
        ("memory", readable(plan.budget)),
        ("stays in memory", f"all of it; {readable(plan.needed)} are needed"),
        ("embeddings", f"{plan.shape.width} dimensions, pooling {plan.shape.pooling}"),
        ("input", f"at most {count(plan.context, 'token')}"),
        ("threads", str(plan.n_threads)),
    ]


_RESOURCES = {"disk": "disk", "compute": "processor", "drafter": "drafter's device", None: ""}


def _batch_rows(batch: BatchPlan, about: str) -> list[tuple[str, str]]:
    """The best number of sequences, the fewest that are nearly as fast, and how many there is room for."""
    most, cells = batch.fastest, batch.cells
    said = f"{about}{readable_rate(most.tokens_per_second)} with {count(most.sequences, 'sequence')} at once"
    if batch.chosen is not most:
        close = readable_rate(batch.chosen.tokens_per_second)
        said += f"; {batch.chosen.sequences} are nearly as fast ({close})"
    room = f"room for {count(batch.most, 'sequence')} of {cells.tokens} tokens"
    return [("a batch", said), ("KV cache per token", f"{readable(cells.cell_bytes)}; {room}")]


def _streamed(holding: PlannedWeights) -> str:
    streamed = readable(holding.streamed_bytes)
    if holding.experts is not None:
        streamed += f" on average, for a pass over one row; {readable(holding.pass_bytes(8))} for eight"
    if not holding.n_slots:
        return streamed
    return f"{streamed}, through {holding.n_slots} slots of {readable(holding.slot_bytes)}"


def _experts(experts: PlannedExperts) -> str:
    known = "measured" if experts.measured else "an assumption"
    return (
        f"{experts.n_slots} of {experts.n_experts} ({experts.held:.0%}); "
        f"a token needs {experts.n_needed}, and finds {experts.hit_rate:.0%} of them there ({known})"
    )


def _prompts(plan: PlanReport) -> str:
    def row(tokens: int, time: PromptTime | None) -> tuple[str, ...]:
        beyond = 0 < plan.trained_context <= tokens
        longer = " (longer than --context)" if tokens >= plan.context and not beyond else ""
        missing = "beyond the context" if beyond else "no room"
        return f"{tokens} tokens{longer}", *((missing, *[""] * 4) if time is None else _prompt(time))

    return table(
        ("A PROMPT OF", "TAKES", "PIECES", "OF", "ARITHMETIC", "READING"),
        [row(tokens, time) for tokens, time in plan.prompts.items()],
    )


def _prompt(time: PromptTime) -> tuple[str, ...]:
    """The time that a prompt takes, with its two parts."""
    pieces = str(time.passes), count(min(time.rows, time.tokens), "token")
    return (
        _readable_span(time.seconds),
        *pieces,
        _readable_span(time.compute_s),
        _readable_span(time.read_s),
    )


def _readable_span(seconds: float) -> str:
    """A time that may be milliseconds or hours."""
    return readable_duration(seconds) if seconds < 90 else readable_time(seconds)


def _batches(batch: BatchPlan) -> str:
    return table(
        ("SEQUENCES AT ONCE, NO DRAFTS", "TOKENS/S", "EACH", "PROMPTS", "PASS", "READ A PASS"),
        [
            (
                str(size.sequences),
                significant(size.tokens_per_second),
                significant(size.tokens_per_second_a_sequence),
                _readable_span(size.prompt_s),
                _readable_span(size.pass_s),
                readable(size.holding.pass_bytes(size.sequences)),
            )
            for size in batch.sizes
        ],
    )


def _table(rows: list[tuple[str, Prediction]], name: str) -> str:
    return table(
        (name, "NODES", "TOKENS/S", "TOKENS A PASS", "PASS", "ARITHMETIC", "READING", "DRAFT"),
        [
            (
                label,
                str(way.nodes),
                significant(way.tokens_per_second),
                f"{way.tokens_per_pass:.2f}",
                _readable_span(way.pass_s),
                _readable_span(way.compute_s),
                _readable_span(way.read_s),
                _readable_span(way.draft_s),
            )
            for label, way in rows
        ],
    )
