"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

import edgespec
from tests.unit.talking import TalkingEngine, TalkingSession


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TalkingEngine:
    talker = TalkingEngine()
    monkeypatch.setattr(edgespec, "load", talker.load, raising=False)
    return talker


@pytest.fixture
def talking_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations whose answers are the talking engine's."""
    monkeypatch.setattr("edgespec.engine.session.Session", TalkingSession)
