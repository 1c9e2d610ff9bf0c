"""Did you mean: the nearest command or option to one that does not exist, also by its name elsewhere."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from edgespec.errors import similar

# Commands of ollama, llama.cpp, llm and mlx-lm, and what does the same here: the first that the group has.
_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "ask": ("generate",),
    "benchmark": ("bench",),
    "complete": ("generate",),
    "create": ("presets",),
    "completion": ("generate",),
    "delete": ("remove", "rm"),
    "download": ("pull",),
    "info": ("show",),
    "ls": ("list",),
    "prompt": ("generate",),
    "quantize": ("draft",),
    "remove": ("rm",),
    "rm": ("remove",),
    "server": ("serve",),
    "settings": ("config",),
    "start": ("serve",),
    "stop": ("ps",),
}
_NUMBERS = {"float_parsing": "a number", "int_parsing": "an integer"}
_OPTION_WORDS = ("help", "version")  # commands elsewhere, and options here
_OPTIONS: Mapping[str, str] = {
    "--adapter-path": "--lora",
    "--cache-type-k": "--kv",
    "--cache-type-v": "--kv",
    "--ctx": "--context",
    "--ctx-size": "--context",
    "--draft-model": "--draft",
    "--file": "--input",
    "--format": "--output",
    "--gpu": "--gpu-layers",
    "--max-kv-size": "--context",
    "--lora-scaled": "--lora",
    "--model-draft": "--draft",
    "--ngl": "--gpu-layers",
    "--n-gpu-layers": "--gpu-layers",
    "--n-predict": "--max-tokens",
    "--no-draft": "--draft",
    "--num-ctx": "--context",
    "--num-predict": "--max-tokens",
    "--num-thread": "--threads",
    "--predict": "--max-tokens",
    "--ram": "--memory",
    "--reasoning-budget": "--think",
    "--reasoning-effort": "--think",
    "--repetition-penalty": "--repeat-penalty",
    "--schema": "--json-schema",
    "--sys": "--system",
    "--system-prompt": "--system",
    "--system-prompt-file": "--system-file",
    "--verify-rule": "--verify",
}


def explained(error: Any) -> tuple[str, str]:
    """Explain the fault of a command line, and the remedy: a failure of Typer in the program's own words."""
    context = getattr(error, "ctx", None)
    what: str = error.format_message()
    see = f"See '{context.command_path} --help'." if context is not None else ""
    if context is None:
        return what, see
    unknown = getattr(error, "option_name", None)
    if unknown is not None and what.startswith("No such option"):
        meant = _near(unknown, _flags(context.command), (_OPTIONS.get(unknown, ""),))
        return f"There is no option {unknown} here.", f"Did you mean {meant}?" if meant else see
    command = re.match(r"No such command '(.*?)'", what, re.DOTALL)
    if command is not None:
        return f"There is no command '{command[1]}'.", _command_meant(command[1], context) or see
    extra = re.match(r"Got unexpected extra argument(?:\(s\)|s)? \((.*)\)", what, re.DOTALL)
    if extra is not None:
        return f"Unexpected argument '{extra[1]}'.", see
    unreadable = re.search(r"path '(.*)' is not readable", what, re.DOTALL)
    if unreadable is not None:
        return f"{unreadable[1]} cannot be read: Permission denied.", "Check the path and its permissions."
    refusals: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    wanted = _NUMBERS.get(refusals[0]["type"]) if refusals else None
    if wanted is not None:
        what = f"{max(error.param.opts, key=len)} must be {wanted}, not '{refusals[0]['input']}'."
    if getattr(getattr(error, "param", None), "name", None) == "seed":
        return what, "-s is the seed, as in llama.cpp; a system prompt is given with --system."
    return what, see


def _command_meant(word: str, context: Any) -> str:
    if context.parent is None and word.lower() in _OPTION_WORDS:
        return f"Did you mean '{context.command_path} --{word.lower()}'?"
    meant = _near(word, context.command.commands, _COMMANDS.get(word.lower(), ()))
    if meant:
        return f"Did you mean '{context.command_path} {meant}'?"
    if context.parent is None and _may_be_model(word):
        return f"To chat with a model: edgespec chat {word}"
    return ""


def _near(word: str, known: Collection[str], elsewhere: Collection[str]) -> str:
    """The known word that was meant; empty if there is none near."""
    found = [name for name in elsewhere if name in known]
    return (found or similar(word, known) or [""])[0]


def _flags(command: Any) -> list[str]:
    return [
        flag
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if flag.startswith("--")
    ]


def _may_be_model(word: str) -> bool:
    from edgespec.models.hub import catalog
    from edgespec.models.hub.external import find_external
    from edgespec.models.hub.names import parse_hub_name

    return (
        word.lower().endswith(".gguf")
        or catalog.entry_for(word) is not None
        or parse_hub_name(word) is not None
        or find_external(word) is not None
    )
