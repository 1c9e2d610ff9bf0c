"""Files attached to a question: by `@notes.md` in it, by /file before it, or by -f on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from edgespec.cli.options.declaration import option
from edgespec.cli.utf8 import read_text
from edgespec.files.user_folders import expanded

if TYPE_CHECKING:
    from edgespec.images.parts import Image

Attachments = Annotated[
    list[str] | None,
    option(
        "Prompt",
        "-f --file",
        "Insert this text file before the prompt; repeatable.",
        variable=False,
        metavar="FILE",
    ),
]

_MENTION = re.compile(r'(?<!\S)@(?:"([^"]+)"|(\S+))')


def read_attachment(name: str) -> tuple[Path, str]:
    """A text file's path and content; raises as `read_text`."""
    return expanded(name), read_text(name)


def read_attachments(names: Sequence[str] | None) -> list[tuple[Path, str]]:
    """The files of -f; raises as `read_attachment`."""
    return [read_attachment(name) for name in names or ()]


class AttachedQuestion(NamedTuple):
    """A question with what it mentions.

    Attributes:
        text: with the contents of the text files before it.
        files: these.
        images: the other ones.
    """

    text: str
    files: list[Path]
    images: list[Image]


def with_attachments(text: str, files: list[tuple[Path, str]]) -> AttachedQuestion:
    """The question after the contents of `files` and of the files it mentions by @path, each once.

    A mention of something that is not a file stays as it is.

    Raises:
        UsageError: a mentioned file cannot be attached.
    """
    from edgespec.images.file import SUFFIXES, is_image
    from edgespec.images.parts import image_of

    files = list(files)
    images: dict[Path, Image] = {}
    for match in _MENTION.finditer(text):
        name = match[1] or match[2]
        # Punctuation after a path is not part of it, unless there is such a file.
        for spelled in dict.fromkeys([name, name.rstrip(".,;:!?)")]):
            if spelled and expanded(spelled).is_file():
                if spelled.lower().endswith(SUFFIXES) or is_image(expanded(spelled)):
                    images.setdefault(expanded(spelled).resolve(), image_of(spelled))
                elif not any(path.samefile(expanded(spelled)) for path, _ in files if path.exists()):
                    files.append(read_attachment(spelled))
                break
    return AttachedQuestion(after_files(text, files), [path for path, _ in files], [*images.values()])


def after_files(text: str, files: Sequence[tuple[Path, str]]) -> str:
    """The question after the contents of `files`."""
    return "".join(f"{path.name}:\n{_fenced(content)}\n\n" for path, content in files) + text


def _fenced(content: str) -> str:
    ticks = max((len(run) for run in re.findall(r"`+", content)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"{fence}\n{content.rstrip()}\n{fence}"
