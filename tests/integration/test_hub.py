"""Pulling from a server that speaks the Hub's API, over real HTTP, with everything that can go wrong."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.base.progress import Progress
from edgespec.base.units import readable
from edgespec.errors import EdgeSpecError, HubError, OutputError, UsageError
from edgespec.models.gguf.header import read_header_bytes
from edgespec.models.hub.cache import cached_models
from edgespec.models.hub.download import download
from edgespec.models.hub.inspection import RemoteHeaders
from edgespec.models.hub.names import HubName, parse_hub_name
from edgespec.models.hub.pull import pull
from edgespec.models.hub.repository import Hub, find_repository, translated
from edgespec.version import __version__
from tests.hub_server import (
    COMMIT,
    LACKS,
    HubServer,
    Request,
    always,
    cut_off,
    git_hash,
    hang,
    on_bytes,
    reply,
    send_bytes,
    status,
    too_short,
)
from tests.tiny import finish
from tests.waiting import PATIENCE_S, wait_until

REPO = "acme/Tiny-GGUF"
Q4, Q8 = "Tiny-Q4_K_M.gguf", "Tiny-Q8_0.gguf"
DATA = bytes(range(256)) * 1024  # 256 KiB
OTHER = DATA[::-1]


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer({REPO: {Q4: DATA, Q8: OTHER, "README.md": b"hello"}}) as server:
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path) -> Hub:
    return Hub(server.url, tmp_path / "hub", timeout=PATIENCE_S, pause=0.01)


def name(text: str) -> HubName:
    found = parse_hub_name(text)
    assert found is not None
    return found


def refused(hub: Hub, text: str, what: str, hint: str, kind: type[EdgeSpecError] = HubError) -> None:
    with pytest.raises(kind) as caught:
        pull(name(text), hub=hub)
    assert (caught.value.what, caught.value.hint) == (what, hint)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def stored(hub: Hub, path: Path, checksum: Callable[[bytes], str] = sha256) -> list[str]:
    """The checksums of what is stored of a repository with one file, which is no link where it was moved."""
    blobs = [blob.name for blob in (hub.folder(REPO) / "blobs").iterdir()]
    return blobs if path.is_symlink() else [*blobs, checksum(path.read_bytes())]


def interrupted_at(what: str) -> Progress:
    """Progress that stops the program as Ctrl-C does, at a line that has `what` in it."""

    def on_progress(line: str, _fraction: float) -> None:
        if what in line:
            raise KeyboardInterrupt

    return on_progress


def test_a_model_comes_into_the_cache_of_the_hub(server: HubServer, hub: Hub) -> None:
    found = pull(name(f"{REPO}:q4_k_m"), hub=hub)
    assert found.path.read_bytes() == DATA
    assert found.notes == ()
    from huggingface_hub import try_to_load_from_cache

    assert try_to_load_from_cache(REPO, Q4, cache_dir=hub.cache) == str(found.path)
    assert found.path.is_symlink() or sys.platform == "win32"
    assert stored(hub, found.path) == [sha256(DATA)]
    (hub.folder(REPO) / "refs" / "main").write_bytes(b"\xff")  # damaged
    assert pull(name(f"{REPO}:q4_k_m"), hub=hub).path == found.path
    assert len(server.downloads()) == 1


def test_without_links_a_model_lies_in_its_snapshot(
    server: HubServer, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links on this disk")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    found = pull(name(f"{REPO}:Q4_K_M"), hub=hub)
    assert (found.path.is_symlink(), found.path.read_bytes()) == (False, DATA)
    assert pull(name(f"{REPO}:Q4_K_M"), hub=hub, refresh=True).path == found.path
    assert len(server.downloads()) == 1


def test_a_file_is_on_the_disk_before_it_is_a_blob(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    sync, move = os.fsync, Path.replace

    def moved(old: Path, new: Path) -> Path:
        steps.append(new.name)
        return move(old, new)

    monkeypatch.setattr("os.fsync", lambda file: [steps.append("fsync"), sync(file)])
    monkeypatch.setattr(Path, "replace", moved)
    pull(name(f"{REPO}:Q4_K_M"), hub=hub)
    digest = sha256(DATA)
    assert steps[steps.index(digest) - 1] == "fsync"


def test_what_is_here_is_found_without_asking(server: HubServer, hub: Hub) -> None:
    first = pull(name(f"{REPO}:Q4_K_M"), hub=hub)
    server.requests.clear()
    assert pull(name(f"{REPO}:q4_k_m"), hub=hub).path == first.path
    assert pull(name(REPO), hub=hub).path == first.path  # the only one here
    assert server.requests == []


@pytest.mark.filterwarnings("ignore:.*cache-system uses symlinks")  # where there are none
def test_what_another_program_fetched_is_used(server: HubServer, hub: Hub) -> None:
    from huggingface_hub import hf_hub_download

    theirs = hf_hub_download(REPO, Q8, cache_dir=hub.cache, endpoint=hub.endpoint, token=False)
    server.requests.clear()
    assert pull(name(f"{REPO}:Q8_0"), hub=hub).path == Path(theirs)
    assert server.requests == []


def test_the_nearest_quantization_is_taken_and_said(hub: Hub) -> None:
    found = pull(name(f"{REPO}:Q5_K_M"), hub=hub)
    assert found.path.name == Q4
    assert found.notes == (f"There is no Q5_K_M in {REPO}; Q4_K_M is the nearest (256.0 KiB).",)


def test_the_parts_of_a_split_model_come_together(server: HubServer, hub: Hub) -> None:
    parts = {f"Q8_0/Big-Q8_0-0000{n}-of-00003.gguf": bytes([n]) * (1000 + n) for n in (1, 2, 3)}
    server.repositories["acme/Big-GGUF"] = parts
    told: list[str] = []
    found = pull(name("acme/Big-GGUF"), lambda what, _: told.append(what), hub=hub)
    assert found.path.name == "Big-Q8_0-00001-of-00003.gguf"
    assert {p.name: p.read_bytes() for p in found.path.parent.iterdir()} == {
        path.split("/")[1]: data for path, data in parts.items()
    }
    assert "Downloading Big-Q8_0-00002-of-00003.gguf (file 2 of 3), 1002 B of 1002 B" in told


def test_all_parts_come_from_the_commit_that_was_asked_about(server: HubServer, hub: Hub) -> None:
    repo, names = "acme/Big-GGUF", [f"Big-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]
    old, new = ({part: bytes([n, i]) * 5000 for i, part in enumerate(names)} for n in (1, 2))
    server.repositories[repo] = old
    moved: list[str] = []

    def move(request: Request, _handler: object) -> bool:
        if request.host == "cdn" and not moved:
            moved.append(server.move(repo, new))
        return False

    server.failures.append(move)
    found = pull(name(repo), hub=hub)
    assert moved
    assert {part.name: part.read_bytes() for part in found.path.parent.iterdir()} == old
    assert found.path.parent.name == COMMIT
    assert len(server.downloads()) == 2
    # The next one that asks gets what is there by then, and the cache knows that it is newer.
    again = pull(name(repo), hub=hub, refresh=True)
    assert {part.name: part.read_bytes() for part in again.path.parent.iterdir()} == new
    assert again.path.parent.name == moved[0]
    assert pull(name(repo), hub=hub).path == again.path
    from huggingface_hub import try_to_load_from_cache

    assert try_to_load_from_cache(repo, names[0], cache_dir=hub.cache) == str(again.path)


@pytest.mark.parametrize("mistake", [TypeError("ours"), ValueError("ours"), KeyError("ours")])
def test_a_mistake_of_the_program_is_not_blamed_on_the_network(hub: Hub, mistake: Exception) -> None:
    def on_progress(what: str, _fraction: float) -> None:
        if what.startswith("Downloading"):
            raise mistake

    with pytest.raises(type(mistake), match="ours"):
        pull(name(f"{REPO}:Q4_K_M"), on_progress, hub=hub)


@pytest.mark.parametrize(
    "answer",
    [
        "hello",
        {},
        [1],
        {"id": REPO, "sha": "main", "siblings": []},
        {"id": REPO, "sha": COMMIT, "siblings": 3},
        {"id": REPO, "sha": COMMIT, "siblings": [{"size": 3}]},
        {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": Q4, "size": 3, "lfs": {"size": 3}}]},
    ],
)
def test_answers_that_are_not_the_hubs(server: HubServer, hub: Hub, answer: object) -> None:
    server.failures.append(always(lambda _request, handler: reply(handler, answer)))
    host = server.url.removeprefix("http://")
    refused(hub, REPO, f"{host} sent an invalid description of {REPO}.", "Check HF_ENDPOINT and any proxy.")


# --- transfers that fail -------------------------------------------------------------------------


def test_a_lost_connection_is_taken_up_where_it_was_lost(server: HubServer, hub: Hub) -> None:
    server.failures.append(on_bytes(cut_off(DATA, 100_000)))
    told: list[str] = []
    assert pull(name(f"{REPO}:Q4_K_M"), lambda what, _: told.append(what), hub=hub).path.read_bytes() == DATA
    assert [request.range for request in server.downloads()] == [None, "bytes=100000-"]
    assert f"{Q4}: the connection was lost; trying again in 1 s" in told


def test_a_body_that_is_too_short_is_no_model(server: HubServer, hub: Hub) -> None:
    # The server says that this is all, and hangs up properly: five times in a row the rest does not come.
    server.failures.append(on_bytes(too_short(DATA[:5000]), times=-1))
    refused(
        hub,
        f"{REPO}:Q4_K_M",
        f"The download of {Q4} stopped at 4.9 KiB of 256.0 KiB: the connection ended early.",
        "Try again, and the download resumes.",
    )
    server.failures.clear()
    assert pull(name(f"{REPO}:Q4_K_M"), hub=hub).path.read_bytes() == DATA
    assert server.downloads()[-1].range == "bytes=5000-"


def test_a_download_that_stops_near_its_end_says_how_near(server: HubServer, hub: Hub) -> None:
    server.failures.append(on_bytes(too_short(DATA[:-2]), times=-1))
    refused(
        hub,
        f"{REPO}:Q4_K_M",
        f"The download of {Q4} stopped 2 bytes before its end: the connection ended early.",
        "Try again, and the download resumes.",
    )


def test_a_server_that_hangs_is_left_and_tried_again(server: HubServer, hub: Hub) -> None:
    hub = replace(hub, timeout=2.0)
    server.failures.append(on_bytes(hang(DATA, 65_536, seconds=PATIENCE_S)))
    told: list[str] = []
    assert pull(name(f"{REPO}:Q4_K_M"), lambda what, _: told.append(what), hub=hub).path.read_bytes() == DATA
    assert f"{Q4}: the server stopped responding; trying again in 1 s" in told
    assert server.downloads()[-1].range == "bytes=65536-"


def test_a_server_that_never_answers(server: HubServer, hub: Hub) -> None:
    hub = replace(hub, timeout=0.3)
    server.failures.append(always(lambda _request, _handler: time.sleep(PATIENCE_S)))
    host = server.url.removeprefix("http://")
    refused(hub, REPO, f"{host} does not answer.", "Try again later; the partial download is kept.")


def test_a_wrong_checksum_is_told_and_the_file_removed(server: HubServer, hub: Hub) -> None:
    server.digests[Q4] = "ab" * 32
    with pytest.raises(HubError) as caught:
        pull(name(f"{REPO}:Q4_K_M"), hub=hub)
    true = sha256(DATA)[:12]
    assert caught.value.what == (
        f"The download of {Q4} is corrupted: its checksum is {true}... instead of abababababab..."
    )
    assert list((hub.folder(REPO) / "blobs").iterdir()) == []
    assert list(cached_models(hub, REPO)) == []


def test_damage_on_the_way_is_noticed_and_the_next_try_is_clean(server: HubServer, hub: Hub) -> None:
    bad = DATA[:70_000] + b"!" + DATA[70_001:]
    server.failures.append(on_bytes(lambda _request, handler: send_bytes(handler, bad, len(bad))))
    with pytest.raises(HubError, match="is corrupted"):
        pull(name(f"{REPO}:Q4_K_M"), hub=hub)
    assert pull(name(f"{REPO}:Q4_K_M"), hub=hub).path.read_bytes() == DATA


def test_too_many_requests_are_waited_out_as_the_hub_asks(server: HubServer, hub: Hub) -> None:
    server.failures.append(on_bytes(status(429, Retry_After="1")))
    told: list[str] = []
    start = time.monotonic()
    assert pull(name(f"{REPO}:Q4_K_M"), lambda what, _: told.append(what), hub=hub).path.read_bytes() == DATA
    assert time.monotonic() - start >= 1
    assert f"{Q4}: the Hub received too many requests; trying again in 1 s" in told


@pytest.mark.parametrize(
    ("act", "what", "hint"),
    [
        (
            cut_off(DATA, 0),
            f"The download of {Q4} stopped at 0 B of 256.0 KiB: the connection was lost.",
            "Try again, and the download resumes.",
        ),
        (
            status(429, Retry_After="3600"),
            f"The download of {Q4} stopped at 0 B of 256.0 KiB: the Hub received too many requests.",
            "The Hub asks to wait 60 min.",
        ),
        (
            status(403),
            f"The Hub refuses access to {REPO} (403).",
            "Allow your token to read it: huggingface.co/settings/tokens",
        ),
        (
            status(404),
            f"A file of {REPO} is gone from the Hub (404).",
            "Try again, or choose another quantization.",
        ),
    ],
    ids=["lost", "a long wait", "refused", "gone"],
)
def test_a_download_that_fails_again_and_again_ends_with_a_message(
    server: HubServer,
    hub: Hub,
    capfd: pytest.CaptureFixture[str],
    act: Callable[..., None],
    what: str,
    hint: str,
) -> None:
    server.failures.append(on_bytes(act, times=-1))
    refused(hub, f"{REPO}:Q4_K_M", what, hint)
    assert "verysecret" not in "".join(capfd.readouterr()), "a signed address was shown"


def header_of(path: Path, title: str, word: str) -> bytes:
    """A file with a vocabulary of more than 64 KiB, and a tensor behind it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(title)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"{'token' if n < 5000 else word} {n}" for n in range(10_000)])
    writer.add_token_merges([f"to{n} ken{n}" for n in range(10_000)])
    writer.add_file_type(len(title))
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    finish(writer)
    return path.read_bytes()


