"""What clients are told before the model is loaded."""

from __future__ import annotations

import http.client
import json
import socket

from edgespec.serving.server import told_to_wait
from tests.waiting import PATIENCE_S


def test_requests_are_told_that_the_model_is_being_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def asked(method: str, path: str) -> tuple[int, str | None, dict[str, object]]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            connection.request(method, path, "{}" if method == "POST" else None)
            response = connection.getresponse()
            answer = json.loads(response.read())
            connection.close()
            return response.status, response.getheader("Retry-After"), answer

        with told_to_wait([listener]):
            status, _, answer = asked("GET", "/health")
            assert (status, answer) == (503, {"status": "loading", "reason": "The model is being loaded."})
            for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
                status, retry, answer = asked("POST", path)
                assert (status, retry) == (503, "5")
                assert "being loaded" in str(answer["error"])
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
            accepted, address = listener.accept()
            accepted.close()
            assert address == connection.getsockname(), "further connections wait for the next server"
