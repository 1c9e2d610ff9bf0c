"""The script of the model: it reads the file that it is asked about, and then says the word in it.

Where a prompt shows an example of JSON as the form of the answer, as for titles, the answer is the example.
The script decides the name and the arguments of a call, or the words of an answer. The model writes them
token by token, under a grammar that permits nothing else. So prompts, grammars, streams and the prompt
cache are those of any other model, and what an answer says depends on what the client has sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.generation.config import GenerationConfig, Grammar
from edgespec.generation.tools import Tool

NO_WORD = "The result of the tool did not come."
_FILE = re.compile(r"/[\w./-]+/note-\d+\.txt")
_WORD = re.compile(r"heron-[0-9a-f]{8}")
_FORM = re.compile(r"JSON format:\s*(\{[^\n]*\})")
# Tools that read a file, by their names in the programs; the first that is offered is called.
_READERS = (
    *("read", "read_file", "readfile", "read_files", "view"),
    *("exec_command", "shell_command", "shell", "bash", "run_shell_command", "execute"),
)


@dataclass(frozen=True)
class Scripted:
    """What the model writes next.

    Attributes:
        call: the tool that it calls; None for a text.
        arguments: those of the call.
        text: what it says, where it calls nothing.
    """

    call: str | None = None
    arguments: Mapping[str, Any] | None = None
    text: str = ""

    def enforced_on(self, config: GenerationConfig) -> GenerationConfig:
        """The settings of an answer that can be nothing else."""
        config = config.with_(max_tokens=None)
        if self.call is None:
            return config.with_(
                tool_choice="none", grammar=Grammar("grammar", f"root ::= {_quoted(self.text)}")
            )
        values = {name: {"const": value} for name, value in (self.arguments or {}).items()}
        schema = {
            "type": "object",
            "properties": values,
            "required": list(values),
            "additionalProperties": False,
        }
        tool = Tool(self.call, "", json.dumps(schema))
        return config.with_(tools=(tool,), tool_choice=self.call, parallel_tool_calls=False, grammar=None)


def question(path: Path) -> str:
    """The task of a turn."""
    return f"Read the file {path} and tell me the word in it."


def next_answer(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> Scripted:
    """What the model answers to a conversation.

    Args:
        tools: those that it may call.
    """
    since = _since_last_answer(messages)
    results = [str(message.get("content")) for message in since if message["role"] == "tool"]
    if results:
        words = _WORD.findall(" ".join(results))
        return Scripted(text=f"The word is {words[-1]}." if words else NO_WORD)
    asked = " ".join(str(message.get("content")) for message in since if message["role"] == "user")
    files = _FILE.findall(asked)
    by_name = {tool.name.lower(): tool for tool in tools}
    reader = next((by_name[name] for name in _READERS if name in by_name), None)
    forms = _FORM.findall(asked)
    if forms and not tools:
        return Scripted(text=forms[-1])
    if not files or reader is None:
        return Scripted(text="A note.")
    return Scripted(reader.name, arguments_for(json.loads(reader.parameters), files[-1]))


def arguments_for(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The arguments with which a tool of this schema reads a file."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = schema.get("required") or []
    arguments: dict[str, Any] = {}
    for name, about in properties.items():
        if name.lower() in ("command", "cmd"):
            arguments[name] = ["cat", path] if about.get("type") == "array" else f"cat {path}"
        elif re.search("path|file", name.lower()) and about.get("type") == "string":
            arguments[name] = path
        elif name.lower() == "files" and about.get("type") == "array":
            arguments[name] = [arguments_for(about["items"], path)]
        elif name in required:
            arguments[name] = _any_value(about)
    return arguments


def words_in(text: str) -> list[str]:
    """The words of notes that a text names."""
    return _WORD.findall(text)


def _any_value(about: Mapping[str, Any]) -> Any:
    kinds = {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}
    choices = about.get("enum")
    return choices[0] if choices else kinds.get(str(about.get("type")), "Read a note")


def _since_last_answer(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    answered = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[answered[-1] + 1 :] if answered else messages


def _quoted(text: str) -> str:
    return json.dumps(text)
