"""The drafter that `--draft auto` takes when several are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.costs.yields import expected_yields
from edgespec.machine.memory import FreeMemory
from edgespec.measure.threads import known_threads
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub.drafter_choice import DrafterCandidate
from edgespec.models.hub.registry import MADE, REGISTERED
from edgespec.planning.devices.machine import MachineSnapshot
from edgespec.planning.drafter import choose_candidate
from edgespec.planning.planner import Planner
from edgespec.profiles.store import DraftProfile, PassProfile, ProfileKeys, ProfileStore
from tests.heads.files import WIDTH, write_target
from tests.tiny_hybrid import N_VOCAB


class Known:
    """A target with two drafters, and what was measured of them."""

    def __init__(self, folder: Path) -> None:
        embedding = np.zeros((N_VOCAB, WIDTH), dtype=np.float32)
        paths = [folder / f"{name}.gguf" for name in ("large", "usual", "other")]
        for seed, path in enumerate(paths):
            # Headers tell models apart, so each needs one of its own.
            write_target(path, embedding, np.random.default_rng(seed), path.stem)
        self.target = ModelFiles.of(read_header(paths[0]))
        self.found = [DrafterCandidate(paths[1], REGISTERED), DrafterCandidate(paths[2], MADE)]
        self.store = ProfileStore(folder / "profiles")
        self.config = Config.of(context=64, gpu_layers=0)

    def measured(self, which: int, agreement: float, step_s: float, passes: int = 500) -> None:
        """The steps of a drafter and what its trees yield were measured."""
        keys = self._keys(which)
        self.store.put(keys.passes, PassProfile(Curve.through([(1, 0.1), (64, 0.2)])))
        self.store.put(keys.drafts, DraftProfile(Curve.through([(1, step_s), (32, step_s)])))
        self.store.put(keys.yields(0.0), replace(expected_yields(agreement), passes=passes))

    def _keys(self, which: int) -> ProfileKeys:
        target = self.target.headers[0].fingerprint
        drafter = read_header(self.found[which].path).fingerprint
        return ProfileKeys.of(target, drafter, threads=known_threads(target, self.store), mode="")

    def chosen(self) -> tuple[str, str]:
        """The name of what is taken, and why."""
        machine = MachineSnapshot(FreeMemory(8 << 30), 1)
        choice = choose_candidate(self.found, Planner(self.target, self.config, machine, self.store))
        return choice.candidate.path.stem, choice.reason


@pytest.fixture
def known(tmp_path: Path) -> Known:
    return Known(tmp_path)


def test_the_order_decides_where_nothing_was_measured(known: Known) -> None:
    assert known.chosen() == ("usual", "registered for this target")
    known.measured(1, 0.9, 0.001)
    assert known.chosen() == ("usual", "registered for this target"), "nothing is known to compare it with"


def test_a_drafter_that_was_measured_to_be_faster_is_taken(known: Known) -> None:
    known.measured(0, 0.6, 0.01)
    known.measured(1, 0.9, 0.01)
    name, reason = known.chosen()
    assert name == "other"
    assert reason.startswith("with ")
    assert "with usual.gguf, measured here" in reason
    known.measured(1, 0.9, 0.2)  # it agrees more often, and takes far longer
    name, reason = known.chosen()
    assert name == "usual"
    assert reason.startswith("registered for this target, with ")
    assert reason.endswith("tokens/s measured here, and no faster with any other")


def test_few_passes_prove_nothing_and_neither_do_those_that_may_not_be_used(known: Known) -> None:
    known.measured(0, 0.6, 0.01)
    known.measured(1, 0.9, 0.01, passes=10)
    assert known.chosen()[0] == "usual"
    known.measured(1, 0.9, 0.01)
    known.config = known.config.with_(learn=False)
    assert known.chosen() == ("usual", "registered for this target")


def test_a_drafter_that_cannot_be_read_is_not_compared(known: Known) -> None:
    known.measured(0, 0.6, 0.01)
    known.measured(1, 0.9, 0.01)
    known.found[1].path.write_bytes(b"GGUF")
    assert known.chosen()[0] == "usual"
