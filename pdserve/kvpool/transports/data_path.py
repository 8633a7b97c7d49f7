"""The choice of the data path for a control connection: mapped memory on the node's host, else UCX or TCP; or
none.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from pdserve.kvpool.transports.base import Connection
from pdserve.kvpool.transports.control import ControlChannel
from pdserve.kvpool.transports.pinning import PinningConnection
from pdserve.kvpool.transports.shm import ShmConnection
from pdserve.kvpool.transports.tcp.client import TcpConnection


def open_data_path(
    channel: ControlChannel,
    *,
    ucx: Mapping[str, str],
    checksum: bool,
    deadline_s: float,
    tls: ssl.SSLContext | None = None,
    populate: bool = True,
) -> Connection:
    """A connection on the path that the node chose. It takes over the channel, also when this raises.

    `ucx`: UCX settings without their UCX_ prefix. `tls`: what goes over TCP must be
    encrypted. `populate`: mapped memory is made present at once.

    Raises PoolRefused, PoolUnavailable, PoolTimeout.
    """
    if channel.welcome.data_path == "shm":
        return ShmConnection.open(channel, checksum, deadline_s, populate)
    if channel.welcome.data_path == "tcp":
        return TcpConnection.open(channel, checksum, deadline_s, tls, channel.server_name)
    if channel.welcome.data_path == "none":
        return PinningConnection(channel)
    # imported only if used: loading UCX costs a second and 170 MB
    from pdserve.kvpool.transports.ucx_client import UcxConnection

    return UcxConnection.open(channel, ucx, checksum, deadline_s)
