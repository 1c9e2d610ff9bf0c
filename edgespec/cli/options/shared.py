"""`bench --compare A B`: two files of `bench --share`."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import UsageError


def is_shared(compare: str) -> bool:
    """True if the value of --compare is a file of --share, and not a llama.cpp."""
    return compare.lower().endswith(".json") or Path(compare).is_file()


def compared(first: str, second: str | None) -> str:
    """The comparison as text.

    Args:
        second: what stands after the first file, which is where a model would be named.

    Raises:
        UsageError: there is no second file, or one of them is no such file.
    """
    if second is None:
        raise UsageError(f"There is nothing to compare {first} with.", "Name two files: --compare A B")
    from edgespec.bench.report.share import compare, read_share

    paths = [Path(first), Path(second)]
    names = [path.stem for path in paths] if paths[0].stem != paths[1].stem else [first, second]
    one, other = map(read_share, paths)
    return compare(one, other, names)
