"""A Unix socket of this host is found by its name, and only taken where the same user listens."""

from __future__ import annotations

import os
import re

import pytest

from pdserve.discovery import host_socket
from pdserve.discovery.host_socket import NAME_PATTERN, connect_here, listen_here, new_name


def test_a_listener_is_found_by_its_name_until_it_closes() -> None:
    name = new_name(8100)
    with listen_here(name) as listening:
        connected = connect_here(name)
        assert connected is not None
        accepted, _ = listening.accept()
        with connected, accepted:
            connected.send(b"here")
            assert accepted.recv(16) == b"here"
    assert connect_here(name) is None, "nothing stays behind"


def test_names_are_new_and_no_other_socket_has_one() -> None:
    names = {new_name(8100) for _ in range(100)}
    assert len(names) == 100
    assert all(re.match(NAME_PATTERN, name) for name in (*names, ""))
    for other in (
        "/var/run/docker.sock",
        "\0x",
        "pdserve-http-",
        f"{new_name(8100)}/x",
        f"{new_name(8100)}\n",
    ):
        assert not re.match(NAME_PATTERN, other)


def test_the_socket_of_another_user_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    name, own = new_name(8100), os.geteuid()
    with listen_here(name):
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        assert connect_here(name) is None


def test_a_listener_without_room_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_socket, "BACKLOG", 0)
    name = new_name(8100)
    with listen_here(name):
        first, second = connect_here(name), connect_here(name)
        assert first is not None
        first.close()
        assert second is None


def test_a_name_is_had_by_one() -> None:
    name = new_name(8100)
    with listen_here(name), pytest.raises(OSError, match="in use"):
        listen_here(name)