def test_a_vocabulary_that_files_share_is_read_once(server: HubServer, hub: Hub, tmp_path: Path) -> None:
    """The third file has another one that begins alike, has as many tokens, and is longer."""
    files = {
        f"Tiny-{label}.gguf": header_of(tmp_path / label, f"Tiny {label}", word)
        for label, word in (("Q4_0", "token"), ("Q4_K_M", "token"), ("Q8_0", "another"))
    }
    server.repositories[REPO] = files
    repository = find_repository(hub, REPO)
    remote = RemoteHeaders(hub, repository)
    asked = []
    for model in repository.models:
        before = len(server.downloads())
        (file,) = repository.files_of(model)
        data = files[file.path]
        assert remote.read(file) == read_header_bytes(Path(file.path), data, len(data))
        ranges = [str(request.range)[6:].split("-") for request in server.downloads()[before:]]
        asked.append(sum(int(end) + 1 - int(start) for start, end in ranges) / len(data))
    assert asked[0] == 1
    assert asked[1] < 0.5
    assert asked[2] > 1


def test_too_many_questions(server: HubServer, hub: Hub) -> None:
    server.failures.append(always(lambda _request, handler: reply(handler, {}, 429, {"Retry-After": "77"})))
    refused(hub, REPO, "The Hub received too many requests (429).", "Try again in 77 seconds, or log in.")


