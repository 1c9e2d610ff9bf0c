"""Run the programs that people use against `edgespec serve`, and print what came of it.

    python -m tests.clients [NAME ...] [--folder FOLDER] [--model FILE.gguf] [--turns N] [--markdown FILE]

Installs each program into FOLDER, with settings and a home folder of its own there, and asks it for the word
in a file. The model's answers are scripted: it calls the program's tool that reads files, and then says what
the result holds. Everything else is as with any model: prompts, tokens, grammars, streams and the prompt
cache. Ends with status 1 if a program did not get the word, or had a request refused.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from tests.clients.conversation import converse
from tests.clients.model import scripted_model
from tests.clients.programs import PROGRAMS
from tests.clients.report import HEAD, Row, table, turns_table
from tests.clients.running import Failed


def main() -> int:
    """Run the programs that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; default: all")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "edgespec-clients",
        help="kept between runs",
    )
    parser.add_argument("--model", type=Path, help="whose tokenizer and template are used; default: SmolLM2")
    parser.add_argument("--turns", type=int, default=1, help="questions that each program is asked")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each turn")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file, too")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in PROGRAMS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(PROGRAMS)}")
    if options.model is not None and not options.model.is_file():
        parser.error(f"there is no file {options.model}")
    folder = options.folder.resolve()
    model = scripted_model(folder / "models", options.model)
    rows = []
    for name in options.names or PROGRAMS:
        rows.append(_row(name, model, folder, turns=options.turns, limit_s=options.limit))
        print(" | ".join(rows[-1].cells), flush=True)
    tables = "\n\n".join(filter(None, [table(HEAD, [row.cells for row in rows]), turns_table(rows)]))
    print(f"\n{tables}")
    if options.markdown:
        options.markdown.write_text(tables + "\n")
    return 0 if all(row.passed for row in rows) else 1


def _row(name: str, model: Path, folder: Path, *, turns: int, limit_s: float) -> Row:
    program = PROGRAMS[name]
    version = ""
    try:
        package = re.sub(r"\W+", "-", program.package.name).strip("-")
        installed = program.package.install(folder / "installed" / package)
        version = installed.version
        held = converse(program, installed, model, folder / name, turns=turns, limit_s=limit_s)
    except Failed as failure:
        return Row(program.name, version, None, str(failure))
    return Row(program.name, version, held)


if __name__ == "__main__":
    sys.exit(main())
