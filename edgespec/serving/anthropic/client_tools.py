"""Tools of the Anthropic API that clients run, and whose schemas requests leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.api.tools import ToolDefinition

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_LINES: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_FILE: dict[str, Schema] = {
    "path": _TEXT,
    "view_range": _LINES,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": {"type": "integer"},
}
_LATER: dict[str, Schema] = {**_FILE, "insert_text": _TEXT}
_EDITS = ("view", "create", "str_replace", "insert")
_ABOUT_FILES = (
    "view shows a file or folder, or its lines view_range; create writes file_text; str_replace replaces "
    "old_str, which must occur once, by new_str; insert adds {} after line insert_line."
)


def _commands(names: Sequence[str], fields: Mapping[str, Schema]) -> Schema:
    """The schema of a tool whose first argument is a command."""
    command = {"type": "string", "enum": list(names)}
    return {"type": "object", "properties": {"command": command, **fields}, "required": ["command"]}


_BASH: Schema = {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}}
_EDITOR = f"View and edit text files. {_ABOUT_FILES}"
_MEMORY = (
    f"Keep notes in files under /memories. {_ABOUT_FILES} delete removes path; rename moves old_path to "
    "new_path."
)
_MOVES: dict[str, Schema] = {**_LATER, "old_path": _TEXT, "new_path": _TEXT}
_EDITOR_NAME = "str_replace_based_edit_tool"
_FIRST_EDITOR = _EDITOR.format("new_str"), _commands((*_EDITS, "undo_edit"), _FILE)
# What types begin with: the name, where a request has none, the description and the parameters.
_TOOLS: dict[str, tuple[str, str, Schema]] = {
    "bash_20": ("bash", "Run a command in a shell that stays open; restart starts a new one.", _BASH),
    "text_editor_2024": ("str_replace_editor", *_FIRST_EDITOR),
    "text_editor_20250124": ("str_replace_editor", *_FIRST_EDITOR),
    "text_editor_20250429": (_EDITOR_NAME, _EDITOR.format("new_str"), _commands(_EDITS, _FILE)),
    "text_editor_20": (_EDITOR_NAME, _EDITOR.format("insert_text"), _commands(_EDITS, _LATER)),
    "memory_20": ("memory", _MEMORY.format("insert_text"), _commands((*_EDITS, "delete", "rename"), _MOVES)),
}


def client_tool(kind: str, name: str | None) -> ToolDefinition | None:
    """The definition of a tool of a type; None if it is not one that clients run."""
    for prefix, (usual, description, parameters) in _TOOLS.items():
        if kind.startswith(prefix):
            return ToolDefinition(name=name or usual, description=description, parameters=parameters)
    return None
