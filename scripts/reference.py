"""Write docs/reference/cli.md from the command line itself: python scripts/reference.py

With --check it writes nothing, and fails if the page is not what it would write.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "cli.md"


def reference() -> str:
    """The page: every command, its options by group, and its examples."""
    sys.path.insert(0, str(ROOT))
    from edgespec.cli.main import app

    group: Any = typer.main.get_command(app)
    parts = ["# Command line", "", group.help, ""]
    for name, command in group.commands.items():
        parts += _command(name, command)
    return "\n".join(parts).rstrip() + "\n"


def _command(name: str, command: Any) -> list[str]:
    arguments = "".join(f" [{_argument(p)}]" for p in command.params if p.param_type_name == "argument")
    lines = [f"## edgespec {name}", "", command.help, "", f"    edgespec {name} [OPTIONS]{arguments}", ""]
    groups: dict[str, list[Any]] = {}
    for parameter in command.params:
        if parameter.name != "help":
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(parameter)
    for title, parameters in groups.items():
        lines += [f"### {title}", "", "| | |", "|---|---|", *map(_row, parameters), ""]
    if command.epilog:
        examples = [line for line in command.epilog.split("\n\n") if line.startswith("edgespec")]
        lines += ["Examples:", "", "```sh", *examples, "```", ""]
    return lines


def _argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _row(parameter: Any) -> str:
    from edgespec.cli.help_page import help_of

    if parameter.param_type_name == "argument":
        names = _argument(parameter)
    else:
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if parameter.metavar:
            names += f" {parameter.metavar}"
    variables = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
    variable = f" `{variables[0]}`" if variables else ""
    names = names.replace("|", "\\|")
    return f"| `{names}` | {help_of(parameter)}{variable} |"


def main() -> int:
    """Write or check the page; returns the exit code."""
    text = reference()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE} is out of date. Run: python scripts/reference.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
