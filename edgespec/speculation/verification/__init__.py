"""Verification rules: which path of a tree is accepted. One protocol, and a file for each family of rules."""

from edgespec.speculation.verification.base import Acceptance, DraftedTree, Verifier
from edgespec.speculation.verification.matching import sample_and_match

__all__ = ["Acceptance", "DraftedTree", "Verifier", "sample_and_match"]
