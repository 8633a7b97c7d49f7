"""Connections of one data path, for tests of nodes and of data paths."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping

from pdserve.kvpool.admin.node_client import NodeClient
from pdserve.kvpool.protocol.messages import DataPathChoice, StatusReport
from pdserve.kvpool.transports.base import Connection
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from pdserve.kvpool.transports.data_path import open_data_path
from pdserve.kvpool.transports.shm import host_id


def connect(
    address: str,
    deadline_s: float,
    data_path: DataPathChoice = "shm",
    *,
    client: str = "test",
    token: str = "",
    checksum: bool = True,
    ucx: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Connection:
    """Raises PoolError."""
    hello = make_hello(client, host_id(), data_path, token)
    channel = ControlChannel.connect(address, hello, deadline_s, tls)
    return open_data_path(channel, ucx=ucx or {}, checksum=checksum, deadline_s=deadline_s, tls=tls)


def fetch_status(address: str, deadline_s: float) -> StatusReport:
    """How the node is. Raises PoolUnavailable, PoolTimeout, PoolRefused, ConfigError."""
    with NodeClient(address, timeout_s=deadline_s - time.monotonic()) as node:
        return node.status()
