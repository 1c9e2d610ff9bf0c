"""`edgespec plan`: how a model would run here, and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.completion import complete_draft, complete_model
from edgespec.cli.options import parse_size
from edgespec.cli.terminal import Terminal, results, table
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.hardware.planner import Prediction
    from edgespec.hardware.planning import Plan


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Path, catalog name or org/repo[:quant]; need not be here.", autocompletion=complete_model
        ),
    ],
    draft: Annotated[
        str,
        typer.Option("--draft", help="The drafter: PATH, NAME, auto or none.", autocompletion=complete_draft),
    ] = "auto",
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="Memory to plan with. Default: what is available.", metavar="SIZE"),
    ] = None,
    context: Annotated[
        int, typer.Option("--context", help="Most tokens of prompt and answer.", metavar="N")
    ] = 4096,
    threads: Annotated[
        int | None, typer.Option("--threads", help="CPU threads. Default: all cores.", metavar="N")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", help="For answers sampled so.", metavar="T")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only results and errors.")] = False,
) -> None:
    """Say how a model would run here: what stays in memory, which trees, how fast, and what would help.

    The figures are those of 'edgespec profile' where it has measured them, and derived from other models
    where it has not. A model on the Hub is not downloaded for that.
    """
    size = parse_size(memory) if memory else None
    if not 16 <= context <= 10_000_000:
        raise UsageError(f"The context is {context}.", "It must be from 16 to 10000000.")
    if threads is not None and not 1 <= threads <= 1024:
        raise UsageError(f"The number of threads is {threads}.", "It must be from 1 to 1024.")
    if not 0 <= temperature <= 100:
        raise UsageError(f"The temperature is {temperature:g}.", "It must be from 0 to 100.")
    from edgespec.hardware.planning import PlanWish, plan_for
    from edgespec.hardware.probe import usable_cores

    terminal = Terminal(quiet=quiet)
    wish = PlanWish(model, draft, size, context, threads or usable_cores(), temperature)
    with terminal.working() as progress:
        found = plan_for(wish, progress)
    if as_json:
        results().record(found.to_json())
    else:
        results().text(_report(found))


def _report(plan: Plan) -> str:
    chosen = plan.chosen
    holding = chosen.holding
    about = "about " if plan.uncertain else ""
    rows = [("model", plan.model), ("memory", _gb(holding.budget))]
    if holding.streamed_bytes:
        rows.append(("stays in memory", _gb(holding.resident_bytes)))
        ring = f"{holding.n_slots} slots of {_gb(holding.slot_bytes)}"
        rows.append(("streamed a pass", f"{_gb(holding.streamed_bytes)}, through {ring}"))
    else:
        rows.append(("stays in memory", f"all of it; {_gb(holding.needed)} are needed"))
    if chosen.nodes > 1:
        rows.append(("drafter", chosen.drafter))
        rows.append(("tree", f"{chosen.nodes} nodes, {chosen.tokens_per_pass:.1f} tokens a pass"))
    else:
        rows.append(("drafter", "none: plain decoding is the fastest"))
    rows.append(("speed", f"{about}{chosen.tokens_per_second:.2f} tokens/s"))
    if chosen.nodes > 1:
        gain = chosen.tokens_per_second / plan.plain.tokens_per_second
        rows.append(
            ("plain decoding", f"{plan.plain.tokens_per_second:.2f} tokens/s; this is {gain:.1f} times that")
        )
    rows.append(("what binds", _BOUNDS[chosen.bound]))
    text = table((), rows)
    if len(plan.ways) > 1:
        text += "\n" + _table([(way.drafter, way) for way in plan.ways], "DRAFTER, BEST TREE")
    sizes = [(size.drafter, size) for size in plan.sizes if size.drafter == chosen.drafter]
    if len(sizes) > 1:
        text += "\n" + _table(sizes, "ALL TREES")
    if plan.advice:
        text += "\nWhat would help:\n"
        text += "".join(f"  {advice.what}: +{advice.gain:.0%}\n" for advice in plan.advice)
    return text + "\n" + "".join(f"{note}\n" for note in plan.notes)


_BOUNDS = {
    "disk": "the disk: passes wait for weights",
    "compute": "the processor: passes take as long as their arithmetic",
    "drafter": "the drafter: drafting takes longer than passes",
}


def _table(rows: list[tuple[str, Prediction]], name: str) -> str:
    return table(
        (name, "NODES", "TOKENS/S", "TOKENS A PASS", "PASS", "DRAFT", "BOUND BY"),
        [
            (
                label,
                str(way.nodes),
                f"{way.tokens_per_second:.2f}",
                f"{way.tokens_per_pass:.2f}",
                _seconds(way.pass_s),
                _seconds(way.draft_s),
                way.bound,
            )
            for label, way in rows
        ],
    )


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
