"""The images of a saved session: files beside it, named by the hashes of their contents."""

from __future__ import annotations

import mimetypes
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from edgespec.errors import SessionError
from edgespec.files.writing import atomic_write
from edgespec.images.file import media_type
from edgespec.images.parts import Image


class ImageFolder:
    """The folder of the images of one session."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, session: Path) -> ImageFolder:
        """The folder beside a session's file."""
        return cls(session.with_name(session.name + ".images"))

    @property
    def files(self) -> Sequence[Path]:
        return sorted(self.path.glob("*")) if self.path.is_dir() else ()

    def write(self, image: Image) -> dict[str, str]:
        """Write an image unless it is there; returns what stands for it in the session.

        Raises:
            OSError: it cannot be written.
        """
        suffix = mimetypes.guess_extension(media_type(image.data), strict=False) or ""
        path = self.path / f"{image.sha256}{suffix}"
        if not path.exists():
            self.path.mkdir(mode=0o700, exist_ok=True)
            with atomic_write(path) as file:
                file.write(image.data)
        return {"name": image.name, "sha256": image.sha256}

    def read(self, sha256: object, name: object) -> Image:
        """An image of the session.

        Raises:
            TypeError: the record names no image.
            SessionError: its file is missing, damaged, or cannot be read.
        """
        if not (isinstance(sha256, str) and isinstance(name, str)):
            raise TypeError("an image has no name")
        for path in self.files:
            if path.stem == sha256:
                with suppress(OSError):
                    image = Image(path.read_bytes(), name)
                    if image.sha256 == sha256:
                        return image
        raise SessionError(
            f"The image {name} of this session is missing in {self.path}, or damaged.",
            f"Restore the file {sha256}, or choose another session.",
        )

    def keep_only(self, images: Iterable[Image]) -> None:
        """Remove the files of all other images."""
        kept = {image.sha256 for image in images}
        with suppress(OSError):  # they are in nobody's way
            for path in self.files:
                if path.stem not in kept:
                    path.unlink()
            if self.path.is_dir() and not kept:
                self.path.rmdir()
