"""Images in the lines of a batch: paths relative to the input file, and data URLs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.api.contents import data_address
from edgespec.api.images import data_of
from edgespec.errors import UsageError
from edgespec.files.user_folders import expanded
from edgespec.generation.config import shortened
from edgespec.images.parts import hash_of, image_of

_ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_DATA = "data:"


class LineImages:
    """Checks the images that one line names. Those in files are read again when the line is answered.

    Args:
        folder: where relative paths begin; None leaves the files alone.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._count = 0

    def part(self, source: object) -> dict[str, Any]:
        """The image with that path or data URL, as part of a message, with the hash of its bytes.

        Raises:
            UsageError: it cannot be read, or is at another address.
        """
        self._count += 1
        name = f"Image {self._count}"
        if not isinstance(source, str) or not source:
            raise UsageError(f"{name} must be a path or a data URL, not {shortened(json.dumps(source))}.")
        if source[: len(_DATA)].lower() == _DATA:
            data = data_of(source, name)
            return {"type": "image", "data": data, "name": name, "sha256": hash_of(data)}
        if _ADDRESS.match(source):
            raise UsageError(f"{name} is at {shortened(source)}, and images are not fetched.", "Give a file.")
        if self._folder is None:
            return {"type": "image", "path": source}
        path = self._folder / expanded(source)
        return {"type": "image", "path": str(path), "sha256": image_of(path).sha256}

    def of_message(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """An image among the parts of a message: with a "path", or "data" in Base64, or an "image_url".

        Raises:
            UsageError: as `part`; or it has none of them.
        """
        if "data" in part:
            return self.part(data_address(part["data"]))
        url = part.get("image_url")
        return self.part(url.get("url") if isinstance(url, Mapping) else url or part.get("path"))
