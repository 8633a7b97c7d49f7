"""The choice of a client's transport: the configured one, or with `auto` that of the node."""

from __future__ import annotations

import contextlib

from pdserve.errors import ConfigError, StartupError
from pdserve.extras import how_to_install, is_installed
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.transports.base import Connection
from pdserve.kvpool.transports.control import make_hello
from pdserve.kvpool.transports.data_path import connect_channel, open_data_path
from pdserve.kvpool.transports.shm import host_id
from pdserve.security.tls import Certificates


class ConfiguredConnector:
    """Connects as the configuration says. With `auto` the node decides: mapped memory on its own host, else
    TCP. UCX opens ports in this process that own it, so a client takes it only where it is told to.

    `populate`: mapped memory is made present at once, for a client that will use all of it many times.
    """

    def __init__(self, config: PoolClientConfig, name: str, *, populate: bool = True) -> None:
        """Raises ConfigError: what the configured path needs is not installed."""
        self._config = config
        self._name = name
        self._populate = populate
        self._host_id = host_id()
        self._certificates = Certificates(config.tls)
        if config.data_path == "ucx" and not is_installed("ucx"):
            raise ConfigError(f'pool.data_path = "ucx" needs a library: {how_to_install("ucx")}')
        if config.data_path == "ucx":  # load now: an operation's time-out may be shorter than the loading
            _load_ucx()

    def connect(self, address: str, deadline_s: float) -> Connection:
        """See `Connector.connect`. Raises PoolUnavailable, PoolTimeout or PoolRefused."""
        config = self._config
        hello = make_hello(self._name, self._host_id, config.data_path, config.token)
        tls = self._certificates.client_context
        channel = connect_channel(address, hello, deadline_s, tls, takes_ucx=False)
        return open_data_path(
            channel,
            checksum=config.checksum,
            deadline_s=deadline_s,
            tls=tls,
            populate=self._populate,
        )


def _load_ucx() -> None:
    """Load UCX, which costs a second of CPU time and 170 MB."""
    from pdserve.kvpool.transports.ucx import UcxLibrary

    with contextlib.suppress(StartupError):  # `connect` raises it again
        UcxLibrary()


def connector_for(config: PoolClientConfig, name: str, *, populate: bool = True) -> ConfiguredConnector:
    """The connector for this configuration. `name`: the client's name in the node's log."""
    return ConfiguredConnector(config, name, populate=populate)
