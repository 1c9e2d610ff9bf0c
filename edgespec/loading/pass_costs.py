"""The time of the target's passes, as far as it is known while its memory is planned."""

from __future__ import annotations

from edgespec.costs.pass_time import USUAL_OVERLAP
from edgespec.costs.planner import TargetPasses
from edgespec.costs.prompts import usual_prompt
from edgespec.files.user_folders import cache_folder
from edgespec.loading.devices.assignment import read_rate
from edgespec.measure.derived_passes import known_curve
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.llama.prefill_chunks import lengths_that_differ
from edgespec.offload.planning.rows import PrefillFacts
from edgespec.profiles.store import ProfileStore


def expected_prefill(
    files: ModelFiles,
    context: int,
    threads: int,
    store: ProfileStore | None = None,
    *,
    own_kernels: bool = False,
) -> PrefillFacts:
    """The grounds on which the pieces of prompts are sized, in a context of so many tokens."""
    differ = lengths_that_differ(cache_folder() / "rows", files.headers[0].fingerprint)
    passes = expected_passes(files, threads, store)
    return PrefillFacts(passes, usual_prompt(context), own_kernels, frozenset(differ))


def expected_passes(files: ModelFiles, threads: int, store: ProfileStore | None = None) -> TargetPasses:
    """Passes over streamed weights: measured with this model, or derived; nothing is measured now."""
    store = store or ProfileStore()
    own = store.preferred_passes(files.headers[0].fingerprint, threads, streams=True)
    if own is None:
        return TargetPasses(
            known_curve(files.headers, store, threads),
            read_rate(files, store),
            overlap=USUAL_OVERLAP,
            measured=False,
        )
    rate = own.read_rate or read_rate(files, store)
    return TargetPasses(own.compute, rate, own.accept_s, own.overlap if own.streamed else USUAL_OVERLAP)
