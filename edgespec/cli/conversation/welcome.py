"""The lines before a chat: the loaded model, a model to download, and better ones than the demo model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.base.units import readable, readable_rate
from edgespec.cli.screen.terminal import Terminal

if TYPE_CHECKING:
    from edgespec.base.progress import Progress
    from edgespec.config import Config
    from edgespec.engine.engine import Engine
    from edgespec.generation.result import MemoryUse
    from edgespec.planning.plan import Plan
    from edgespec.planning.report.suggestion import Suggestion

_DEMO = "This is SmolLM2 135M, the bundled demo model."
_USABLE = 2  # tokens a second, as in planning.report.suggestion, which takes too long to import here


def welcome(terminal: Terminal) -> None:
    """Print it, if a person is watching."""
    if terminal.is_watched:
        for line in welcome_lines(_suggestions()):
            terminal.hint(line)


def welcome_lines(suggestions: list[Suggestion]) -> list[str]:
    """A few lines, which fit a usual window: the demo model, and a command for each better one."""
    if not suggestions:
        return [_DEMO, f"No larger model in the catalog would reach {_USABLE} tokens/s here."]
    return [f"{_DEMO} Better models for this machine:", *map(_line, suggestions)]


def announce_download(terminal: Terminal, loading: Config) -> None:
    """Announce a download: its source, its size, and how the model will run on this machine.

    Sizes come from the catalog, or else from the header on the Hub. What goes wrong here is left to the
    download, which says it better.
    """
    from edgespec.errors import EdgeSpecError

    name = loading.model.name
    if name is None:
        return
    try:
        with terminal.working() as progress:
            lines = _download_lines(name, loading, progress)
    except (EdgeSpecError, OSError):
        return
    for line in lines:
        terminal.note(line)


def _download_lines(name: str, loading: Config, progress: Progress) -> list[str]:
    from edgespec.errors import HubError, MemoryLimitError
    from edgespec.models.gguf.layers import ModelFiles
    from edgespec.models.hub import catalog
    from edgespec.models.hub.inspection import catalog_model, inspect_model
    from edgespec.models.hub.repository import Hub
    from edgespec.planning.decision import decide
    from edgespec.planning.drafter import FoundDrafter
    from edgespec.planning.planner import Planner
    from edgespec.planning.report.suggestion import Resources, tokens_per_second
    from edgespec.profiles.store import ProfileStore

    hub_name = catalog.hub_name_of(name)
    if hub_name is None or Hub.from_environment().offline:
        return []
    try:
        catalog.resolve(name, fetch=False)
    except HubError:
        pass
    else:
        return []  # it is here
    known = catalog.named(name)
    usual = catalog_model(name) if known is not None and not known[1] else None
    files = ModelFiles.of_headers((usual or inspect_model(name, progress)).headers)
    n_bytes = known[0].n_bytes if known and usual else sum(header.file_bytes for header in files.headers)
    said = f"{name} is not installed. Downloading {readable(n_bytes)} from {hub_name}."
    resources = Resources.of_this_machine(ProfileStore(), loading)
    try:
        planner = Planner(files, loading, resources.machine, resources.store)
        plan = decide(planner, lambda _planner: FoundDrafter()).plan
    except MemoryLimitError as error:
        return [said, f"It will not fit in memory: {error.what} {error.hint}"]
    return [said, placement_line(plan, tokens_per_second(plan, resources))]


def placement_line(plan: Plan, speed: float) -> str:
    """Describe where the weights of a model will be, and the speed to expect without drafts."""
    holding = plan.holding
    if not plan.streams:
        where = f"All {readable(holding.resident_bytes)} will stay in memory"
    else:
        read = readable(holding.streamed_bytes)
        streamed = read if holding.experts is None else f"about {read} of experts"
        where = f"{readable(holding.resident_bytes)} will stay in memory, {streamed} read from disk per pass"
    figure = readable_rate(speed, digits=2)
    return f"{where}: about {figure} without drafts on this processor (estimated)."


def _line(found: Suggestion) -> str:
    speed = readable_rate(found.tokens_per_second, digits=2)
    drafter = f" --draft {found.drafter}" if found.drafter else ""
    size = readable(found.download_bytes) if found.download_bytes else "installed"
    return f"  about {speed}: edgespec chat {found.entry.name}{drafter} ({size})"


def _suggestions() -> list[Suggestion]:
    from edgespec.planning.report.suggestion import Resources, suggest
    from edgespec.profiles.store import ProfileStore

    try:
        return suggest(Resources.of_this_machine(ProfileStore()))
    except OSError:  # folders that cannot be read must not keep anybody from chatting
        return []


def greeting(engine: Engine) -> str:
    """One line about a loaded model."""
    return greeting_line(engine.target.model.path.stem, engine.drafter.name, engine.memory)


def greeting_line(model: str, drafter: str, memory: MemoryUse) -> str:
    """The line, from its facts; the drafter is "none" for plain decoding."""
    drafted = "without a drafter" if drafter == "none" else f"drafted by {drafter}"
    streamed = memory.streamed_bytes_per_pass
    if streamed:
        whole = memory.target_bytes
        held = f"{readable(streamed)} of {readable(whole)} ({streamed / whole:.0%}) streamed per pass"
    else:
        held = f"{readable(memory.resident_bytes)} in memory" if memory.resident_bytes else "all in memory"
    if memory.layers:
        held += f", {memory.layers}"
    return f"{model}, {drafted}, {held}."
