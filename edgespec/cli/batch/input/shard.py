"""A share of a batch's lines, so that several machines or jobs can answer one input."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from edgespec.cli.batch.input.job import Job
from edgespec.errors import UsageError


@dataclass(frozen=True)
class Shard:
    """Every `count`-th line, beginning with line `number`; blank lines do not count.

    Neighbouring lines are often of a kind, so they go to different shards, which then take about as long.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard that people write as "2/8".

        Raises:
            UsageError: it is something else.
        """
        found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text, re.ASCII)
        if found is None:
            raise UsageError(
                f"--shard is '{text}'.", "Write the number of the shard and of all shards, such as 2/8."
            )
        number, count = map(int, found.groups())
        if not 1 <= number <= count:
            raise UsageError(f"--shard is '{text}'.", f"Shards of {count} are 1/{count} to {count}/{count}.")
        return cls(number, count)

    def jobs(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Yield the jobs of an input that belong to the shard."""
        return islice(jobs, self.number - 1, None, self.count)

    def lines(self, total: int) -> int:
        """Number of its lines, of an input with `total` lines."""
        return len(range(self.number - 1, total, self.count))
