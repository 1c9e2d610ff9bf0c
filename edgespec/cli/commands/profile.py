"""`edgespec profile`: measures this machine with a model, and keeps the figures."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.base.units import readable, readable_duration, readable_time
from edgespec.cli.options.common import ModelFlag, OutputOptions
from edgespec.cli.options.declaration import option, with_options
from edgespec.cli.screen.formatting import table
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import Config
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.costs.yields import TreeYields
    from edgespec.measure.full_profile import FullProfile
    from edgespec.profiles.store import DraftProfile, PassProfile

_LONGEST_S = 3600.0


_LEFT_OUT = (
    "tree_budget",
    "prompt_cache",
    "prompt_cache_size",
    "draft_from",
    "reuse_answers",
    "draft_window",
    "learn",
)


@partial(with_options, leave_out=_LEFT_OUT)
def profile(
    called: typer.Context,
    seconds: Annotated[
        float, option(None, "--seconds", "Approximate measuring time in seconds.", metavar="N")
    ] = 50.0,
    *,
    flag: ModelFlag,
    loading: Config,
    output: OutputOptions,
) -> None:
    """Measure disk, memory, passes, draft steps and trees, and store the results.

    Tree sizes and plans use these results. Without them, a model's first answer begins with a few timed
    passes.
    """
    if not 1 <= seconds <= _LONGEST_S:
        raise UsageError(f"--seconds must be from 1 to {_LONGEST_S:g}, not {seconds:g}.")
    from edgespec.profiles.store import ProfileStore

    loading = flag.on(loading, called)
    store = ProfileStore()
    store.require_writable()
    terminal = Terminal(quiet=output.quiet, verbose=output.verbose)
    with terminal.load(loading) as engine:
        from edgespec.measure.full_profile import measure_full_profile

        terminal.note(f"Measuring for about {readable_time(seconds)}.")
        with terminal.working(engine, long=True) as progress:
            found = measure_full_profile(engine, seconds, progress, store)
    from edgespec.machine.memory import release_free_memory
    from edgespec.measure.throughput import memory_bandwidth

    # Beside the model there may be no memory for it, nor beside what was freed of it and not returned.
    release_free_memory()
    found = replace(found, bandwidth=memory_bandwidth(found.threads))
    if found.noisy:
        terminal.warn(
            "The machine was busy during both attempts, so actual speed may be higher. Close other "
            "programs and measure again."
        )
    if output.as_json:
        results().record(found.to_json())
    else:
        results().text(_report(found))


def _report(found: FullProfile) -> str:
    """Render the measurements for people."""
    rows = [
        ("target", f"{found.model}, {'exact' if found.exact else 'not bit-exact'}"),
        ("drafter", found.drafter),
        ("threads", str(found.threads)),
        *(("device", device) for device in found.devices),
        *((("layers", found.layers),) if found.layers else ()),
    ]
    if found.bandwidth is not None:
        rows.append(("memory", f"{_rate(found.bandwidth)} while all threads copy"))
    if found.disk is not None:
        if found.disk.direct:
            how = f"fastest {found.disk.threads} at a time, {found.disk.block_bytes >> 20} MiB each"
            rows.append(("disk, direct reads", f"{_rate(found.disk.direct)} ({how})"))
        if found.disk.streamed_rate:
            rows.append(("disk, during passes", _rate(found.disk.streamed_rate)))
        rows.append(("disk, through the cache", _rate(found.disk.buffered)))
    rows.append(("start", f"{found.passes.load_s:.1f} s"))
    if found.experts is not None:
        rows.append(
            (
                "experts",
                f"{found.experts.hit_rate:.0%} found in memory, which holds {found.experts.held:.0%} of all",
            )
        )
    # What a pass reads of experts depends on its text, and is not hidden behind its arithmetic.
    streamed = found.streamed_bytes if found.experts is None else 0
    text = table((), rows) + "\n" + _passes(found.passes, streamed)
    if found.drafts is not None:
        text += "\n" + _drafts(found.drafts)
    for name, yields in (("greedy", found.greedy), ("temperature 1", found.sampled)):
        if yields is not None:
            text += "\n" + _yields(name, yields)
    return text


def _passes(passes: PassProfile, streamed: int) -> str:
    from edgespec.costs.pass_time import read_seconds, streamed_curve

    curve = passes.compute
    whole = streamed_curve(curve, read_seconds(streamed, passes.read_rate), passes.overlap)
    headings = ("PASS, ROWS", "COMPUTE", "SPREAD", *(("WITH THE DISK",) if streamed else ()))
    rows = []
    for row, seconds, spread in zip(curve.rows, curve.seconds, passes.spread, strict=False):
        line = (str(row), readable_duration(seconds), f"{spread:.0%}")
        rows.append((*line, readable_duration(whole.at(row))) if streamed else line)
    knee = f"Up to {whole.knee(0.1)} rows a pass takes about as long as one row."
    if streamed:
        knee += f" It reads {readable(streamed)} at {_rate(passes.read_rate)}."
    return table(headings, rows) + knee + "\n"


def _drafts(drafts: DraftProfile) -> str:
    rows = [
        (str(row), readable_duration(seconds))
        for row, seconds in zip(drafts.step.rows, drafts.step.seconds, strict=True)
    ]
    return table(("DRAFT STEP, ROWS", "SECONDS"), rows) + (
        f"Tree bookkeeping adds {drafts.overhead - 1:.0%} to the drafter's steps.\n"
    )


def _yields(name: str, yields: TreeYields) -> str:
    rows = [(str(budget), f"{tokens:.2f}") for budget, tokens in yields.tokens.items()]
    ranks = ", ".join(f"{share:.2f}" for share in yields.by_rank[:4])
    depths = ", ".join(f"{share:.2f}" for share in yields.by_depth[:6])
    return table((f"TREE, NODES ({name})", "TOKENS A PASS"), rows) + (
        f"The target's choice was the drafter's first, second, ... candidate in {ranks} of "
        f"{yields.passes} passes' "
        f"nodes; paths went on from depth 0, 1, ... in {depths}.\n"
    )


def _rate(bytes_per_second: float) -> str:
    return f"{readable(bytes_per_second)}/s"
