"""Edits a question in the user's editor."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.processes.children import run

if TYPE_CHECKING:
    from prompt_toolkit.buffer import Buffer

_EDITORS = ("/usr/bin/editor", "nano", "vi", "emacs")


async def edit_message(buffer: Buffer) -> None:
    """Open the buffer's text in an editor, and send what was written there.

    Nothing is sent if the editor fails (`:cq`), or leaves the file unchanged (`:q!`) or empty: what was typed
    then stays, and Enter sends it.
    """
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.document import Document

    before = buffer.text
    after = await run_in_terminal(lambda: edited(before), in_executor=True)
    if after is not None and after.strip() and after != before:
        buffer.document = Document(after, len(after))
        buffer.validate_and_handle()


def edited(text: str) -> str | None:
    """The text after editing, without its final newline; None if the editor failed."""
    with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
        path = Path(folder) / "question.md"
        path.write_text(text + "\n" if text else "", encoding="utf-8", errors="replace")
        for name in (os.environ.get("VISUAL"), os.environ.get("EDITOR"), *_EDITORS):
            if not name:
                continue
            try:
                status = run([*shlex.split(name), str(path)], stdin=None).returncode
            except (OSError, ValueError):  # there is no such editor, or its quotes do not match
                continue
            if status != 0:
                return None
            try:
                return path.read_text(encoding="utf-8").removesuffix("\n")
            except (OSError, UnicodeDecodeError):
                return None
    print("No editor found; set EDITOR to the one to use.", file=sys.stderr)
    return None
