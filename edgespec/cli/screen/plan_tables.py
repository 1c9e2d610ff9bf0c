"""Plans as tables: one file in detail, or a row for each file of a repository."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from edgespec.base.units import readable, readable_duration, readable_time, significant
from edgespec.cli.screen.formatting import count, table

if TYPE_CHECKING:
    from edgespec.costs.planned_weights import PlannedExperts, PlannedWeights
    from edgespec.planning.embedder import EmbedderPlan
    from edgespec.planning.report.report import PlanReport
    from edgespec.planning.report.repository import FilePlan, RepositoryPlan

_WIDTH = 80  # of a table of files; wider names are on lines of their own
_NAME = 20


def repository_table(found: RepositoryPlan) -> str:
    """A row for each file: its size, its quality, where its weights would be, and tokens per second."""
    fastest = found.fastest
    headings = ("  FILE", "GiB", "BITS", "LOSS", "RESIDENT", "STREAMED", "PLAIN", "PROSE", "CODE")
    rows = [_file_row(file, marked=file is fastest) for file in found.files]
    short = [("", *row[1:]) if len(row[0]) > _NAME else row for row in rows]
    head, *shown = table(headings, short).splitlines()
    lines = [head]
    for row, line in zip(rows, shown, strict=True):  # a long name has a line of its own
        lines += [row[0], line] if len(row[0]) > _NAME else [line]
    lines.append("")
    if fastest is not None:
        where = ", on this machine already" if fastest.here else ""
        where = ", if the repository has it" if found.guessed else where
        lines.append(f"* the fastest that loses less than 5%{where}. In detail:")
        lines.append(f"  edgespec plan {found.repo}:{fastest.name}")
    if any(file.here and file is not fastest for file in found.files):
        lines.append("+ on this machine already")
    lines.append("BITS: of a weight. LOSS: perplexity that the type adds to Llama 3 8B, published by")
    lines.append("llama.cpp. RESIDENT, STREAMED: GiB in memory, and read for every pass.")
    lines.append("PLAIN, PROSE, CODE: tokens/s without and with drafts; may be off by half.")
    drafters: dict[str, list[str]] = {}
    for file in found.files:
        if file.plan is not None:
            drafters.setdefault(file.plan.drafter, []).append(file.name)
    for drafter, names in drafters.items():
        of_these = f" ({', '.join(names)})" if len(drafters) > 1 else ""
        lines += wrap(f"Drafter: {drafter}{of_these}.", _WIDTH)
    for note in found.notes:
        lines += wrap(note, _WIDTH)
    return "\n".join(lines) + "\n"


def _file_row(file: FilePlan, *, marked: bool) -> tuple[str, ...]:
    mark = "*" if marked else "+" if file.here else " "
    loss = "?" if file.loss is None else f"{file.loss:.1%}" if file.loss < 1 else ">100%"
    first = f"{mark} {file.name}", significant(file.n_bytes / 2**30, 2), f"{file.bits:.1f}", loss
    if file.plan is None:
        return *first, "no room", "", "", "", ""
    holding = file.plan.plain.holding
    streamed = significant(holding.streamed_bytes / 2**30, 2) if holding.streamed_bytes else "-"
    speeds = (significant(way.tokens_per_second, 2) for way in file.plan.ways.values())
    return *first, significant(holding.resident_bytes / 2**30, 2), streamed, *speeds


def plan_table(plan: PlanReport, *, verbose: bool = False) -> str:
    """One file: where its weights would be, and its speed by kind of text.

    Args:
        verbose: list what takes the memory.
    """
    text = table((), _facts(plan))
    if verbose:
        text += "\n" + table(("MEMORY", ""), [(what, readable(size)) for what, size in plan.memory.items()])
    text += "\n" + table(
        ("TEXT", "TOKENS/S", "TOKENS A PASS", "NODES", "PASS", "READING", "ARITHMETIC", "DRAFT"),
        [
            (
                kind,
                significant(way.tokens_per_second),
                f"{way.tokens_per_pass:.2f}",
                str(way.nodes),
                _span(way.pass_s),
                _span(way.read_s),
                _span(way.compute_s),
                _span(way.draft_s),
            )
            for kind, way in plan.ways.items()
        ],
    )
    return text + "\n" + "".join(f"{note}\n" for note in plan.notes)


def embedder_table(plan: EmbedderPlan) -> str:
    """The plan of an embedding model, all of which is in memory."""
    return table(
        (),
        [
            ("model", plan.name),
            ("memory", readable(plan.budget)),
            ("stays in memory", f"all of it; {readable(plan.needed)} are needed"),
            ("embeddings", f"{plan.shape.width} dimensions, pooling {plan.shape.pooling}"),
            ("input", f"at most {count(plan.context, 'token')}"),
            ("threads", str(plan.n_threads)),
        ],
    )


def _facts(plan: PlanReport) -> list[tuple[str, str]]:
    from edgespec.planning.report.sight import describe_projector

    holding = plan.chosen.holding
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
    if plan.exact:
        rows.append(("exact", "yes: the text does not depend on the drafter"))
    rows.append(("threads", str(plan.threads)))
    return rows


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


def _span(seconds: float) -> str:
    """A time that may be milliseconds or hours."""
    if not seconds:
        return "-"
    return readable_duration(seconds) if seconds < 90 else readable_time(seconds)
