"""The drafter that a tuning begins with."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from edgespec.base.progress import Progress
from edgespec.drafting.make import MakeOptions, make_for
from edgespec.drafting.pair_check import check_sizes
from edgespec.drafting.tuning.network.weights import check_tunable
from edgespec.drafting.tuning.options import TuneOptions
from edgespec.errors import EdgeSpecError, PairingError
from edgespec.llama.runtime.model import Model
from edgespec.llama.tokenizer.compatibility import differs
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub import catalog
from edgespec.models.hub.drafter_choice import candidates


def choose_start(target: GGUFHeader, options: TuneOptions, report: Progress) -> GGUFHeader:
    """The drafter to begin with: the one that was named, the best one known, or one that is made now."""
    if options.start is not None:
        start = read_header(catalog.find(options.start, report))
        check_sizes(target, start)
        check_tunable(start)
        if found := difference(target.path, start.path):
            raise PairingError(
                f"The vocabularies of {start.path.name} and the target differ ({found}).",
                "Only a drafter that drafts by tokens can be tuned; edgespec draft make TARGET makes one.",
            )
        return start
    for candidate in candidates(target):
        with suppress(EdgeSpecError):
            start = read_header(candidate.path)
            check_sizes(target, start)
            check_tunable(start)
            if not difference(target.path, start.path):
                return start
    check_tunable(target)  # before the minutes that making takes: what is made of it is of the same kind
    report("No drafter yet: making one", 0.0)
    make = MakeOptions(memory=options.memory, threads=options.threads)
    return read_header(make_for(str(target.path), make, report).path)


def difference(target: Path, drafter: Path) -> str:
    """Describe how the vocabularies of two models differ; empty if token ids mean the same in both."""
    with Model(target, vocabulary_only=True) as large, Model(drafter, vocabulary_only=True) as small:
        return differs(large.vocabulary, small.vocabulary)
