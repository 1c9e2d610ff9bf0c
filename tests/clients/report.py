"""What came of the conversations, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.clients.conversation import Conversation

HEAD = (
    "client",
    "version",
    "own prompt",
    "read of the next request",
    "tool",
    "result",
    "besides",
)


@dataclass(frozen=True)
class Row:
    """A program, and its conversation; None if it could not be held, and why."""

    name: str
    version: str
    conversation: Conversation | None
    failure: str = ""

    @property
    def passed(self) -> bool:
        """True if every turn called the tool and told the user its result, and nothing was refused."""
        held = self.conversation
        return held is not None and not held.refused and all(turn.result_came for turn in held.turns)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        held = self.conversation
        if held is None:
            return (self.name, self.version, "", "", "", "", self.failure)
        turn = held.turns[0]
        first, *later = turn.requests or [None]
        asides = [f"{each['prompt_tokens']:,}" for each in turn.asides]
        said = [
            *([turn.failure] if turn.failure else []),
            *held.refused,
            *held.changed,
            *held.warnings,
            *([f"requests without tools, tokens: {' + '.join(asides)}"] if asides else []),
        ]
        return (
            self.name,
            self.version,
            f"{first['prompt_tokens']:,}" if first else "",
            f"{later[0]['read_tokens']:,} of {later[0]['prompt_tokens']:,}" if later else "",
            turn.called or "not called",
            "came back" if turn.result_came else "did not come back",
            "; ".join(said),
        )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def turns_table(rows: Sequence[Row]) -> str:
    """The tokens that were read turn by turn, a line for each program with several turns."""
    held = [
        (row.name, row.conversation.turns)
        for row in rows
        if row.conversation and len(row.conversation.turns) > 1
    ]
    if not held:
        return ""
    most = max(len(turns) for _, turns in held)
    lines = []
    for name, turns in held:
        cells = [" + ".join(f"{each['read_tokens']:,}" for each in turn.requests) for turn in turns]
        lines.append([name, *cells, *[""] * (most - len(cells))])
    return table(["tokens read in turn", *map(str, range(1, most + 1))], lines)
