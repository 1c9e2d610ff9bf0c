"""The request of an `edgespec bench` run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.bench.rows.synthetic import MixtureShape
from edgespec.config import Config
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.units import readable

_MAX_TEXTS = 256  # llama.cpp's most sequences


@dataclass(frozen=True)
class BenchRequest:
    """The model, the rows, and what is asked.

    Attributes:
        load: the options of loading that every row shares.
        trees: budgets; "auto" is a tree sized by cost.
        cap: bytes, or None.
        context: tokens; None for as many as the prompts and answers take.
        workload: a file of questions; None for our own.
        prompts: how many questions are asked.
        synthesize: bytes of a widened target to make, or the mixture of experts; None measures the model
            itself.
        compare: the value of --compare, or None.
        texts: numbers of texts to answer at once.
        held: percents of a mixture's experts in memory, each a row of its own; None for the usual ones of a
            mixture that is made here.
    """

    load: Config
    config: GenerationConfig
    trees: Sequence[int | str]
    cap: int | None = None
    context: int | None = None
    workload: Path | None = None
    prompts: int = 3
    repetitions: int = 3
    row_seconds: float = 60.0
    synthesize: int | MixtureShape | None = None
    keep: bool = False
    compare: str | None = None
    texts: Sequence[int] = ()
    held: Sequence[int] | None = None
    command: str = "edgespec bench"


def check(request: BenchRequest) -> None:
    """Check the numbers alone.

    Raises:
        UsageError: one of them is out of its range.
    """
    for name, value in (("--prompts", request.prompts), ("--repetitions", request.repetitions)):
        if not 1 <= value <= 10_000:
            raise UsageError(f"{name} must be from 1 to 10000, not {value}.")
    for texts in request.texts:
        if not 1 <= texts <= _MAX_TEXTS:
            raise UsageError(f"--parallel must be from 1 to {_MAX_TEXTS}, not {texts}.")
    for percent in request.held or ():
        if not 1 <= percent <= 99:
            raise UsageError(f"--held must be from 1 to 99, in percent, not {percent}.")
    if not 0 < request.row_seconds < 1e6:
        raise UsageError(f"--row-seconds must be above 0, not {request.row_seconds:g}.")
    if request.keep and request.synthesize is None:
        raise UsageError("--keep applies only to --synthesize.", "Leave it out, or add --synthesize SIZE.")
    memory = request.load.memory.limit
    if memory is not None and request.cap is not None and memory > request.cap:
        raise UsageError(
            f"--memory is {readable(memory)}, and --memory-cap {readable(request.cap)}.",
            "The cap must be larger than the budget: it includes the page cache.",
        )
