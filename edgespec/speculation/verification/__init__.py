"""Which path of a verified tree is accepted: one protocol, and a file for each family of rules."""

from edgespec.speculation.verification.base import Acceptance, Drafted, Verifier
from edgespec.speculation.verification.choosing import sample_and_look_up

__all__ = ["Acceptance", "Drafted", "Verifier", "sample_and_look_up"]
