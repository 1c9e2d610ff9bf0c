"""Faults of a machine for running models, and their remedies: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.doctor.facts import Facts
from edgespec.doctor.finding import ERROR, HINT, OK, SEVERITIES, WARNING, Finding
from edgespec.doctor.machine_checks import MACHINE_CHECKS
from edgespec.doctor.software_checks import SOFTWARE_CHECKS
from edgespec.units import readable


def _check_model(facts: Facts) -> Iterator[Finding]:
    """Check a model's fit here, and say what would make it faster."""
    if facts.model_problem is not None:
        problem = facts.model_problem
        yield Finding(ERROR, "model", problem.what, problem.hint)
    model = facts.model
    if model is None:
        return
    if model.approximate:
        yield Finding(HINT, "model", model.approximate, f"Download it: edgespec models pull {model.name}")
    memory = model.memory
    needed, available = readable(memory["needed_bytes"]), readable(memory["available_bytes"])
    if memory["verdict"] == "too large":
        yield Finding(
            ERROR,
            "model",
            f"{readable(memory['least_bytes'])} of memory is required, but {available} is free.",
            "Close other programs, or use a smaller quantization or model.",
        )
    elif memory["verdict"] == "streams":
        a_pass = memory["streamed_bytes_per_pass"]
        seconds = f", {a_pass / facts.speed:.1f} s at the speed of this disk" if facts.speed else ""
        yield Finding(
            WARNING if facts.no_streaming else OK,
            "model",
            f"It needs {needed} of memory, and {available} are free: {readable(a_pass)} are read from disk "
            f"in every pass{seconds}. Drafting yields several tokens per pass.",
            "See the finding about streaming." if facts.no_streaming else "",
        )
    else:
        yield Finding(OK, "model", f"It fits into memory: {needed} of {available}.")
    if not model.drafter:
        yield Finding(
            HINT,
            "drafter",
            "No drafter for this model: drafts come from the text itself.",
            f"edgespec draft make {model.name}",
        )
    if model.path is not None and not model.profiled:
        yield Finding(
            HINT,
            "profile",
            "This model has not been profiled on this machine: its first trees are sized by a quick "
            "measurement.",
            f"edgespec profile {model.name}",
        )


_CHECKS = (_check_model, *SOFTWARE_CHECKS, *MACHINE_CHECKS)


def diagnose(facts: Facts) -> list[Finding]:
    """All findings about the facts, the worst first."""
    found = [finding for check in _CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))
