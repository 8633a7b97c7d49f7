"""The listening sockets of a router: its parent process makes them, and imports no server for that."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from pdserve.errors import StartupError

BACKLOG = 4096
LAST_WORD_S = 1.0
"""How long a client that must be cut off is given to take the error."""
NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""Of an address that this machine does not have: /etc/hosts names ::1 also where IPv6 is turned off."""


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket at the first address of `host` that this machine has; `shared`: one of several on
    the port. Raises StartupError when the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}") from None
    lacking = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, kind, protocol, _, address in found:
        try:
            return _listening(family, kind, protocol, address, shared=shared)
        except OSError as error:
            lacking = error
            if error.errno not in NOT_HERE:
                break
    raise StartupError(
        f"cannot listen on {host}:{port}: {lacking.strerror}; stop what uses the port, or choose another "
        "with --port"
    )


def _listening(family: int, kind: int, protocol: int, address: Any, *, shared: bool) -> socket.socket:
    """Raises OSError."""
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