def test_a_server_in_trouble(server: HubServer, hub: Hub) -> None:
    server.failures.append(always(lambda _request, handler: reply(handler, {}, 500)))
    refused(hub, REPO, "The Hub answered with status 500.", "Try again later.")


def test_ranges_that_the_server_ignores_start_anew(server: HubServer, hub: Hub) -> None:
    server.failures += [
        on_bytes(cut_off(DATA, 1000)),
        on_bytes(lambda _request, handler: send_bytes(handler, DATA, len(DATA))),
    ]
    assert pull(name(f"{REPO}:Q4_K_M"), hub=hub).path.read_bytes() == DATA


def test_a_killed_download_continues_in_the_next_run(server: HubServer, tmp_path: Path) -> None:
    server.failures.append(on_bytes(hang(DATA, 131_072, seconds=PATIENCE_S)))
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": server.url,
        "HF_HUB_DOWNLOAD_TIMEOUT": str(round(PATIENCE_S)),
    }
    command = [sys.executable, "-m", "edgespec", "models", "pull", f"{REPO}:Q4_K_M"]
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    blobs = tmp_path / "hf" / "hub" / "models--acme--Tiny-GGUF" / "blobs"
    partial = blobs / f"{sha256(DATA)}.edgespec.incomplete"
    wait_until(lambda: partial.exists() and partial.stat().st_size >= 65_536)
    child.kill()
    child.communicate()
    kept = partial.stat().st_size
    assert 0 < kept < len(DATA)
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert Path(again.stdout.strip()).read_bytes() == DATA
    assert server.downloads()[-1].range == f"bytes={kept}-"


