"""Where a router listens."""

from __future__ import annotations

import socket

import pytest

from pdserve.errors import StartupError
from pdserve.router.server.uvicorn_server import bind
from tests.support.addresses import names_of


def test_the_first_address_of_a_name_that_this_machine_has_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", names_of("2001:db8::1", "127.0.0.1"))
    with bind("localhost", 0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_a_port_in_use_at_the_first_address_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        monkeypatch.setattr(socket, "getaddrinfo", names_of("127.0.0.2", "127.0.0.1"))
        with pytest.raises(StartupError, match="Address already in use"):
            bind("localhost", taken.getsockname()[1])


def test_a_name_of_no_address_here_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", names_of("2001:db8::1", "192.0.2.1"))
    with pytest.raises(
        StartupError, match=r"cannot listen on localhost:0: Cannot assign requested address"
    ) as no:
        bind("localhost", 0)
    assert "\n" not in str(no.value)
