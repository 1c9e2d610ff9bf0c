"""Support for draft heads in this llama.cpp build: tried in a child process, once a build."""

from __future__ import annotations

import hashlib
from pathlib import Path

from platformdirs import user_cache_path

from edgespec.errors import BackendError
from edgespec.files.small_json import keep_json, read_json
from edgespec.models.llama.runtime.backend import build_identity
from edgespec.processes.trial import attempt_in_child

_MOST_S = 20.0  # of processor time; it takes less than one


def require_heads() -> None:
    """Make sure that heads work here.

    Raises:
        BackendError: they do not, with the reason; or no child process can be started to find out.
    """
    if wrong := heads_fault():
        raise BackendError(
            f"This llama.cpp build cannot draft with heads: {wrong}.",
            "Name an ordinary drafter, or reinstall llama-cpp-python in the version that EdgeSpec asks for.",
        )


def require_block_heads() -> None:
    """Make sure that block heads work here.

    Raises:
        BackendError: as `require_heads`.
    """
    if wrong := block_heads_fault():
        raise BackendError(
            f"This llama.cpp build cannot draft with block heads: {wrong}.",
            "Name an ordinary drafter, or reinstall llama-cpp-python in the version that EdgeSpec asks for.",
        )


def require_mtp_support() -> None:
    """Make sure that layers for multi-token prediction work here.

    Raises:
        BackendError: as `require_heads`.
    """
    if wrong := mtp_support_fault():
        raise BackendError(
            f"This llama.cpp build cannot draft with MTP layers: {wrong}.",
            "Leave out --draft mtp, or reinstall llama-cpp-python in the version that EdgeSpec asks for.",
        )


def require_assistant_support() -> None:
    """Make sure that assistants work here.

    Raises:
        BackendError: as `require_heads`.
    """
    if wrong := assistant_support_fault():
        raise BackendError(
            f"This llama.cpp build cannot draft with assistants: {wrong}.",
            "Name an ordinary drafter, or reinstall llama-cpp-python in the version that EdgeSpec asks for.",
        )


def heads_fault() -> str:
    """The reason why heads do not work here, as a clause; empty if they do.

    Raises:
        BackendError: no child process can be started to find out.
    """
    return _fault("heads.trial")


def block_heads_fault() -> str:
    """The reason why block heads do not work here, as a clause; empty if they do.

    Raises:
        BackendError: no child process can be started to find out.
    """
    return _fault("heads.blocks.trial")


def mtp_support_fault() -> str:
    """The reason why layers for multi-token prediction do not work here, as a clause; empty if they do.

    Raises:
        BackendError: no child process can be started to find out.
    """
    return _fault("trials.mtp_trial")


def assistant_support_fault() -> str:
    """The reason why assistants do not work here, as a clause; empty if they do.

    Raises:
        BackendError: no child process can be started to find out.
    """
    return _fault("trials.assistant_trial")


def _fault(trial: str) -> str:
    place = _place(trial)
    fault = read_json(place, lambda kept: "" + kept["fault"])
    if fault is None:
        verdict = attempt_in_child(f"edgespec.models.llama.{trial}", {}, cpu_s=_MOST_S, stack_bytes=8 << 20)
        fault = f"trying one, it ends by {verdict.detail or verdict.why}"
        if verdict.answer is not None:
            fault = str(verdict.answer.get("error", ""))
        if verdict.why in (None, "crash"):  # running out of time or memory says little of the build
            keep_json(place, {"fault": fault})
    return fault


def _place(trial: str) -> Path:
    tried = build_identity() + ("" if trial == "heads.trial" else f" {trial}")
    digest = hashlib.blake2b(tried.encode(), digest_size=16).hexdigest()
    return user_cache_path("edgespec") / "heads" / f"{digest}.json"
