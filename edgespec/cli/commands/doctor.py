"""`edgespec doctor`: facts about this machine, what is wrong with it for running models, and how to fix
it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.commands.config import settings_problem
from edgespec.cli.completion import complete_model
from edgespec.cli.options.common import ModelFlag
from edgespec.cli.options.declaration import option
from edgespec.cli.screen.formatting import in_columns
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal, is_terminal

if TYPE_CHECKING:
    from edgespec.doctor.checks import Finding
    from edgespec.doctor.facts import Facts
    from edgespec.llama.build import Build
    from edgespec.machine.disks import Disk


def doctor(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Also say how this model would run here.",
            autocompletion=complete_model,
            envvar="EDGESPEC_MODEL",
            show_envvar=False,
        ),
    ] = None,
    model_flag: Annotated[
        str | None,
        option(None, "-m --model", "Same as the MODEL argument.", variable=False, metavar="MODEL"),
    ] = None,
    disk_check: Annotated[
        bool,
        option(None, "--disk-check/--no-disk-check", "Measure the disk's read speed for a second."),
    ] = True,
    as_json: Annotated[
        bool,
        option(None, "--json", "Print a JSON object."),
    ] = False,
) -> None:
    """Find what makes models slow or fail on this machine, and say how to fix it."""
    model = ModelFlag(model_flag).or_argument(model, context)
    from edgespec.doctor.checks import ERROR, diagnose
    from edgespec.doctor.facts import gather

    problem = settings_problem(context)
    with Terminal(quiet=as_json).working() as progress:
        facts = gather(model, measure_disk=disk_check, settings_problem=problem, on_progress=progress)
    found = diagnose(facts)
    if as_json:
        results().record(facts.to_json() | {"findings": [finding.to_json() for finding in found]})
    else:
        width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
        lines = [*in_columns(describe(facts), width), "", *format_findings(found, width)]
        results().text("".join(f"{line}\n" for line in lines))
    if any(finding.severity == ERROR for finding in found):
        raise typer.Exit(1)


def describe(facts: Facts) -> list[tuple[str, str]]:
    """The facts for people: lines of a name and a text."""
    from edgespec.base.units import readable

    record = facts.to_json()
    machine = facts.machine
    cores, memory = machine.cores, machine.memory
    container = f", {readable(memory.container_limit)} in this container" if memory.container_limit else ""
    swap = f"{readable(memory.swap_used)} of {readable(memory.swap_total)}" if memory.swap_total else "none"
    rows = [
        ("edgespec", f"{record['edgespec']}, Python {record['python']}, {record['system']}"),
        ("processor", f"{cores.model or 'unknown'}, {cores.usable} of {cores.total} cores to use"),
        ("", " ".join(cores.features)),
        ("memory", f"{readable(memory.available)} free of {readable(memory.total)}{container}; swap {swap}"),
        ("disk", _disk(machine.disk, facts.speed)),
        ("cache", _disk(facts.cache)),
    ]
    if facts.build is not None:
        rows.append(("llama.cpp", f"{facts.build.version}, {_libraries(facts.build)}"))
        rows.append(("", " ".join(facts.build.features)))
        for layout in facts.kernels.layouts:
            rows.append(("", f"{layout.name}: {layout.speed_text if layout.used else 'not used'}"))
        for device in facts.devices:
            rows.append(("device", device.measured or f"{device.title}, {readable(device.free)} free"))
    rows += [
        ("graphics", gpu.name + (f", {readable(gpu.memory)}" if gpu.memory else "")) for gpu in machine.gpus
    ]
    if facts.model is not None:
        rows += _model(facts.model, facts.speed)
    return [row for row in rows if row[1]]


def _libraries(build: Build) -> str:
    """The origin of a build, and the processor that its kernels are for."""
    from edgespec.base.prebuilt import FOLDER, PACKAGE, WHEEL

    origin = {WHEEL: f"from the wheel {PACKAGE} {build.wheel}", FOLDER: f"from {build.libraries}"}
    kind = f", kernels for {build.variant}" if build.variant else ""
    return origin.get(build.origin, "compiled here") + kind


def format_findings(found: Sequence[Finding], width: int | None = None) -> list[str]:
    """Lines about the findings; the worst come last, just above the prompt."""
    rows = []
    for finding in reversed(found):
        rows += [(finding.severity, f"{finding.about}: {finding.what}"), ("", finding.do)]
    return in_columns(rows, width) if rows else ["No problems found."]


def _disk(disk: Disk, speed: float | None = None) -> str:
    from edgespec.base.units import readable

    device = " ".join(part for part in (disk.device, f"({disk.kind})", disk.file_system) if part)
    direct = {True: ", direct reads", False: ", no direct reads", None: ""}[disk.direct]
    measured = f", {readable(speed)}/s" if speed else ""
    return f"{disk.path} on {device}, {readable(disk.free)} free{direct}{measured}"


def _model(described: dict[str, Any], speed: float | None) -> list[tuple[str, str]]:
    from edgespec.base.units import readable

    types = {name for row in described["quantization"] for name in row["types"]} - {"F32"}
    title, drafter = described["title"] or described["architecture"], described["drafter"]
    memory = described["memory"]
    fit = f"{memory['verdict']}: {readable(memory['needed_bytes'])} needed"
    fit += f", {readable(memory['available_bytes'])} free"
    if memory["verdict"] == "streams":
        a_pass = memory["streamed_bytes_per_pass"]
        seconds = f", {a_pass / speed:.1f} s at the speed of this disk" if speed else ""
        fit += f"; {readable(a_pass)} read from disk in every pass{seconds}"
    return [
        ("model", f"{title}, {readable(described['bytes'])}, {', '.join(sorted(types))}"),
        ("", fit),
        ("drafter", f"{drafter}, {described['drafter_reason']}" if drafter else "from the text itself"),
    ]
