"""Compare the catalog with the headers of its models' files:

    python scripts/check_catalog.py [NAME[=FILE] ...]

Each entry is compared with a file that is named, or else with the one on this machine or on the Hub, of which
the header alone is read. Exits with 1 if anything differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from edgespec.errors import EdgeSpecError  # noqa: E402 - of this checkout
from edgespec.models.gguf.header import read_header  # noqa: E402
from edgespec.models.gguf.split_files import split_paths  # noqa: E402
from edgespec.models.gguf.types import GGUFHeader  # noqa: E402
from edgespec.models.hub import catalog  # noqa: E402
from edgespec.models.hub.inspection import inspect_model  # noqa: E402

_OFF = 0.1  # of what is rough in the catalog: bytes and parameters
_CONTEXT = "{}.context_length"


def differences(entry: catalog.CatalogEntry, headers: Sequence[GGUFHeader]) -> Iterator[str]:
    """What the catalog says that the headers do not."""
    tensors = {tensor.name: tensor for header in headers for tensor in header.tensors}
    rough = {
        "bytes": (entry.n_bytes, sum(tensor.n_bytes for tensor in tensors.values())),
        "parameters": (entry.parameters, sum(_elements(tensor.shape) for tensor in tensors.values())),
    }
    for name, (said, found) in rough.items():
        if abs(said / found - 1) > _OFF:
            yield f"{said:,} {name}, and there are {found:,}"
    if entry.hollow is None or entry.shape is None:
        return
    if entry.shape.architecture != headers[0].architecture:
        yield f"architecture {entry.shape.architecture}, and it is {headers[0].architecture}"
        return
    context = headers[0].metadata.get(_CONTEXT.format(headers[0].architecture))
    if entry.shape.context != context:
        yield f"a context of {entry.shape.context}, and it is {context}"
    for planned in entry.hollow.headers[0].tensors:
        real = tensors.get(planned.name)
        if real is None or real.shape != planned.shape:
            yield f"{planned.name} of {planned.shape}, and it is {real.shape if real else 'not there'}"


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def main() -> int:
    """Compare, and print a line for each entry."""
    entries, differs = catalog.entries(), False
    for argument in sys.argv[1:] or list(entries):
        name, _, file = argument.partition("=")
        try:
            if file:
                headers = tuple(read_header(path) for path in split_paths(read_header(Path(file))))
            else:
                model = inspect_model(name)
                if model.approximate:
                    print(f"{name}: no header could be read")
                    continue
                headers = model.headers
            found = list(differences(entries[name], headers))
        except EdgeSpecError as error:
            print(f"{name}: {error.what}")
            continue
        differs = differs or bool(found)
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        print(f"{name}: {'; '.join(found[:5]) or 'as in the file'}{more}")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
