"""Support for draft heads in this llama.cpp build: tried in a child process, once a build."""

from __future__ import annotations

import hashlib
from pathlib import Path

from platformdirs import user_cache_path

from edgespec.errors import BackendError
from edgespec.files.small_json import read_json, save_json
from edgespec.models.llama.heads.families import HeadFamily
from edgespec.models.llama.runtime.backend import build_identity
from edgespec.processes.trial import attempt_in_child

_MOST_S = 20.0  # of processor time; it takes less than one


def require_support(family: HeadFamily) -> None:
    """Make sure that heads of a family work here.

    Raises:
        BackendError: they do not, with the reason; or no child process can be started to find out.
    """
    if wrong := support_fault(family):
        instead = "Leave out --draft mtp" if family is HeadFamily.MTP else "Name an ordinary drafter"
        raise BackendError(
            f"This llama.cpp build cannot draft with {family.title}: {wrong}.",
            f"{instead}, or reinstall llama-cpp-python in the version that EdgeSpec asks for.",
        )


def support_fault(family: HeadFamily) -> str:
    """The reason why heads of a family do not work here, as a clause; empty if they do.

    Raises:
        BackendError: no child process can be started to find out, or it ran out of time or memory, which
            says little of the build.
    """
    place = _place(family)
    fault = read_json(place, lambda kept: "" + kept["fault"])
    if fault is None:
        trial = f"edgespec.models.llama.{family.value}"
        verdict = attempt_in_child(trial, {}, cpu_s=_MOST_S, stack_bytes=8 << 20)
        if verdict.why in ("time", "memory"):
            raise BackendError(
                f"Drafting with {family.title} could not be tried: the trial ran out of {verdict.why}.",
                "Close other programs, and try again.",
            )
        if verdict.answer is None:
            fault = f"trying one, it ends by {verdict.detail}"
        else:
            fault = str(verdict.answer.get("error", ""))
        save_json(place, {"fault": fault})
    return fault


def _place(family: HeadFamily) -> Path:
    tried = build_identity() + ("" if family is HeadFamily.EAGLE else f" {family.value}")
    digest = hashlib.blake2b(tried.encode(), digest_size=16).hexdigest()
    return user_cache_path("edgespec") / "heads" / f"{digest}.json"
