"""Faults of a machine for running models, and their remedies: facts in, findings out."""

from __future__ import annotations

from edgespec.doctor.facts import Facts
from edgespec.doctor.finding import SEVERITIES, Finding
from edgespec.doctor.machine_checks import MACHINE_CHECKS
from edgespec.doctor.model_checks import check_model
from edgespec.doctor.software_checks import SOFTWARE_CHECKS

_CHECKS = (check_model, *SOFTWARE_CHECKS, *MACHINE_CHECKS)


def diagnose(facts: Facts) -> list[Finding]:
    """All findings about the facts, the worst first."""
    found = [finding for check in _CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))
