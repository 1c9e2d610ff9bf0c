"""Write the reference of options: docs/reference/cli.md, and the table of `edgespec.load` in library.md.

    python scripts/reference.py

With --check it writes nothing, and fails if a page is not what it would write.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
_BEGIN, _END = "<!-- The table is made by scripts/reference.py -->\n", "<!-- Until here -->\n"


def main() -> int:
    """Write or check the pages; returns the exit code."""
    sys.path.insert(0, str(ROOT))
    code = 0
    for page, text in ((FOLDER / "cli.md", reference()), (FOLDER / "library.md", library())):
        if "--check" not in sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
        elif page.read_text(encoding="utf-8") != text:
            print(f"{page} is out of date. Run: python scripts/reference.py", file=sys.stderr)
            code = 1
    return code


def library() -> str:
    """The page of the library with the arguments of `edgespec.load`."""
    import edgespec
    from edgespec.loading.arguments import documentation

    before, rest = (FOLDER / "library.md").read_text(encoding="utf-8").split(_BEGIN)
    rows = ["| argument | type | default | |", "|---|---|---|---|"]
    for parameter in inspect.signature(edgespec.load).parameters.values():
        kind = inspect.formatannotation(parameter.annotation).replace("collections.abc.", "")
        cells = f"`{parameter.name}`", f"`{kind}`", f"`{parameter.default!r}`", documentation(parameter.name)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return before + _BEGIN + "\n" + "\n".join(rows) + "\n\n" + _END + rest.split(_END)[1]


def reference() -> str:
    """The page: every command, its options by group, and its examples."""
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


if __name__ == "__main__":
    sys.exit(main())
