"""`edgespec draft`: makes, tunes and lists drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgespec.base.units import parse_size, readable_rate
from edgespec.cli.options.declaration import Json, Quiet, command_group, config_option, option
from edgespec.cli.screen.formatting import table
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal

_LITTLE = 1.1  # times the speed

app = command_group("draft", "Make and tune drafters.")

# What the commands have in common.
Target = Annotated[str, typer.Argument(help="Path, catalog name or org/repo[:quant].", metavar="TARGET")]
Output = Annotated[
    Path | None,
    option(
        None,
        "-o --output",
        "Output file. Default: in EdgeSpec's data folder.",
        variable=False,
        metavar="FILE",
    ),
]
Memory = Annotated[str | None, config_option("memory", panel=None, help_text="Memory limit for the target.")]
PassSeconds = Annotated[
    float | None, option(None, "--pass-seconds", "Seconds per target pass. Default: measured.", metavar="S")
]
Threads = Annotated[
    int | None, config_option("threads", panel=None, help_text="CPU threads. Default: all cores.")
]


@app.command(epilog="Example:\n\nedgespec draft make llama3.3-70b --memory 24GiB")
def make(
    target: Target,
    output: Output = None,
    memory: Memory = None,
    size: Annotated[
        str | None, option(None, "--size", "Maximum size of the drafter.", metavar="SIZE")
    ] = None,
    quantization: Annotated[
        list[str] | None, option(None, "--quantization", "Quantization to try; repeatable.", metavar="TYPE")
    ] = None,
    pass_seconds: PassSeconds = None,
    tokens: Annotated[int, option(None, "--tokens", "Tokens per answer of the target.", metavar="N")] = 64,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a drafter: the target in fewer bits, in the quantization that makes it fastest.

    The target generates some text first; candidates are ranked by how well they predict it. If
    interrupted, the same command resumes where it stopped.
    """
    limits = (
        None if memory is None else parse_size(memory, "--memory"),
        None if size is None else parse_size(size, "--size"),
    )
    from edgespec.base.units import readable
    from edgespec.drafting.make import MakeOptions, kept_of, make_for

    terminal = Terminal(quiet=quiet)
    options = MakeOptions(
        output=output,
        memory=limits[0],
        size=limits[1],
        quantizations=tuple(quantization or ()),
        pass_s=pass_seconds,
        tokens=tokens,
        threads=threads,
    )
    try:
        with terminal.working(long=True) as progress:
            made = make_for(target, options, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted. {kept_of(target, options)}") from None
    if as_json:
        results().record(made.to_json())
        return
    found = made.measured
    results().text(f"{made.path}\n")
    terminal.note(
        f"Made from {made.target.name}: {found.quantization}. {readable(found.n_bytes)}, "
        f"{found.step_s * 1000:.1f} ms per step, agrees on {found.agreement.top1:.0%} of tokens at once and "
        f"{found.agreement.top4:.0%} within four ({found.agreement.tokens} tokens). --draft auto uses it."
    )
    terminal.note(gain_in_words(made.tokens_per_second, made.gain))


def gain_in_words(tokens_per_second: float, gain: float) -> str:
    """Describe a drafter's gain, by what was measured of it."""
    if gain < _LITTLE:
        return "It will gain little: the target's passes are too short, or the two agree too seldom."
    return (
        f"With it, the target should write about {readable_rate(tokens_per_second, digits=2)}, "
        f"{gain:.1f} times as much as with one token a pass. 'edgespec bench' measures it."
    )


@app.command(epilog="Example:\n\nedgespec draft tune llama3.3-70b --from llama3.2-1b --minutes 60")
def tune(
    target: Target,
    start: Annotated[
        str | None,
        option(
            None,
            "--from",
            "Drafter to start from. Default: the best known one, or a new one.",
            metavar="DRAFTER",
            variable=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        option(
            None, "--prompts", "File with your own prompts, one per line.", metavar="FILE", variable=False
        ),
    ] = None,
    minutes: Annotated[
        float, option(None, "--minutes", "Time limit for answering and training.", metavar="N")
    ] = 30.0,
    output: Output = None,
    memory: Memory = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tune a drafter on the target's own answers, and keep the result if it is the best drafter.

    The target answers prompts, and the drafter is trained on the target's distribution at every token.
    The gain is measured on held-out answers. If interrupted, the same command resumes where it stopped.
    """
    room = None if memory is None else parse_size(memory, "--memory")
    from edgespec.drafting.tuning.options import TuneOptions
    from edgespec.drafting.tuning.tune import tune as tune_drafter

    terminal = Terminal(quiet=quiet)
    options = TuneOptions(
        start=start,
        prompts=prompts,
        output=output,
        minutes=minutes,
        memory=room,
        threads=threads,
    )
    with terminal.working(long=True) as progress:
        tuned = tune_drafter(target, options, progress)
    if as_json:
        results().record(tuned.to_json())
        return
    if tuned.path is not None:
        results().text(f"{tuned.path}\n")
    for line in tuned.description:
        terminal.note(line)


@app.command("list", epilog="Example:\n\nedgespec draft list")
def list_drafters(as_json: Json = False) -> None:
    """List known drafters and how well they agree with their targets."""
    from edgespec.models.hub.registry import PairRegistry

    pairs = PairRegistry().pairs()
    if as_json:
        results().record({"pairs": [pair.to_json() for pair in pairs]})
        return
    if not pairs:
        Terminal().note("No drafters yet. Make one: edgespec draft make TARGET")
        return
    rows = [
        (
            pair.target_name,
            f"{pair.top1:.2f}" if pair.top1 is not None else "",
            pair.recipe or pair.kind,
            pair.drafter,
        )
        for pair in pairs
    ]
    results().table(table(("TARGET", "AGREES", "WHAT", "DRAFTER"), rows))
