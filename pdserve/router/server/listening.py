"""The listening socket of a server process."""

from __future__ import annotations

import socket

from pdserve.errors import StartupError

BACKLOG = 4096


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; `shared`: one of several on the port. Raises StartupError when the address cannot
    be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop what uses the port, or choose another "
            "with --port"
        ) from None
    listening.setblocking(False)
    return listening
