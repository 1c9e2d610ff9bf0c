"""Draw docs/chat.svg, a real chat on a real terminal: python scripts/picture.py [MODEL] [--draft D]

Everything in the picture was on the screen of the machine that ran this, figures included.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "chat.svg"
COLUMNS, LINES = 92, 34


def main() -> None:
    """Chat, and draw what the screen shows."""
    sys.path.insert(0, str(ROOT))
    from rich.console import Console
    from rich.text import Text

    from tests.desk import Desk

    arguments = ["chat", *sys.argv[1:], "--max-tokens", "64", "--sampling", "greedy"]
    with contextlib.closing(Desk(*arguments, columns=COLUMNS, lines=LINES)) as desk:
        desk.ask("Why is the sky blue?", until=" tokens, ")
        desk.ask("/tree", until="own choice")
        desk.wait_for(">>>")
        screen = desk.coloured()[:-1]  # without the prompt that waits for the next question
    console = Console(record=True, width=COLUMNS, file=open(Path("/dev/null"), "w"))  # noqa: PTH123, SIM115
    for line in screen:
        console.print(Text.assemble(*line), overflow="crop", no_wrap=True)
    console.save_svg(str(PAGE), title="edgespec " + " ".join(arguments))


if __name__ == "__main__":
    main()
