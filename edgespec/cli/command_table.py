"""The commands of the program, each imported only when it is needed.

The page of `edgespec --help` needs their names and a line about each, and a command needs only itself. All
of them together take several times as long to import as everything else that a page of help needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
import typer.main

from edgespec.cli.help_page import HelpGroup, use_for

_SHORT_FORMS = "Short forms, as in ollama"


@dataclass(frozen=True)
class Command:
    """A command, or a group of commands."""

    module: str  # in `edgespec.cli.commands`
    name: str  # of the function, or of the Typer app, in it
    summary: str  # the first line of its help
    examples: tuple[str, ...] = ()  # command lines to try
    panel: str | None = None  # the heading under which it is listed
    is_other_name: bool = False  # whether the function has another summary, under its first name

    def load(self, called: str) -> Any:
        """Import the command, under the name that it is called by."""
        found = getattr(import_module(f"edgespec.cli.commands.{self.module}"), self.name)
        if isinstance(found, typer.Typer):
            use_for(found)
            return typer.main.get_group(found)
        app = typer.Typer(pretty_exceptions_enable=False)
        heading = "Examples:" if len(self.examples) > 1 else "Example:"
        app.command(
            called,
            help=self.summary if self.is_other_name else None,
            epilog="\n\n".join([heading, *self.examples]),
            rich_help_panel=self.panel,
        )(found)
        use_for(app)
        (info,) = app.registered_commands
        return typer.main.get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)


COMMANDS: Mapping[str, Command] = {
    "chat": Command(
        "chat",
        "chat",
        "Start a conversation.",
        (
            "edgespec chat",
            "edgespec chat 'Why is the sky blue?'",
            "edgespec chat large.gguf --draft small.gguf --memory 12GiB",
        ),
    ),
    "run": Command(
        "chat",
        "chat",
        "Start a conversation, or answer one prompt and exit.",
        ("edgespec run llama3.2-1b", "edgespec run llama3.2-1b 'Why is the sky blue?'"),
        _SHORT_FORMS,
        is_other_name=True,
    ),
    "generate": Command(
        "generate",
        "generate",
        "Answer a prompt, or every line of a JSONL file.",
        (
            "edgespec generate 'Why is the sky blue?'",
            "edgespec generate large.gguf 'Why is the sky blue?' --memory 12GiB",
            "edgespec generate -p 'Summarize this.' <notes.txt",
            "edgespec generate --input prompts.jsonl --output answers.jsonl",
        ),
    ),
    "serve": Command(
        "serve",
        "serve",
        "Serve the OpenAI, Anthropic and Ollama APIs over HTTP, with several requests in every pass.",
        ("edgespec serve", "edgespec serve large.gguf --memory 12GiB --port 8000"),
    ),
    "worker": Command(
        "worker",
        "worker",
        "Lend this machine's memory and devices to a model on another machine.",
        ("edgespec worker --listen 192.168.0.7:50052", "edgespec worker --memory 12GiB"),
    ),
    "profile": Command(
        "profile",
        "profile",
        "Measure disk, memory, passes, draft steps and trees, and store the results.",
        ("edgespec profile", "edgespec profile large.gguf --draft small.gguf --memory 12GiB"),
    ),
    "plan": Command(
        "plan",
        "plan",
        "Predict how a model, or each file of a repository, would run here: memory and speed.",
        (
            "edgespec plan llama3.3-70b",
            "edgespec plan llama3.3-70b:Q3_K_M",
            "edgespec plan large.gguf --draft small.gguf --memory 12GiB",
        ),
    ),
    "bench": Command(
        "bench",
        "bench",
        "Benchmark a model on this machine: tokens per second, plain and with trees.",
        (
            "edgespec bench",
            "edgespec bench big.gguf --memory 12GiB --html bench.html",
            "edgespec bench --compare before.json after.json",
        ),
    ),
    "doctor": Command(
        "doctor",
        "doctor",
        "Find what makes models slow or fail on this machine, and say how to fix it.",
        ("edgespec doctor", "edgespec doctor large.gguf --json"),
    ),
    "pull": Command(
        "models",
        "pull",
        "Download a model into the Hub's cache; print its path.",
        ("edgespec pull llama3.2-1b",),
        _SHORT_FORMS,
    ),
    "list": Command(
        "models", "list_models", "List the models on this machine.", ("edgespec list --all",), _SHORT_FORMS
    ),
    "show": Command(
        "models",
        "show",
        "Describe a model and how it would run here; models on the Hub are not downloaded.",
        ("edgespec show llama3.2-1b",),
        _SHORT_FORMS,
    ),
    "rm": Command(
        "models",
        "remove",
        "Remove a model, its pairs, and the files EdgeSpec made for it.",
        ("edgespec rm llama3.2-1b",),
        _SHORT_FORMS,
    ),
    "config": Command(
        "config",
        "config",
        "Show changed settings and where their values come from.",
        ("edgespec config",),
    ),
    "models": Command("models", "app", "Download, inspect, pair and remove models."),
    "sessions": Command(
        "sessions", "app", "List, show and remove conversations saved with chat --session NAME."
    ),
    "draft": Command("draft", "app", "Make and tune drafters."),
}


class LazyCommands(Mapping[str, Any]):
    """The commands by name; each is imported when it is first asked for."""

    def __init__(self, table: Mapping[str, Command]) -> None:
        self._table = table
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._table[name].load(name)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


class RootGroup(HelpGroup):
    """The program, as a group of all commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = LazyCommands(COMMANDS)  # type: ignore[assignment]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:  # Typer would end the program without a word
            from edgespec.cli.screen.terminal import Terminal

            Terminal().note(str(stop) or "Interrupted.")
            raise typer.Exit(130) from None

    def overview(self) -> Iterator[tuple[str, str, str | None]]:
        for name, command in COMMANDS.items():
            yield name, command.summary, command.panel
