"""A worker's HTTP port also as a Unix socket, by which a router of the same host reaches it for less.

The socket is in Linux' abstract namespace: it is no file, so nothing stays behind, and it is seen within one
network namespace alone, as loopback addresses are. Its name has the port, and is random and new with each
start. The worker tells it in `/pd/info`. A router elsewhere finds nobody of that name, and keeps to TCP. So
does one that knows the worker by another port: there is a proxy between, which is meant to be passed.

TCP's port of a worker can be taken by others after its end, and so could the name. So a router sends nothing
before it has seen that the kernel names its own user as the one who listens.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from typing import Final

NAME_PATTERN: Final = r"^(pdserve-http-[0-9]{1,5}-[0-9a-f]{32})?\Z"
"""Names of such sockets. Empty: there is none. A worker cannot send a router to other sockets."""
BACKLOG: Final = 2048  # as uvicorn's
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: process, user, group


def new_name(port: int) -> str:
    """A name that nobody has, for the server of this port."""
    return f"pdserve-http-{port}-{secrets.token_hex(16)}"


def is_of_port(name: str, port: int) -> bool:
    """Whether the name is that of the server of this port."""
    return name.startswith(f"pdserve-http-{port}-")


def listen_here(name: str) -> socket.socket:
    """A socket on which this process listens. Raises OSError."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listening.bind(f"\0{name}")
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def connect_here(name: str) -> socket.socket | None:
    """A connection to the process of this user that listens there; None: there is none, or it has no room.
    Does not block.
    """
    connected = None
    try:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        connected.connect(f"\0{name}")
        found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(found)[1] == os.geteuid():
            return connected
    except OSError:
        pass
    if connected is not None:
        connected.close()
    return None
