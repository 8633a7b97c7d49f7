"""The choice of the data path for a control connection: mapped memory on the node's host, else UCX or TCP; or
none.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import msgspec

from pdserve.extras import is_installed
from pdserve.kvpool.protocol.messages import Hello
from pdserve.kvpool.transports.base import Connection
from pdserve.kvpool.transports.control import ControlChannel
from pdserve.kvpool.transports.shm import ShmConnection
from pdserve.kvpool.transports.tcp.client import TcpConnection


def connect_channel(
    address: str,
    hello: Hello,
    deadline_s: float,
    tls: ssl.SSLContext | None = None,
    *,
    takes_ucx: bool = True,
) -> ControlChannel:
    """As `ControlChannel.connect`. A process that leaves the choice of the path to the node connects again
    for TCP where the node chose UCX, and it does not take that, or is without the extra `ucx`.
    """
    channel = ControlChannel.connect(address, hello, deadline_s, tls)
    takes_ucx = takes_ucx and is_installed("ucx")
    if channel.welcome.data_path != "ucx" or hello.data_path != "auto" or takes_ucx:
        return channel
    channel.close()
    return ControlChannel.connect(address, msgspec.structs.replace(hello, data_path="tcp"), deadline_s, tls)


def open_data_path(
    channel: ControlChannel,
    *,
    ucx: Mapping[str, str] | None = None,
    checksum: bool,
    deadline_s: float,
    tls: ssl.SSLContext | None = None,
    populate: bool = True,
) -> Connection:
    """A connection on the path that the node chose. It takes over the channel, also when this raises.

    `ucx`: UCX settings without their UCX_ prefix, which win over the environment. `tls`: what goes over TCP
    must be encrypted. `populate`: mapped memory is made present at once.

    Raises PoolRefused, PoolUnavailable, PoolTimeout.
    """
    if channel.welcome.data_path == "shm":
        return ShmConnection.open(channel, checksum, deadline_s, populate)
    if channel.welcome.data_path == "tcp":
        return TcpConnection.open(channel, checksum, deadline_s, tls, channel.server_name)
    # imported only if used: loading UCX costs a second and 170 MB
    from pdserve.kvpool.transports.ucx_client import UcxConnection

    return UcxConnection.open(channel, ucx or {}, checksum, deadline_s)
