"""Conversations for other programs: as Markdown, or as JSON messages of the OpenAI API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.files.user_folders import expanded
from edgespec.files.writing import atomic_write, writing_to


@dataclass(frozen=True)
class Transcript:
    system: str | None
    messages: Sequence[dict[str, Any]]  # {"role", "content"}; a question may have "images"
    model: str

    def to_json(self) -> dict[str, object]:
        """The model and the messages, as requests of the OpenAI API have them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": [*system, *map(_as_request, self.messages)]}

    def to_markdown(self) -> str:
        """A document with a heading for every message. Answers are Markdown already, and stay as they are."""
        parts = [f"# Conversation with {self.model}"]
        if self.system:
            parts += ["## System prompt", self.system]
        for message in self.messages:
            parts.append(f"## {'Question' if message['role'] == 'user' else 'Answer'}")
            parts += [f"![{Path(image.name).name}](<{image.name}>)" for image in message.get("images", ())]
            parts.append(message["content"])
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _as_request(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as requests of the OpenAI API have it."""
    if "images" not in message:
        return message
    images = [{"type": "image_url", "image_url": {"url": image.url}} for image in message["images"]]
    return {"role": message["role"], "content": [*images, {"type": "text", "text": message["content"]}]}


def export_path(name: str) -> Path:
    """The file of that name; one without an ending becomes Markdown."""
    path = expanded(name)
    return path if path.suffix else Path(f"{path}.md")


def export(path: Path, transcript: Transcript) -> None:
    """Write a conversation: JSON if the name ends in .json, otherwise Markdown.

    Raises:
        OutputError: the file cannot be written; what was there before is untouched.
    """
    if path.suffix.lower() == ".json":
        text = json.dumps(transcript.to_json(), ensure_ascii=False, indent=1) + "\n"
    else:
        text = transcript.to_markdown()
    with writing_to(path, "Give another name."), atomic_write(path) as file:
        file.write(text.encode(errors="replace"))