# --- mirrors -------------------------------------------------------------------------------------

# Each subset of what the Hub has and a mirror may lack.
MIRRORS = [frozenset(lacks) for n in range(len(LACKS) + 1) for lacks in combinations(sorted(LACKS), n)]


@pytest.mark.parametrize("lacks", MIRRORS, ids=lambda lacks: ", ".join(sorted(lacks)) or "nothing")
def test_a_mirror_gives_the_verified_file_once_or_the_message_names_the_cause(
    server: HubServer, hub: Hub, lacks: frozenset[str]
) -> None:
    server.lacks, hub, data = lacks, replace(hub, pause=0.0), DATA[:1000]
    server.repositories[REPO] = {Q4: data}
    wanted = f"{REPO}:Q4_K_M"
    if lacks >= {"sizes", "checksum"}:
        refused(
            hub,
            wanted,
            f"{hub.host} provides no checksum of {Q4}, so the download cannot be verified.",
            "Set HF_ENDPOINT to another address, or download the file by other means and give its path.",
        )
        assert len(server.downloads()) == 1
        assert list(hub.folder(REPO).rglob("*.incomplete")) == []
        return
    if lacks >= {"endurance", "ranges"}:
        with pytest.raises(
            HubError, match=f"The download of {Q4} stopped at .*: the connection was lost"
        ) as e:
            pull(name(wanted), hub=hub)
        assert e.value.hint == f"{hub.host} cannot resume downloads, so the next try starts over."
        return
    found = pull(name(wanted), hub=hub)
    assert found.path.read_bytes() == data
    assert stored(hub, found.path) == [sha256(data)]
    starts = [int((request.range or "bytes=0-")[6:-1]) for request in server.downloads()]
    assert starts[0] == 0
    assert starts == sorted(set(starts)), "some bytes were fetched twice"
    assert ("endurance" in lacks) == (len(starts) > 1)
    server.requests.clear()
    assert pull(name(wanted), hub=hub).path == found.path
    assert server.requests == []


