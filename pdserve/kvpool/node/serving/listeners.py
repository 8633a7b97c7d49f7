"""Where a node listens: Unix sockets and TCP."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pdserve.errors import StartupError
from pdserve.kvpool.protocol.address import TcpAddress, UnixAddress, parse_address
from pdserve.security.private_directory import private_directory

BACKLOG = 4096  # Linux's own bound; a client that finds a Unix socket's full is refused at once
UNIX_PATH_BYTES = 107  # sun_path, less its end


class Listeners:
    """A node's listening sockets."""

    def __init__(self, inherited: Mapping[str, Sequence[int]]) -> None:
        """`inherited`: descriptors of listening sockets by address, from this process's earlier program."""
        self._inherited = dict(inherited)
        self._servers: list[tuple[str, asyncio.Server]] = []

    async def open(self, addresses: Sequence[str], accept: Callable[[], asyncio.Protocol]) -> None:
        """Serve at these addresses, and close what was inherited for others. Raises StartupError; the
        sockets before the failed one are open then.
        """
        for address in addresses:
            inherited: list[int | None] = [*self._inherited.pop(address, [])]
            for fd in inherited or [None]:
                self._servers.append((address, await listen(address, accept, fd)))
        for address, unused in self._inherited.items():  # the configuration has changed
            for unused_fd in unused:
                os.close(unused_fd)
            remove_socket(address)

    def copies(self) -> dict[str, list[int]]:
        """Copies of the sockets, by address: for the next program. Raises OSError; then there are none."""
        passed: dict[str, list[int]] = {}
        try:
            for address, server in self._servers:
                for sock in server.sockets:
                    passed.setdefault(address, []).append(os.dup(sock.fileno()))
        except OSError:
            close_all(passed)
            raise
        return passed

    def close(self) -> None:
        """Accept no more connections. Copies of the sockets keep their queues of new clients."""
        for _, server in self._servers:
            server.close()

    def remove(self) -> None:
        """Remove the Unix sockets."""
        for address, _ in self._servers:
            remove_socket(address)


def close_all(listening: dict[str, list[int]]) -> None:
    """Copies that are not needed."""
    for fds in listening.values():
        for fd in fds:
            os.close(fd)


async def listen(
    address: str, accept: Callable[[], asyncio.Protocol], inherited: int | None = None
) -> asyncio.Server:
    """Serve at the address, with the listening socket that is there already if there is. Raises
    StartupError.
    """
    loop = asyncio.get_running_loop()
    parsed = parse_address(address)
    try:
        if inherited is not None:
            sock = socket.socket(fileno=inherited)
            if isinstance(parsed, TcpAddress):
                return await loop.create_server(accept, sock=sock)
            return await loop.create_unix_server(accept, sock=sock)
        if isinstance(parsed, TcpAddress):
            return await loop.create_server(accept, parsed.host, parsed.port, backlog=BACKLOG)
        _prepare_socket(address, Path(parsed.path))
        return await loop.create_unix_server(accept, parsed.path, backlog=BACKLOG)
    except OSError as error:
        hint = (
            "stop the process that uses it, or choose another"
            if error.errno == errno.EADDRINUSE
            else "choose another"
        )
        raise StartupError(f"cannot listen at {address}: {os.strerror(error.errno or 0)}: {hint}") from error


def _prepare_socket(address: str, path: Path) -> None:
    """Remove a socket file without a process that listens. Raises StartupError when one listens."""
    if len(os.fsencode(path)) > UNIX_PATH_BYTES:
        raise StartupError(
            f"cannot listen at {address}: a Unix socket's path has at most {UNIX_PATH_BYTES} bytes"
        )
    if not path.parent.exists():  # a place that is there was chosen by a person, like /tmp
        try:
            private_directory(path.parent)
        except OSError as error:
            raise StartupError(
                f"cannot listen at {address}: {error.strerror}: make its directory this user's own, or "
                "choose another"
            ) from error
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass  # a full backlog or a stopped process
    raise StartupError(f"cannot listen at {address}: another process does: stop it, or choose another path")


def remove_socket(address: str) -> None:
    """Remove a Unix socket that we listened at."""
    parsed = parse_address(address)
    if isinstance(parsed, UnixAddress):
        Path(parsed.path).unlink(missing_ok=True)
