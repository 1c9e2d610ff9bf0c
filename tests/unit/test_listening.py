"""Addresses that the server listens on."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from edgespec.cli.listening import is_local, listening, split_hosts
from edgespec.errors import UsageError

unix = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this system has no Unix sockets")


def test_addresses_are_separated_by_commas() -> None:
    assert split_hosts("127.0.0.1, [::1],/run/es.sock") == ["127.0.0.1", "::1", "/run/es.sock"]
    with pytest.raises(UsageError, match="empty address"):
        split_hosts("127.0.0.1,")


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *((host, True) for host in ("localhost", "127.9.9.9", "::1", "/run/es.sock")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.com")),
    ],
)
def test_local_addresses(host: str, local: bool) -> None:
    assert is_local(host) is local


def test_several_addresses_have_one_port() -> None:
    with listening(["127.0.0.1", "127.0.0.2"], 0) as listeners:
        names = [listener.getsockname() for listener in listeners]
        assert [name[0] for name in names] == ["127.0.0.1", "127.0.0.2"]
        port = names[0][1]
        assert names[1][1] == port
        with (
            pytest.raises(UsageError, match=rf"^Port {port} is already in use\."),
            listening(["127.0.0.1"], port),
        ):
            pass


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^Cannot listen on 192\.0\.2\.1:"), listening(["192.0.2.1"], 0):
        pass


@unix
def test_a_unix_socket_is_for_the_user_and_the_group(tmp_path: Path) -> None:
    path = tmp_path / "es.sock"
    with listening([str(path)], 0):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with pytest.raises(UsageError, match="is already in use"), listening([str(path)], 0):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


@unix
def test_the_socket_of_a_crashed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "es.sock"
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))
    with listening([str(path)], 0), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


@unix
def test_a_socket_that_another_server_has_by_now_is_left(tmp_path: Path) -> None:
    path = tmp_path / "es.sock"
    with listening([str(path)], 0) as [first], listening([str(tmp_path / "next")], 0):
        first.close()
        (tmp_path / "next").replace(path)
    assert path.exists()


@unix
@pytest.mark.parametrize("name", ["file", "missing/es.sock", "x" * 300])
def test_what_is_no_place_for_a_socket_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(UsageError, match=r"exists and is not a socket|Cannot listen on"),
        listening([str(tmp_path / name)], 0),
    ):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_a_port_in_an_address_is_refused() -> None:
    with pytest.raises(UsageError, match="--host takes no port"):
        split_hosts("127.0.0.1:80")