@pytest.mark.parametrize(
    "lacks", [{"sizes"}, {"sizes", "checksum"}, {"commit", "HEAD"}], ids=lambda parts: " ".join(sorted(parts))
)
def test_damage_by_a_mirror_is_noticed(server: HubServer, hub: Hub, lacks: set[str]) -> None:
    server.lacks = frozenset(lacks)
    server.digests[Q4] = "ab" * 32
    with pytest.raises(HubError, match=r"is corrupted|provides no checksum"):
        pull(name(f"{REPO}:Q4_K_M"), hub=hub)
    assert list(cached_models(hub, REPO)) == []


@pytest.mark.parametrize(
    "more", [set(), {"ranges"}, {"HEAD", "commit"}], ids=lambda parts: " ".join(sorted(parts))
)
def test_a_download_of_unknown_size_resumes_after_a_kill(server: HubServer, hub: Hub, more: set[str]) -> None:
    server.lacks = frozenset({"sizes", "endurance", *more})
    with pytest.raises(KeyboardInterrupt, match="the same command resumes the download"):
        pull(name(f"{REPO}:Q4_K_M"), interrupted_at("trying again"), hub=hub)
    kept = server.sent
    server.lacks -= {"endurance"}
    assert pull(name(f"{REPO}:Q4_K_M"), hub=hub).path.read_bytes() == DATA
    assert server.downloads()[-1].range == f"bytes={kept}-"


def test_what_arrived_completely_before_a_kill_is_not_fetched_again(server: HubServer, hub: Hub) -> None:
    server.lacks = frozenset({"sizes"})
    with pytest.raises(KeyboardInterrupt):
        pull(name(f"{REPO}:Q4_K_M"), interrupted_at(f"{readable(len(DATA))} of"), hub=hub)
    pull(name(f"{REPO}:Q4_K_M"), hub=hub)
    assert [request.range for request in server.downloads()] == [None, f"bytes={len(DATA)}-"]
    assert server.sent == len(DATA)


def test_a_note_names_no_size_that_a_mirror_does_not_give(server: HubServer, hub: Hub) -> None:
    server.lacks = frozenset({"sizes"})
    told: list[str] = []
    found = pull(name(f"{REPO}:Q5_K_M"), lambda what, _: told.append(what), hub=hub)
    assert found.notes == (f"There is no Q5_K_M in {REPO}; Q4_K_M is the nearest.",)
    assert any(what.startswith(f"Downloading {Q4}, ") for what in told)


