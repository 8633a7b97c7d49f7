"""Nodes that find each other by a DNS name with the addresses of all."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pdserve.discovery import dns
from pdserve.discovery.dns import DnsWatch
from pdserve.kvpool.node.peers import joining
from tests.support.kvpool.clustered import ring, running
from tests.support.waiting import until_in_loop


class Names:
    """A resolver for nodes that listen on one port of several loopback addresses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        monkeypatch.setattr(joining, "DnsWatch", partial(DnsWatch, resolve=self.resolve))
        monkeypatch.setattr(dns, "LOOKUP_S", 0.2)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("pool", self.port)
        return list(self.addresses)

    def node(self, address: str, advertise: str = "") -> dict[str, Any]:
        """Options of a node that listens there."""
        cluster = {"peers": [f"dns+tcp:pool:{self.port}"], "advertise": advertise}
        return {"listen": [f"tcp:{address}:{self.port}"], "insecure": True, "cluster": cluster}


async def test_nodes_find_each_other_by_the_addresses_of_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them does not know that one of the addresses is its own."""
    names = Names(monkeypatch)
    names.addresses = ["127.0.0.1"]
    async with running(tmp_path, "a", **names.node("127.0.0.1", f"tcp:localhost:{names.port}")) as a:
        names.addresses += ["127.0.0.2", "127.0.0.9"]  # nobody is at the last one
        async with running(tmp_path, "b", **names.node("127.0.0.2")) as b:
            await until_in_loop(lambda: ring(a) == ring(b) == "ab")
            assert a.gossip.joining.seeds.keys() <= {f"tcp:127.0.0.{i}:{names.port}" for i in (1, 2, 9)}
        names.addresses = ["127.0.0.1", "127.0.0.3"]
        async with running(tmp_path, "c", **names.node("127.0.0.3")) as c:
            await until_in_loop(lambda: ring(a)[-1] == "c" and "c" in ring(c))
            await until_in_loop(lambda: f"tcp:127.0.0.2:{names.port}" not in a.gossip.joining.seeds)
