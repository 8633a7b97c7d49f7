"""Where events may be published."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.kvpool.node.config.events import EventsConfig


@pytest.mark.parametrize(
    "address", ["", "ipc:///run/a/b", "tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://localhost:5557"]
)
def test_addresses_of_this_host(address: str) -> None:
    assert EventsConfig(address=address).address == address


@pytest.mark.parametrize(
    "address", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://10.0.0.5:1"]
)
def test_other_hosts_only_where_all_are_trusted(address: str) -> None:
    with pytest.raises(ValueError, match="events ask for no token"):
        EventsConfig(address=address)
    EventsConfig(address=address, trusted_network=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"address": "127.0.0.1:5557"}, "must be like"),
        ({"address": "tcp://127.0.0.1"}, "must be like"),
        ({"address": "tcp://127.0.0.1:99999"}, "must be like"),
        ({"address": "inproc://x"}, "must be like"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EventsConfig(**options)
