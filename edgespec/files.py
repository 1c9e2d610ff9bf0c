"""Files that are there whole or not at all, whatever ends the program while they are written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def written_whole(path: Path, *, lasting: bool = True) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` when everything is in it and on the disk.

    If the block raises, `path` stays what it was. Only its owner can read the new file.

    Args:
        lasting: wait until the disk has it, so that it also outlasts a power failure; what can be had again
            need not.

    Raises:
        OSError: the folder is not there, or cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            if lasting:
                os.fsync(file.fileno())
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            file.close()
            with suppress(OSError):
                Path(file.name).unlink()
            raise
