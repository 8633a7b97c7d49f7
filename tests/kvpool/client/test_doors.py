"""Which of a pool's nodes a client speaks with, and what its configuration refuses."""

from __future__ import annotations

import socket

import pytest

from pdserve.errors import ConfigError
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.client.doors import Doors, is_of_this_host, nearest_first
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.settings.config_file import build_config


def names(*addresses: str) -> list[str]:
    refs = [PoolNodeRef(node=str(i), address=address) for i, address in enumerate(addresses)]
    return [ref.node for ref in nearest_first(refs)]


def test_nodes_of_this_host_come_first_those_with_a_socket_before_all() -> None:
    assert names("tcp:198.51.100.1:1", "tcp:127.0.0.1:1", "unix:/b", "tcp:localhost:1", "unix:/a")[:4] == [
        "2", "4", "1", "3",
    ]  # fmt: skip
    with pytest.raises(ConfigError):
        names("tcp:host")


def test_hosts_without_a_node_spread_over_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first = set()
    for number in range(40):
        monkeypatch.setattr(socket, "gethostname", lambda name=f"host{number}": name)
        order = names("tcp:198.51.100.1:1", "tcp:198.51.100.2:1", "tcp:198.51.100.3:1")
        assert order == names("tcp:198.51.100.1:1", "tcp:198.51.100.2:1", "tcp:198.51.100.3:1")
        first.add(order[0])
    assert first == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        (socket.gethostname(), True),
        ("198.51.100.1", False),
        ("other", False),
    ],
)
def test_whether_an_address_is_of_this_host_is_known_without_a_look_up(host: str, is_ours: bool) -> None:
    assert is_of_this_host(host) == is_ours


class Link:
    def __init__(self, ref: PoolNodeRef) -> None:
        self.ref, self.reachable, self.closed = ref, True, False

    def close(self) -> None:
        self.closed = True


def test_the_nodes_that_one_names_are_asked_while_it_is_down_and_those_that_left_are_not() -> None:
    doors = Doors([PoolNodeRef(node="a", address="tcp:198.51.100.1:1")], Link)
    [first] = doors
    doors.learn(
        [NodeAddress("a", "tcp:other:1"), NodeAddress("b", "tcp:198.51.100.2:1"), NodeAddress("c", "unix:/c")]
    )
    assert doors.links["a"] is first  # at the address that is configured
    assert doors.chosen is doors.links["c"]  # it is of this host
    doors.links["c"].reachable = first.reachable = False
    assert doors.chosen is doors.links["b"]
    was = dict(doors.links)
    doors.learn([NodeAddress("b", "tcp:198.51.100.3:1")])
    assert doors.links.keys() == {"a", "b"}
    assert [was[node].closed for node in "abc"] == [False, True, True]
    doors.close()
    doors.learn([NodeAddress("d", "unix:/d")])
    assert "d" not in doors.links


def test_a_configured_node_stays_before_those_that_are_as_near() -> None:
    with_own = Doors([PoolNodeRef(node="b", address="unix:/b")], Link)
    with_own.learn([NodeAddress(node=name, address=f"unix:/{name}") for name in "abc"])
    assert [link.ref.node for link in with_own] == ["b", "a", "c"]


def test_a_certificate_without_an_authority_of_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tls\.ca is needed"):
        build_config(PoolClientConfig, {"tls": {"certificate": "/c", "key": "/k"}}, source="f")
