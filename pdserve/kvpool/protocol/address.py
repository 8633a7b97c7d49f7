"""Addresses of nodes, as text and as records. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from pdserve.errors import (
    ConfigError,
)

LOOPBACK_DEVICE = "lo"


@dataclass(frozen=True)
class UnixAddress:
    """A Unix stream socket."""

    path: str


@dataclass(frozen=True)
class TcpAddress:
    """A TCP socket; `host` is a name or an address."""

    host: str
    port: int


def parse_address(address: str) -> UnixAddress | TcpAddress:
    """Read "unix:/path" or "tcp:host:port" (IPv6 as "tcp:[::1]:port"). Raises ConfigError."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return UnixAddress(rest)
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdecimal() and int(port) < 65536:
        return TcpAddress(host.strip("[]"), int(port))
    raise ConfigError(f'pool address "{address}" is not "unix:/path" or "tcp:host:port"')


def is_remote(address: str) -> bool:
    """Whether clients on other hosts can connect to it."""
    parsed = parse_address(address)
    return isinstance(parsed, TcpAddress) and not is_loopback(parsed.host)


def is_ipv6(host: str) -> bool:
    """Whether this is an IPv6 address, and not that of a client that came by IPv4. `host`: a name or an
    address.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None


def is_loopback(host: str) -> bool:
    """Whether only this host reaches it. `host`: a name or an address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
