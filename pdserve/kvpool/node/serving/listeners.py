"""Where a node listens: Unix sockets and TCP."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from pdserve.errors import StartupError
from pdserve.kvpool.node.upgrade.handover import Handover
from pdserve.kvpool.protocol.address import TcpAddress, UnixAddress, parse_address

BACKLOG = 4096  # Linux's own bound; a client that finds a Unix socket's full is refused at once
UNIX_PATH_BYTES = 107  # sun_path, less its end


class Listeners:
    """A node's listening sockets."""

    def __init__(self, inherited: Handover | None) -> None:
        """`inherited`: from this process's earlier program, with sockets that listen already."""
        self._inherited = dict(inherited.listening) if inherited is not None else {}
        self._servers: list[tuple[str, asyncio.Server]] = []
        self._own: list[asyncio.Server] = []  # those that were not inherited

    async def open(self, addresses: Sequence[str], accept: Callable[[], asyncio.Protocol]) -> None:
        """Serve at these addresses, and no more where others were inherited. Raises StartupError; those that
        were opened are open then.
        """
        for address in addresses:
            inherited: list[int | None] = [*self._inherited.pop(address, [])]
            for fd in inherited or [None]:
                server = await listen(address, accept, fd)
                self._servers.append((address, server))
                if fd is None:
                    self._own.append(server)
        for address, unused in self._inherited.items():  # the configuration has changed
            for unused_fd in unused:
                os.close(unused_fd)
            remove_socket(address)

    def hand_over(self) -> dict[str, list[int]]:
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

    def withdraw(self) -> None:
        """Close what was not inherited: the next program has no copies, and opens it anew."""
        for server in self._own:
            server.close()

    def close(self) -> None:
        """Accept nobody any more."""
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
    """Remove a socket that nobody answers at. Raises StartupError when somebody does."""
    if len(os.fsencode(path)) > UNIX_PATH_BYTES:
        raise StartupError(
            f"cannot listen at {address}: a Unix socket's path has at most {UNIX_PATH_BYTES} bytes"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
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
            pass  # a full backlog or a stopped process: somebody is there
    raise StartupError(f"cannot listen at {address}: another process does: stop it, or choose another path")


def remove_socket(address: str) -> None:
    """Remove a Unix socket that we listened at."""
    parsed = parse_address(address)
    if isinstance(parsed, UnixAddress):
        Path(parsed.path).unlink(missing_ok=True)
