"""Text files and images attached to a question: by `@path` in it, /file and /image, -f and --image."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from edgespec.cli.options.declaration import option
from edgespec.cli.utf8 import read_text
from edgespec.files.user_folders import begins_as_path, expanded, holds

if TYPE_CHECKING:
    from edgespec.images.parts import Image
    from edgespec.text.encoding import Prompt

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

ImageFiles = Annotated[
    list[str] | None,
    option(
        "Prompt",
        "--image",
        "Show this image to the model before the prompt; repeatable.",
        variable=False,
        metavar="FILE",
    ),
]

# Terminals paste the path of a dropped file: in quotes, with backslashes before spaces, or as a URL.
_PATH = re.compile(r"""(?<!\S)(?:'([^'\n]+)'|"([^"\n]+)"|((?:\\.|[^\s\\'"])+))(?!\S)""")
_MENTION = re.compile(r'(?<!\S)@(?:"([^"]+)"|(\S+))')
_CONTENT = re.compile(r"^[^\n]*:\n(`{3,})\n", re.MULTILINE)  # the beginning of a file's, see `after_files`


def read_attachment(name: str) -> tuple[Path, str]:
    """A text file's path and content."""
    return expanded(name), read_text(name)


def read_attachments(names: Sequence[str] | None) -> list[tuple[Path, str]]:
    """The files of -f."""
    return [read_attachment(name) for name in names or ()]


class AttachedQuestion(NamedTuple):
    """A question with what it mentions."""

    text: str  # after the contents of the text files
    files: list[Path]
    images: list[Image]


def with_attachments(text: str, files: list[tuple[Path, str]]) -> AttachedQuestion:
    """The question after the contents of `files` and of the files it mentions by @path, each once.

    A mention of something that is not a file stays as it is, and so does one within contents of files, as a
    question has them that is edited: a stranger's file must not choose what is attached.
    """
    from edgespec.images.file import SUFFIXES, is_image
    from edgespec.images.parts import image_of

    files = list(files)
    images: dict[Path, Image] = {}
    for match in _MENTION.finditer(_without_contents(text)):
        name = match[1] or match[2]
        # Punctuation after a path is not part of it, unless there is such a file.
        for spelled in dict.fromkeys([name, name.rstrip(".,;:!?)")]):
            if spelled and holds(expanded(spelled).is_file):
                if spelled.lower().endswith(SUFFIXES) or is_image(expanded(spelled)):
                    images.setdefault(expanded(spelled).resolve(), image_of(spelled))
                elif not any(path.samefile(expanded(spelled)) for path, _ in files if path.exists()):
                    file = read_attachment(spelled)
                    if after_files("", [file]) not in text:  # of a question that is edited
                        files.append(file)
                break
    return AttachedQuestion(after_files(text, files), [path for path, _ in files], [*images.values()])


def _without_contents(text: str) -> str:
    """A question without the contents of files in it."""
    parts, end = [], 0
    while begun := _CONTENT.search(text, end):
        parts.append(text[end : begun.start()])
        closed = text.find(f"\n{begun[1]}\n", begun.end() - 1)
        end = closed if closed >= 0 else len(text)
    return "\n".join([*parts, text[end:]])


def after_files(text: str, files: Sequence[tuple[Path, str]]) -> str:
    """The question after the contents of `files`."""
    return "".join(f"{path.name}:\n{_fenced(content)}\n\n" for path, content in files) + text


def _fenced(content: str) -> str:
    ticks = max((len(run) for run in re.findall(r"`+", content)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"{fence}\n{content.rstrip()}\n{fence}"


def read_images(names: Sequence[str] | None) -> list[Image]:
    """The images of --image."""
    if not names:
        return []
    from edgespec.images.parts import image_of

    return [image_of(name) for name in names]


def without_images(text: str) -> tuple[str, list[Image]]:
    """A message without the paths of images in it, as dropping files on a terminal writes them; and these."""
    from edgespec.images.file import SUFFIXES
    from edgespec.images.parts import image_of

    found: list[Image] = []

    def taken(match: re.Match[str]) -> str:
        escaped = match[3]
        name = match[1] or match[2] or escaped
        is_url = name.startswith("file://")
        if not (is_url or begins_as_path(name)) or not name.lower().endswith(SUFFIXES):
            return match[0]
        if escaped and not is_url and os.sep == "/":
            name = re.sub(r"\\(.)", r"\1", name)
        if not holds(expanded(name).is_file):
            return match[0]
        found.append(image_of(name))
        return ""

    rest = _PATH.sub(taken, text)
    return (re.sub(r" {2,}", " ", rest).strip(), found) if found else (text, [])


def after_images(text: str, parts: Sequence[Mapping[str, Any]]) -> Prompt:
    """The question as a message that begins with images, given as parts; the text alone if there are none."""
    if not parts:
        return text
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def digest_part(image: Image) -> Mapping[str, Any]:
    """Return the hash of an image as a part of a message that is only compared."""
    return {"type": "image", "sha256": image.sha256}
