"""TCP ports of this host: which are free, and whether one may be used."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from typing import Final

from pdserve.errors import StartupError

AUTOMATIC_PORTS: Final = range(20_000, 32_000)
"""Below Linux's range for outgoing connections, so that none of those takes a port before its process binds
it.
"""


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on the port now. Raises StartupError when the host is not one of ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise StartupError(f"cannot listen on host '{host}': {error.strerror}") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no obstacle
        try:
            probe.bind(address)
        except PermissionError:
            raise StartupError(f"port {port} needs privileges: give one above 1023") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return True


def free_ports(host: str, choose: random.Random) -> Iterator[int]:
    """Ports on which nothing listens, none given twice. Raises StartupError when there are no more."""
    for port in choose.sample(AUTOMATIC_PORTS, len(AUTOMATIC_PORTS)):
        if is_free(host, port):
            yield port
    raise StartupError(f"no free port from {AUTOMATIC_PORTS.start} to {AUTOMATIC_PORTS.stop - 1} on {host}")
