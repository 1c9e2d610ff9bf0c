"""`edgespec plan`: how a model would run here, and what would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

import typer

from edgespec.cli.options.declaration import with_options
from edgespec.cli.options.model_flag import ModelFlag
from edgespec.cli.options.output import OutputOptions
from edgespec.cli.options.sampling import SamplingOptions
from edgespec.cli.screen.formatting import count, table
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import OPTIONS, Config
from edgespec.units import readable, readable_duration

if TYPE_CHECKING:
    from edgespec.costs.planned_weights import PlannedExperts, PlannedWeights
    from edgespec.costs.planner import Prediction
    from edgespec.costs.prompts import PromptTime
    from edgespec.plans.report import BatchPlan, PlanReport

_PLANNED = {"model", "draft", "memory", "context", "threads", "kv", "lora", "workers"}
_PLANNED |= {"gpu_layers", "device", "draft_device", "temperature"}
_LEFT_OUT = {*OPTIONS, *(field.name for field in fields(SamplingOptions))} - _PLANNED


@partial(with_options, leave_out=_LEFT_OUT)
def plan(
    called: typer.Context,
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
    loading, config = flag.on(loading, called), sampling.config()
    from edgespec.plans.model_plan import plan_for

    terminal = Terminal(quiet=output.quiet, verbose=output.verbose)
    with terminal.working() as progress:
        found = plan_for(loading, progress, temperature=config.temperature)
    if output.as_json:
        results().record(found.to_json())
    else:
        results().text(plan_report(found))


def plan_report(plan: PlanReport) -> str:
    """The plan for people: the choice, what it was compared with, and what would help."""
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
    rows.append(("the context", f"{readable(plan.cache_bytes)} of keys and values as {plan.kv}"))
    if plan.adapter_bytes:
        rows.append(("LoRA adapters", readable(plan.adapter_bytes)))
    if chosen.nodes > 1:
        rows.append(("drafter", chosen.drafter))
        rows.append(("tree", f"{chosen.nodes} nodes, {chosen.tokens_per_pass:.1f} tokens a pass"))
    else:
        compared = len(plan.ways) > 1
        rows.append(("drafter", f"none{': plain decoding is the fastest' if compared else ''}"))
    rows.append(("speed", f"{about}{chosen.tokens_per_second:.2f} tokens/s"))
    if chosen.nodes > 1:
        plain = f"{plan.plain.tokens_per_second:.2f} tokens/s"
        rows.append(("plain decoding", f"{plain}; this is {plan.comparison.gain:.1f} times that"))
    rows.append(("bottleneck", _BOUNDS[chosen.bound]))
    many, cells = plan.batch.chosen, plan.batch.cells
    rows.append(
        (
            "a batch",
            f"{about}{many.tokens_per_second:.2f} tokens/s with {count(many.sequences, 'text')} at once, "
            f"{many.tokens_per_second_a_sequence:.2f} each",
        )
    )
    room = f"room for {count(plan.batch.most, 'text')} of {cells.tokens} tokens"
    rows.append(("KV cache per token", f"{readable(cells.cell_bytes)}; {room}"))
    text = table((), rows)
    if len(plan.ways) > 1:
        text += "\n" + _table([(way.drafter, way) for way in plan.ways], "DRAFTER, BEST TREE")
    sizes = [(size.drafter, size) for size in plan.comparison.beside(chosen)]
    if len(sizes) > 1:
        text += "\n" + _table(sizes, "ALL TREES")
    if plan.prompts:
        text += "\n" + _prompts(plan.prompts)
    text += "\n" + _batches(plan.batch)
    if plan.advice:
        text += "\nWhat would help:\n"
        text += "".join(f"  {advice.what}: +{advice.gain:.0%}\n" for advice in plan.advice)
    return text + "\n" + "".join(f"{note}\n" for note in plan.notes)


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


_BOUNDS = {
    "disk": "the disk: passes wait for weights",
    "compute": "the processor: passes take as long as their arithmetic",
    "drafter": "the drafter: drafting takes longer than passes",
}


def _prompts(prompts: Mapping[int, PromptTime | None]) -> str:
    return table(
        ("A PROMPT OF", "TAKES", "PIECES", "OF", "ARITHMETIC", "READING", "BOUND BY"),
        [
            (f"{tokens} tokens", *(("no room", *[""] * 5) if time is None else _prompt(time)))
            for tokens, time in prompts.items()
        ],
    )


def _prompt(time: PromptTime) -> tuple[str, ...]:
    """The time that a prompt takes, with its two parts."""
    pieces = str(time.passes), count(min(time.rows, time.tokens), "token")
    return (
        readable_duration(time.seconds),
        *pieces,
        readable_duration(time.compute_s),
        readable_duration(time.read_s),
        time.bound,
    )


def _batches(batch: BatchPlan) -> str:
    return table(
        ("TEXTS AT ONCE", "TOKENS/S", "EACH", "PASS", "READ A PASS", "BOUND BY"),
        [
            (
                str(size.sequences),
                f"{size.tokens_per_second:.2f}",
                f"{size.tokens_per_second_a_sequence:.2f}",
                readable_duration(size.pass_s),
                readable(size.holding.pass_bytes(size.sequences)),
                size.bound,
            )
            for size in batch.sizes
        ],
    )


def _table(rows: list[tuple[str, Prediction]], name: str) -> str:
    return table(
        (name, "NODES", "TOKENS/S", "TOKENS A PASS", "PASS", "DRAFT", "BOUND BY"),
        [
            (
                label,
                str(way.nodes),
                f"{way.tokens_per_second:.2f}",
                f"{way.tokens_per_pass:.2f}",
                readable_duration(way.pass_s),
                readable_duration(way.draft_s),
                way.bound,
            )
            for label, way in rows
        ],
    )
