"""Support for draft heads in this llama.cpp build: tried in a child process, once a build."""

from __future__ import annotations

import hashlib
from pathlib import Path

from edgespec.errors import BackendError, InconclusiveTrial
from edgespec.files.small_json import remembered
from edgespec.files.user_folders import cache_folder
from edgespec.models.llama.heads.families import HeadFamily
from edgespec.models.llama.runtime.backend import build_identity
from edgespec.option import named
from edgespec.processes.trial import attempt_in_child

_MOST_S = 20.0  # of processor time; it takes less than one


def require_support(family: HeadFamily) -> None:
    """Make sure that heads of a family work here.

    Raises:
        BackendError: they do not, with the reason.
        InconclusiveTrial: as `support_fault`.
    """
    if wrong := support_fault(family):
        instead = (
            f"Leave out {named('draft', 'mtp')}" if family is HeadFamily.MTP else "Name an ordinary drafter"
        )
        raise BackendError(
            f"This llama.cpp build cannot draft with {family.title}: {wrong}.",
            f"{instead}, or reinstall llama-cpp-python in the version that EdgeSpec asks for.",
        )


def support_fault(family: HeadFamily) -> str:
    """The reason why heads of a family do not work here, as a clause; empty if they do.

    Raises:
        InconclusiveTrial: the child process that was to find out was killed, starved or refused memory, or
            ran out of processor time, which says little of the build.
    """
    return remembered(
        _place(family),
        lambda kept: str(kept["fault"]),
        lambda: _tried_fault(family),
        lambda fault: {"fault": fault},
    )


def _tried_fault(family: HeadFamily) -> str:
    subject = f"Drafting with {family.title}"
    trial = f"edgespec.models.llama.{family.value}"
    verdict = attempt_in_child(trial, {}, subject=subject, cpu_s=_MOST_S, stack_bytes=8 << 20)
    if verdict.why == "time":
        raise InconclusiveTrial(subject, f"took more than {_MOST_S:.0f} s of processor time")
    if verdict.answer is None:
        return f"it crashed while trying one: {verdict.detail}"
    return str(verdict.answer.get("error", ""))


def _place(family: HeadFamily) -> Path:
    tried = build_identity() + ("" if family is HeadFamily.EAGLE else f" {family.value}")
    digest = hashlib.blake2b(tried.encode(), digest_size=16).hexdigest()
    return cache_folder() / "heads" / f"{digest}.json"