def test_the_checksum_of_an_artifact_store_is_used(server: HubServer, hub: Hub) -> None:
    server.lacks = frozenset({"sizes", "checksum"})
    server.headers["X-Checksum-Sha256"] = sha256(DATA)
    assert pull(name(f"{REPO}:Q4_K_M"), hub=hub).path.read_bytes() == DATA


@pytest.mark.parametrize("lacks", [set(), {"sizes"}], ids=lambda parts: " ".join(sorted(parts)))
def test_a_small_file_is_verified_by_its_git_hash(server: HubServer, hub: Hub, lacks: set[str]) -> None:
    server.lacks = frozenset(lacks)
    repository = find_repository(hub, REPO)
    (readme,) = (file for file in repository.files if file.path == "README.md")
    (path,) = download(hub, repository, [readme])
    assert path.read_bytes() == b"hello"
    assert stored(hub, path, git_hash) == [git_hash(b"hello")]


@pytest.mark.parametrize(
    "path", ["../../evil.gguf", "/tmp/evil.gguf", "a/../../../evil.gguf", "C:\\evil.gguf"]
)
def test_no_path_of_a_mirror_leads_out_of_the_cache(
    server: HubServer, hub: Hub, tmp_path: Path, path: str
) -> None:
    server.repositories["acme/Evil"] = {path: DATA}
    with pytest.raises(HubError, match="has no GGUF files"):
        pull(name("acme/Evil"), hub=hub)
    assert not list(tmp_path.rglob("evil.gguf"))


def test_no_checksum_of_a_mirror_is_a_path(server: HubServer, hub: Hub) -> None:
    server.digests[Q4] = "../../../../evil"
    with pytest.raises(HubError, match="provides no checksum"):
        pull(name(f"{REPO}:Q4_K_M"), hub=hub)


# --- access --------------------------------------------------------------------------------------


def test_an_unknown_repository_and_its_neighbours(hub: Hub) -> None:
    refused(
        hub,
        "acme/Tiny-GGFU",
        "There is no repository acme/Tiny-GGFU on the Hub, or it is private.",
        f"Did you mean {REPO}?",
    )
    refused(
        hub,
        "nobody/nothing",
        "There is no repository nobody/nothing on the Hub, or it is private.",
        "Check the name. Log in with 'hf auth login', or set HF_TOKEN if it is private.",
    )


def test_a_private_repository_opens_with_the_token(server: HubServer, hub: Hub) -> None:
    server.private.add(REPO)
    with pytest.raises(HubError, match="or it is private"):
        pull(name(REPO), hub=hub)
    mine = Hub(server.url, hub.cache, token=server.token, timeout=PATIENCE_S)
    assert pull(name(REPO), hub=mine).path.read_bytes() == DATA
    # The token is for the Hub; the host that has the bytes must not see it.
    assert {request.authorization for request in server.downloads()} == {None}


def test_a_gated_repository_says_what_to_accept(server: HubServer, hub: Hub) -> None:
    server.gated.add(REPO)
    refused(
        hub,
        REPO,
        f"Access to {REPO} is restricted by its owner.",
        f"Open {server.url}/{REPO}, accept the terms there, then: "
        "Log in with 'hf auth login', or set HF_TOKEN.",
    )


def test_the_hub_is_told_the_version_and_the_token_alone(hub: Hub) -> None:
    version = {"user-agent": f"edgespec/{__version__}"}
    assert hub.headers() == version
    assert replace(hub, token="hf_mine").headers() == version | {"authorization": "Bearer hf_mine"}


