"""The metrics page of a server that answers, refuses and is left."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.integration.test_serve_faults import streamed
from tests.serving import TEXT, load, serving
from tests.waiting import wait_until


def test_what_a_server_does_is_counted(short_path: Path) -> None:
    with serving(partial(load, short_path, 1024), parallel=4) as server:
        assert server.figures()["answered"] == 0
        answered = [server.post(TEXT, {"prompt": "Once upon a time", "max_tokens": 6, "n": 2})[1]]
        answered.append(server.post(TEXT, {"prompt": "There was", "max_tokens": 5})[1])
        assert server.post(TEXT, {"prompt": "Once", "top_p": 7})[0] == 400
        with server.connect() as client:
            client.send(TEXT, {"prompt": "la " * 50, "max_tokens": 900, "stream": True})
            client.socket.recv(64)
        wait_until(lambda: server.figures()["abandoned"] == 1)
        wait_until(lambda: server.figures()["edgespec_sequences_in_flight"] == 0)
        told = server.figures()
        assert (told["answered"], told["refused"], told["failed"]) == (2, 1, 0)
        assert told["edgespec_up"] == 1
        tokens = sum(answer["usage"]["completion_tokens"] for answer in answered)
        assert told["edgespec_generated_tokens_total"] >= tokens
        assert told["edgespec_pass_sequences_total"] > told["edgespec_passes_total"], (
            "two answers shared passes"
        )
        assert told["edgespec_first_token_seconds_count"] >= 3
        assert told["edgespec_disk_read_bytes_total"] == 0, "the model is in memory"
        assert told["edgespec_queue_length"] == 0


def test_weights_that_are_read_from_disk_are_counted(q4_drafter_path: Path) -> None:
    with serving(partial(streamed, q4_drafter_path, 128)) as server:
        tokens = server.post(TEXT, {"prompt": "One two", "max_tokens": 3})[1]["usage"]["completion_tokens"]
        told = server.figures()
    assert told["edgespec_passes_total"] >= tokens > 0
    assert told["edgespec_disk_read_bytes_total"] > 1e6 * told["edgespec_passes_total"]
    assert told["edgespec_disk_read_bytes_per_second"] > 0
