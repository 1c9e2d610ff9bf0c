"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

import edgespec
from tests.unit.talking import TalkingEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TalkingEngine:
    talker = TalkingEngine()
    monkeypatch.setattr(edgespec, "load", talker.load, raising=False)
    return talker