def test_a_wrong_token_is_not_shown(server: HubServer, hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    mine = Hub(server.url, hub.cache, token="hf_wrongwrongwrong", timeout=PATIENCE_S)
    refused(
        mine,
        REPO,
        "The Hub rejected the token.",
        "Log in with 'hf auth login', or set HF_TOKEN to a valid token.",
    )
    assert "wrongwrong" not in "".join(capfd.readouterr())


def test_a_renamed_repository_is_followed(server: HubServer, hub: Hub) -> None:
    server.renamed["acme/Old-GGUF"] = REPO
    assert pull(name("acme/Old-GGUF:Q8_0"), hub=hub).path.read_bytes() == OTHER


def test_no_network(tmp_path: Path) -> None:
    hub = Hub("http://127.0.0.1:9", tmp_path, timeout=PATIENCE_S)
    refused(
        hub,
        REPO,
        "127.0.0.1:9 cannot be reached (ConnectError).",
        "Check the network and HF_ENDPOINT. Without a network, give the path of a GGUF file.",
    )


def test_offline_uses_what_is_here_and_asks_nobody(server: HubServer, hub: Hub) -> None:
    offline = Hub(server.url, hub.cache, offline=True)
    refused(
        offline,
        f"{REPO}:Q4_K_M",
        f"{REPO}:Q4_K_M is not installed, and HF_HUB_OFFLINE forbids asking the Hub.",
        "Unset HF_HUB_OFFLINE, or give the path of a GGUF file.",
    )
    assert server.requests == []
    here = pull(name(f"{REPO}:Q4_K_M"), hub=hub)
    server.requests.clear()
    assert pull(name(f"{REPO}:Q4_K_M"), hub=offline).path == here.path
    assert pull(name(REPO), hub=offline).path == here.path
    refused(
        offline,
        f"{REPO}:Q8_0",
        f"{REPO}:Q8_0 is not installed, and HF_HUB_OFFLINE forbids asking the Hub. "
        "Installed: Q4_K_M (256.0 KiB).",
        "Unset HF_HUB_OFFLINE, or give the path of a GGUF file.",
    )
    assert server.requests == []


# --- what there is -------------------------------------------------------------------------------


def test_a_repository_without_models_lists_what_it_has(server: HubServer, hub: Hub) -> None:
    server.repositories["acme/Plain"] = {"config.json": b"{}", "model.safetensors": b"x" * 10}
    refused(
        hub,
        "acme/Plain",
        "acme/Plain has no GGUF files. It has: config.json, model.safetensors.",
        "Choose a GGUF conversion; its name usually ends in -GGUF, such as Plain-GGUF.",
    )


def test_a_repository_of_conversions_is_not_told_to_be_converted(server: HubServer, hub: Hub) -> None:
    server.repositories["acme/Empty-GGUF"] = {"README.md": b"soon"}
    refused(
        hub,
        "acme/Empty-GGUF",
        "acme/Empty-GGUF has no GGUF files. It has: README.md.",
        "Choose another repository with this model.",
    )


def test_an_ambiguous_quantization_lists_the_files(server: HubServer, hub: Hub) -> None:
    refused(
        hub,
        f"{REPO}:q",
        f"'q' fits several quantizations of {REPO}: Q4_K_M (256.0 KiB), Q8_0 (256.0 KiB).",
        f"Name one: {REPO}:Q4_K_M",
        UsageError,
    )
    refused(
        hub,
        f"{REPO}:Q8_X",
        f"{REPO} has no 'Q8_X'. It has: Q4_K_M (256.0 KiB), Q8_0 (256.0 KiB).",
        f"Did you mean {REPO}:Q8_0?",
        UsageError,
    )


def test_a_disk_that_is_too_small_is_told_before(server: HubServer, hub: Hub) -> None:
    server.sizes[Q4] = 1 << 60
    with pytest.raises(OutputError, match=r"needs 1048576.0 TiB of disk, and .* are free in") as caught:
        pull(name(f"{REPO}:Q4_K_M"), hub=hub)
    assert "set HF_HOME to a folder on a larger disk" in caught.value.hint
    assert server.downloads() == []


def test_a_cache_that_cannot_be_written(server: HubServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    hub = Hub(server.url, tmp_path / "file" / "hub", timeout=PATIENCE_S)
    with pytest.raises(OutputError) as caught:
        pull(name(f"{REPO}:Q4_K_M"), hub=hub)
    assert str(tmp_path / "file") in caught.value.what
    assert "cannot be written: " in caught.value.what
    assert caught.value.hint == "Check its permissions, or set HF_HOME to another folder."
    with pytest.raises(OutputError) as caught, translated(hub, REPO):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.hint == "Free some space on that disk."


def test_what_the_hub_says_of_a_repository(server: HubServer, hub: Hub) -> None:
    repository = find_repository(hub, REPO)
    assert [(model.label, model.n_bytes) for model in repository.models] == [
        ("Q4_K_M", len(DATA)),
        ("Q8_0", len(OTHER)),
    ]
