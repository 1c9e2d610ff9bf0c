"""Images that are shown to a model before a question."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote

from edgespec.cli.options.declaration import option
from edgespec.files.user_folders import expanded

if TYPE_CHECKING:
    from edgespec.images.parts import Image
    from edgespec.text.encoding import Prompt


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
_BEGINNINGS = ("/", "~/", "./", "../", "file://")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


def read_images(names: Sequence[str] | None) -> list[Image]:
    """The images of --image.

    Raises:
        UsageError: one cannot be read, is too large, or is no image.
    """
    if not names:
        return []
    from edgespec.images.parts import image_of

    return [image_of(name) for name in names]


def without_images(text: str) -> tuple[str, list[Image]]:
    """A message without the paths of images in it, as dropping files on a terminal writes them; and these.

    Raises:
        UsageError: one cannot be read, is too large, or is of a format that is not read.
    """
    from edgespec.images.file import SUFFIXES
    from edgespec.images.parts import image_of

    found: list[Image] = []

    def taken(match: re.Match[str]) -> str:
        escaped = match[3]
        name = match[1] or match[2] or escaped
        if not (name.startswith(_BEGINNINGS) or _DRIVE.match(name)) or not name.lower().endswith(SUFFIXES):
            return match[0]
        if name.startswith("file://"):
            name = unquote(name.removeprefix("file://").removeprefix("localhost"))
        elif escaped and not _DRIVE.match(name):
            name = re.sub(r"\\(.)", r"\1", name)
        if not expanded(name).is_file():
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
