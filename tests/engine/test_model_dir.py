"""Checks before anything is loaded: one line that says what, where and what to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pdserve.engine.model_dir import bind_address, check_model_dir
from pdserve.errors import StartupError
from tests.support.addresses import names_of

CONFIG = '{"architectures": ["Qwen3ForCausalLM"]}'


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, r"model path .*/model does not exist"),
        ({}, r"no Hugging Face model directory: it has no config\.json"),
        *(({"config.json": text}, r"config\.json") for text in ("{", "[]", "{}")),
        ({"config.json": CONFIG}, "has no weights"),
        ({"config.json": CONFIG, "model.safetensors": ""}, ""),
    ],
)
def test_what_is_no_model_is_named(files: dict[str, str] | None, said: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    if files is not None:
        model.mkdir()
    for name, text in (files or {}).items():
        (model / name).write_text(text)
    if not said:
        assert check_model_dir(str(model))["architectures"] == ["Qwen3ForCausalLM"]
        return
    with pytest.raises(StartupError, match=said):
        check_model_dir(str(model))


def test_a_bound_port_is_nobody_elses_before_it_listens() -> None:
    [bound] = bind_address("127.0.0.1", 0)
    with bound:
        port = bound.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is in use"):
            bind_address("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_a_port_with_old_connections_is_bound_and_listens() -> None:
    """What ended a moment ago leaves connections in TIME_WAIT."""
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = before.accept()
            accepted.close()  # this side closes first, so the port keeps the connection
            assert client.recv(1) == b""
    [bound] = bind_address("127.0.0.1", port)
    with bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.listen()


def test_an_address_that_this_machine_does_not_have_is_no_obstacle_beside_one_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Containers without IPv6 have `::1 localhost` in /etc/hosts all the same."""
    monkeypatch.setattr(socket, "getaddrinfo", names_of("2001:db8::1", "127.0.0.1"))
    [bound] = bind_address("localhost", 0)
    with bound:
        assert bound.getsockname()[0] == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", names_of("2001:db8::1", "192.0.2.1"))
    with pytest.raises(StartupError, match="cannot listen on localhost:0: Cannot assign requested address"):
        bind_address("localhost", 0)
