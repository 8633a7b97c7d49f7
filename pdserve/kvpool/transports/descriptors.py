"""How a client gets the memory of a node on its host: as descriptors, over a Unix socket that the node names.

A client opens no file that a node names: whoever listens at a node's address could name any file of the
client's user, and a put would overwrite it. It connects to a Unix socket, says nothing, and takes what comes:

    node      accepts, asks the kernel who connected, sends two descriptors (SCM_RIGHTS), closes
    client    asks the kernel who listens, takes the descriptors: the arena, and its slot table

Both go on only if the other is of their own user. A false node on another host has no descriptors to send,
and the only sockets that it could name are those of this user's real nodes.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Final

from pdserve.kvpool.transports.dial import connect_unix, peer_uid

GREETING: Final = b"m"  # descriptors travel with at least one byte
FILES: Final = 2


class Foreign(Exception):
    """The socket does not give out a node's memory, or not to us. Its text says why."""


def receive_descriptors(socket_path: str, deadline_s: float) -> tuple[int, int]:
    """Descriptors of the arena and of its table; the caller closes them.

    Raises Foreign, ConnectionError when nobody serves the socket any more, TimeoutError, or OSError.
    """
    if not socket_path.startswith("/") or "\0" in socket_path:
        raise Foreign(f"{socket_path!r} is no path of a socket")
    directory, _, name = socket_path.rpartition("/")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_left_s(deadline_s))
        at = os.open(directory or "/", os.O_PATH | os.O_DIRECTORY)
        try:
            connect_unix(sock, f"/proc/self/fd/{at}/{name}", deadline_s)  # a socket's path must be short
        finally:
            os.close(at)
        if peer_uid(sock) != os.geteuid():
            raise Foreign("it belongs to another user")
        sock.settimeout(_left_s(deadline_s))
        data, fds, _, _ = socket.recv_fds(sock, len(GREETING), FILES, socket.MSG_CMSG_CLOEXEC)
    if data and len(fds) == FILES:
        return fds[0], fds[1]
    for fd in fds:
        os.close(fd)
    if data:
        raise Foreign("it gives out something else")
    raise ConnectionResetError("it was closed")


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
