"""Fetching published heads from a server that speaks the Hub's API, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.cli.main import main
from edgespec.drafting.head_fetch import fetch_head
from edgespec.errors import HubError, UsageError
from edgespec.models.gguf.head_family import HeadFamily, head_family
from edgespec.models.gguf.header import read_header
from edgespec.models.hub import catalog
from edgespec.models.hub.registry import PairRegistry
from edgespec.models.hub.repository import Hub
from tests.hub_server import HubServer
from tests.unit.test_head_conversion import Published
from tests.waiting import PATIENCE_S

REPO = "acme/Tiny-head"
OTHER = "acme/Empty"


@pytest.fixture
def published(tmp_path: Path) -> Published:
    found = Published(tmp_path)
    found.write()
    return found


@pytest.fixture
def server(published: Published) -> Iterator[HubServer]:
    files = {path.name: path.read_bytes() for path in published.folder.iterdir()}
    repositories = {REPO: {**files, "README.md": b"A head"}, OTHER: {"pytorch_model.bin": b"weights"}}
    with HubServer(repositories) as server:
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path) -> Hub:
    return Hub(server.url, tmp_path / "hub", timeout=PATIENCE_S, pause=0.01)


def test_a_head_is_fetched_converted_and_remembered(
    published: Published, server: HubServer, hub: Hub
) -> None:
    found = fetch_head(str(published.target), repos=(REPO,), hub=hub)
    assert (found.repo, found.converted) == (REPO, True)
    assert head_family(read_header(found.path)) is HeadFamily.EAGLE
    (pair,) = PairRegistry().pairs(read_header(published.target).fingerprint)
    assert pair.path == found.path
    assert sorted(request.path.partition("?")[0].rpartition("/")[2] for request in server.downloads()) == [
        "config.json",
        "model.safetensors",
    ]
    fetch_head(str(published.target), repos=(REPO,), hub=hub)
    assert len(server.downloads()) == 2, "what is here is not fetched again"


def test_the_next_repository_is_tried(published: Published, hub: Hub) -> None:
    found = fetch_head(str(published.target), repos=("acme/None", OTHER, REPO), hub=hub)
    assert found.repo == REPO


def test_a_head_in_another_form_is_told(published: Published, hub: Hub) -> None:
    with pytest.raises(HubError) as caught:
        fetch_head(str(published.target), repos=(OTHER,), hub=hub)
    assert caught.value.what == (
        f"{OTHER} has no config.json and no model.safetensors, so its head cannot be converted."
    )
    assert caught.value.hint == "It has: pytorch_model.bin."


def test_targets_without_a_head(published: Published, hub: Hub) -> None:
    with pytest.raises(UsageError, match=r"No known head for .*large.gguf") as caught:
        fetch_head(str(published.target), hub=hub)
    assert "qwen3-8b" in caught.value.hint


def test_pull_names_the_head_and_fetches_it(
    published: Published,
    server: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entry = catalog.entries()["qwen3-8b"]
    assert entry.heads
    server.repositories[entry.repo] = {"Qwen3-8B-Q4_K_M.gguf": published.target.read_bytes()}
    server.repositories[entry.heads[0]] = server.repositories[REPO]
    hub = Hub(server.url, tmp_path / "hub", timeout=PATIENCE_S, pause=0.01)
    monkeypatch.setattr(Hub, "from_environment", classmethod(lambda cls: hub))
    assert main(["models", "pull", "qwen3-8b"]) == 0
    said = capsys.readouterr()
    assert f"{entry.heads[0]} has a draft head for it: edgespec models pull qwen3-8b --head" in said.err
    assert len(said.out.splitlines()) == 1
    assert main(["models", "pull", "qwen3-8b", "--head", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["heads"] == list(entry.heads)
    assert head_family(read_header(Path(found["head"]))) is HeadFamily.EAGLE
    (pair,) = PairRegistry().pairs(read_header(Path(found["path"])).fingerprint)
    assert str(pair.path) == found["head"]
